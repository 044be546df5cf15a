"""Signals of the scorer's prefill of a prompt: all that a predictor may see before the model answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tasks.contracts import InputError, PrefillRouting, TokenScores
from tasks.risk.fwp import (
    MEASURED,
    log_fwp,
    mean_over_picks,
    measured_weight,
    normalised,
    prompt_tokens,
    segment_mean,
    separable,
    token_strength,
    weighted_log_ppl,
)


def prefill_signals(
    scores: TokenScores, routing: PrefillRouting, load: np.ndarray, strengths: Sequence[str], align: str
) -> pd.DataFrame:
    """One row a request [R]: log_ppl, log_length, routing_frequency, log_fwp_<strength> of each.

    `load` [L, E] is the calibration load. Losses are the scorer's on the prompt, without the prediction made
    from position 0; log_length is the log of the prompt's tokens.
    """
    tokens = prompt_tokens(scores, routing, align)
    signals = {
        "log_ppl": segment_mean(tokens.nll, tokens.offset),
        "log_length": np.log(np.asarray(scores.prompt_length, dtype=np.float64)),
        "routing_frequency": routing_frequency(routing, load),
    }
    for name in strengths:
        chosen = token_strength(routing, name)[tokens.position]
        signals[f"log_fwp_{name}"] = log_fwp(tokens.nll, chosen, tokens.offset)
    return pd.DataFrame(signals)


def fragility_signals(
    scores: TokenScores, routing: PrefillRouting, phi: Mapping[str, np.ndarray], align: str
) -> pd.DataFrame:
    """One row a request [R]: separable_<i> [nats] and log_fwp_measured_<i> of every instance i of `phi`, [L, E] each.

    Raises InputError where a phi is of another model or not finite.
    """
    tokens = prompt_tokens(scores, routing, align)
    signals = {}
    for name, own in phi.items():
        if own.shape != routing.router_row_norm.shape or not np.isfinite(own).all():
            raise InputError(
                f"artifacts/decomposition: the fragility of {name} is {own.shape} (layers, experts) or not finite, "
                f"expected finite {routing.router_row_norm.shape}; run decompose_damage again"
            )
        weight = normalised(measured_weight(routing, own)[tokens.position], tokens.offset)
        signals[f"separable_{name}"] = separable(routing, own)
        signals[f"log_fwp_{MEASURED}_{name}"] = weighted_log_ppl(tokens.nll, weight, tokens.offset)
    return pd.DataFrame(signals, index=range(len(scores.ids)))


def routing_frequency(routing: PrefillRouting, load: np.ndarray) -> np.ndarray:
    """Mean over a prompt's tokens, the layers they pass, and picks, of the expert's share of its layer's load [R].

    Raises InputError where `load` [L, E] is of another model or has a layer without load.
    """
    if load.shape != routing.router_row_norm.shape:
        raise InputError(
            f"artifacts/experts counts {load.shape} (layers, experts), the scorer's routing has "
            f"{routing.router_row_norm.shape}: they are of different models; run measure_experts again"
        )
    total = load.sum(axis=1, keepdims=True)
    if (total <= 0).any():
        raise InputError(f"artifacts/experts: MoE layer {int(np.argmin(total))} got no calibration token")
    share = load / total
    layer = np.arange(routing.index.shape[1])[None, :, None]
    chosen = mean_over_picks(share[layer, routing.index], routing.visited)
    return segment_mean(chosen, routing.offset.astype(np.int64))
