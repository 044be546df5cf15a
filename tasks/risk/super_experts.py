"""The few experts that carry the attention sink at position 0: found by cheap estimates, judged by exact swaps.

A sink's expert sees one token a sequence, with activations hundreds of times the usual ones, and its error
reaches every later position; so a handful of experts may hold most of an instance's damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.risk.damage import DAMAGES
from tasks.risk.swaps import SwapLosses


def candidates(scores: Sequence[np.ndarray], count: int) -> list[int]:
    """The highest of each of the `scores` [L, E] in turn, until `count` experts are found: flat numbers,
    l * E + e. NaN, an expert without a token, comes last; equal scores in the experts' order."""
    rankings = [np.argsort(-np.nan_to_num(own.ravel(), nan=-np.inf), kind="stable") for own in scores]
    found: list[int] = []
    for turn in zip(*rankings, strict=True):
        found += [int(block) for block in dict.fromkeys(turn) if block not in found]
        if len(found) >= count:
            break
    return found[:count]


def swapped_alone(losses: SwapLosses, spared: SwapLosses, blocks: Sequence[int]) -> dict[str, Any]:
    """What each of the `blocks`, experts, does alone: mean over the sequences of `losses`, nats per token.

    Returns `total`, the damage of the whole instance, and per block `single`, `single_without_first` (from
    `spared`, in which position 0 keeps the reference's experts) and `share` = single / total, each by damage;
    a share is absent where the total is not above 0.
    """
    everything = frozenset(range(len(losses.blocks)))
    total = _risen(losses, everything, "free")
    experts = []
    for block in blocks:
        single = _risen(losses, frozenset([block]), "frozen")
        experts.append(
            {
                "single": single,
                "single_without_first": _risen(spared, frozenset([block]), "frozen"),
                "share": {kind: single[kind] / total[kind] for kind in DAMAGES if total[kind] > 0},
            }
        )
    return {"total": total, "experts": experts}


def _risen(losses: SwapLosses, blocks: frozenset[int], routes: Any) -> dict[str, float]:
    before, after = losses.losses(frozenset(), "free"), losses.losses(blocks, routes)
    return {kind: float((after[kind] - before[kind]).mean()) for kind in DAMAGES}
