"""Signals of the scorer's prefill of a prompt: all that a predictor may see before the model answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tasks.contracts import InputError, PrefillRouting, TokenScores
from tasks.risk.fwp import log_fwp, mean_over_picks, prompt_tokens, segment_mean, token_strength


def prefill_signals(
    scores: TokenScores,
    routing: PrefillRouting,
    load: np.ndarray,
    strengths: Sequence[str],
    align: str,
    strength: str,
) -> pd.DataFrame:
    """One row a request [R]: log_ppl, log_length, routing_frequency, log_fwp_<strength> of each, and log_fwp.

    `load` [L, E] is the calibration load. log_fwp is the column of the `strength` in use. Losses are the
    scorer's on the prompt, without the prediction made from position 0; log_length is the log of the
    prompt's tokens.
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
    signals["log_fwp"] = signals[f"log_fwp_{strength}"]
    return pd.DataFrame(signals)


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
