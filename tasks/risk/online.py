"""Signals of a prompt from the scorer's prefill, FWP among them, in one pass: while it runs, every MoE layer adds
its share to a few running sums per token, and the losses that the prefill yields are weighted by them afterwards.

The figures are those of tasks/risk/features.py, which reads recorded routing [T, L, k]; here nothing is kept
per layer (arXiv 2609.12550 measures 3.1 % and 4.9 % overhead at 512 and 1,024 tokens; benchmarks/fwp_overhead.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.halves import start_token
from tasks.moe.prefill import PrefillBatch, next_token_nll, prefill
from tasks.moe.registry import moe_layers
from tasks.moe.strength import PickValues
from tasks.risk.fwp import (
    ALIGNMENTS,
    MEASURED,
    STRENGTHS,
    log_fwp,
    normalised,
    segment_mean,
    weighted_log_ppl,
)

LEAST_TOKENS = 3  # of a prompt: the prediction made from position 0 is not scored


@dataclass(frozen=True)
class Signals:
    """What to read off a prefill.

    `fragility`: instance -> phi [L, E] in nats, of the damage that is predicted; each gives the column
    separable_<instance>, and log_fwp_measured_<instance> where "measured" is among the strengths. `load` [L, E]:
    calibration load, for routing_frequency.
    """

    align: str
    strengths: Sequence[str] = (*STRENGTHS, MEASURED)
    fragility: Mapping[str, np.ndarray] = field(default_factory=dict)
    load: np.ndarray | None = None

    def __post_init__(self) -> None:
        unknown = sorted({*self.strengths} - {*STRENGTHS, MEASURED})
        if unknown or self.align not in ALIGNMENTS:
            raise ValueError(
                f"strengths {self.strengths} and align '{self.align}': expected some of {(*STRENGTHS, MEASURED)}, and "
                f"one of {ALIGNMENTS}"
            )


def read_signals(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[str],
    signals: Signals,
    batch_tokens: int,
    label: str,
    progress: bool = True,
) -> pd.DataFrame:
    """One row a prompt [R], in the order of `prompts` (token ids, at least 3 each): prompt_tokens, log_ppl,
    log_length, routing_frequency, log_fwp_<strength>, separable_<instance>, log_fwp_measured_<instance>.

    `ids` name the prompts in errors. An encoder-decoder's encoder reads the first half, as in scoring.
    Raises InputError on a loss that is not a number.
    """
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    if (lengths < LEAST_TOKENS).any():
        raise ValueError(
            f"a prompt of {lengths.min()} tokens has no scored prediction: {LEAST_TOKENS} are needed"
        )
    in_halves = bool(model.config.is_encoder_decoder)
    if in_halves and signals.fragility:
        raise ValueError("fragility is not defined for encoder-decoders")
    splits = lengths // 2
    # The last token of a decoder's half is predicted and never read, but the response's tokens follow it.
    tail = [start_token(model)] if in_halves else []
    sequences = [[*prompt, *tail] for prompt in prompts]
    first = np.maximum(splits, 2) if in_halves else np.full_like(lengths, 2)
    found: dict[str, np.ndarray] = {}
    values = pick_values(model, signals)
    run = prefill(
        model, sequences, batch_tokens, label, splits=splits.tolist(), progress=progress, values=values
    )
    for batch in run:
        rows = np.array(batch.rows)
        nll, offset = prompt_losses(model, batch, first[rows], lengths[rows])
        if not np.isfinite(nll).all():
            place = int(np.flatnonzero(~np.isfinite(nll))[0])
            broken = batch.rows[int(np.searchsorted(offset, place, side="right")) - 1]
            raise InputError(
                f"the loss of prompt '{ids[broken]}' is not a finite number; the scorer's checkpoint or its "
                "quantization is broken, or score_requests.compute_dtype is too narrow"
            )
        own = batch_signals(batch, values, signals, nll, first[rows], lengths[rows])
        for name, column in own.items():
            found.setdefault(name, np.empty(len(prompts)))[rows] = column
    frame = pd.DataFrame({"prompt_tokens": lengths})
    return pd.concat([frame, pd.DataFrame(found)], axis=1)


def pick_values(model: PreTrainedModel, signals: Signals) -> PickValues:
    """What the prefill must sum for these signals; tables are named after the columns that they become."""
    chosen: dict[str, np.ndarray] = {}
    if "router_row_norm" in signals.strengths:
        norm = (
            torch.stack([layer.router_rows().float().norm(dim=1) for layer in moe_layers(model)])
            .cpu()
            .numpy()
        )
        chosen["router_row_norm"] = norm / norm.mean(axis=1, keepdims=True)
    if signals.load is not None:
        chosen["routing_frequency"] = signals.load / signals.load.sum(axis=1, keepdims=True)
    weighted: dict[str, np.ndarray] = {}
    for instance, phi in signals.fragility.items():
        weighted[f"separable_{instance}"] = phi
        if MEASURED in signals.strengths:
            weighted[f"log_fwp_{MEASURED}_{instance}"] = np.maximum(phi, 0)
    return PickValues("gate_prob" in signals.strengths, chosen, weighted)


def prompt_losses(
    model: PreTrainedModel, batch: PrefillBatch, first: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Losses [M] float64 of the tokens `first` [B] .. `lengths` [B] of each row, and [B + 1] where each row's
    begin."""
    scored = _between(batch, first, lengths)[:, 1:]
    losses = next_token_nll(model, batch.hidden[:, :-1][scored], batch.ids[:, 1:][scored])
    return losses.cpu().numpy().astype(np.float64), np.concatenate([[0], np.cumsum(lengths - first)])


def batch_signals(
    batch: PrefillBatch,
    values: PickValues,
    signals: Signals,
    nll: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
) -> dict[str, np.ndarray]:
    """The columns of `read_signals` for the rows of one batch; `nll` [M] of `prompt_losses`."""
    assert batch.sums is not None
    scored = _between(batch, first, lengths)
    at_scored = batch.sums[scored] if signals.align == "token" else batch.sums[:, :-1][scored[:, 1:]]
    layers = torch.stack(batch.visited).sum(dim=0)  # [B, S] that a token passes
    passed = layers[scored] if signals.align == "token" else layers[:, :-1][scored[:, 1:]]
    sums = dict(zip(values.columns, at_scored.T.cpu().numpy(), strict=True))
    counted = passed.cpu().numpy()
    offset = np.concatenate([[0], np.cumsum(lengths - first)])
    found = {"log_ppl": segment_mean(nll, offset), "log_length": np.log(lengths.astype(np.float64))}
    for name in signals.strengths:
        if name == MEASURED:
            continue  # an instance's own: below
        found[f"log_fwp_{name}"] = log_fwp(nll, sums[name] / counted, offset)
    whole = _between(batch, np.zeros_like(first), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for place, name in enumerate(values.columns):
        if name == "routing_frequency":
            found[name] = segment_mean((batch.sums[..., place] / layers)[whole].cpu().numpy(), starts)
        elif name.startswith("separable_"):
            found[name] = segment_mean(batch.sums[..., place][whole].cpu().numpy(), starts)
        elif name.startswith(f"log_fwp_{MEASURED}_"):
            found[name] = weighted_log_ppl(nll, normalised(sums[name], offset), offset)
    return found


def _between(batch: PrefillBatch, first: np.ndarray, stop: np.ndarray) -> torch.Tensor:
    """[B, S] bool, True from place `first` [B] of a row to before `stop` [B]."""
    place = torch.arange(batch.ids.shape[1])
    return (place >= torch.from_numpy(first)[:, None]) & (place < torch.from_numpy(stop)[:, None])
