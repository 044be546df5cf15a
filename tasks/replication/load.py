"""Load and load imbalance score (LIS), arXiv 2602.19938: how unevenly a layer's tokens fall on its experts.

Padding and dropped picks are not load; shared experts see every token and are never counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import rankdata

from tasks.contracts import ReplicationPlan


def count_load(index: np.ndarray, mask: np.ndarray, experts: int) -> np.ndarray:
    """Tokens that each expert gets from each sequence.

    Args:
        index: [B, S, k] selected experts; a pick outside 0..experts - 1 was dropped.
        mask: [B, S] true for real tokens, false for padding.
        experts: E.

    Returns:
        [B, E] int64.
    """
    counted = mask[:, :, None] & (index >= 0) & (index < experts)
    row = np.broadcast_to(np.arange(len(index))[:, None, None], index.shape)
    flat = np.bincount((row * experts + index)[counted], minlength=len(index) * experts)
    return flat.reshape(len(index), experts)


def lis(load: np.ndarray, experts: int | None = None) -> np.ndarray:
    """Load imbalance score m · max_j n_j / sum_j n_j over the last axis.

    1 is perfect balance; where each token takes k distinct experts it is at most m / k. A layer without
    tokens has no score: NaN, which callers leave out and count.

    Args:
        load: [..., n] tokens of each logical or physical expert.
        experts: m, the experts that an even spread is measured against; by default n. With the physical
            counts of a variant the default gives lis_physical (>= 1), and the logical number of experts gives
            lis_logical, comparable with the LIS before replication.

    Returns:
        [...] float64.
    """
    load = np.asarray(load, dtype=np.float64)
    if (load < 0).any():
        raise ValueError("a load is negative")
    total = load.sum(axis=-1)
    m = load.shape[-1] if experts is None else experts
    with np.errstate(invalid="ignore"):
        return np.where(total > 0, m * load.max(axis=-1) / np.where(total > 0, total, 1.0), np.nan)


def lis_by_batch(load: np.ndarray, batch_size: int, quantile: float) -> dict[str, np.ndarray]:
    """LIS of consecutive batches of sequences: smaller batches are less even than the whole set.

    Args:
        load: [R, L, E] tokens per sequence.
        batch_size: sequences per batch; the last batch may be smaller.
        quantile: in (0, 1).

    Returns:
        mean, quantile and max over the batches, each [L]; batches without tokens in a layer are left out.
    """
    starts = np.arange(0, len(load), batch_size)
    scores = lis(np.add.reduceat(load, starts, axis=0))  # [batches, L]
    return {
        "mean": np.nanmean(scores, axis=0),
        "quantile": np.nanquantile(scores, quantile, axis=0),
        "max": np.nanmax(scores, axis=0),
    }


def lis_even_split(load: np.ndarray, replicas: int) -> np.ndarray:
    """LIS over the logical experts if each of the `replicas` heaviest experts halves its load exactly.

    For one replica this is m · max(n_1 / 2, n_2) / sum n. The variant's counted LIS differs where its copies
    do not share evenly, and where quantization changes the routing.

    Args:
        load: [..., E] tokens before replication.

    Returns:
        [...] float64.
    """
    split = np.sort(np.asarray(load, dtype=np.float64), axis=-1)[..., ::-1].copy()
    total = split.sum(axis=-1)
    split[..., :replicas] /= 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, split.shape[-1] * split.max(axis=-1) / total, np.nan)


def before_and_after(
    before: np.ndarray, after: np.ndarray, plan: ReplicationPlan, replicas: int
) -> dict[str, Any]:
    """Loads and LIS from load [L, E] before and counts [L, m + r] after."""
    experts = before.shape[1]
    logical = np.stack(
        [
            np.bincount(own.physical_to_logical, weights=count, minlength=experts)
            for own, count in zip(plan.layers, after, strict=True)
        ]
    )
    predicted, lis_logical = lis_even_split(before, replicas), lis(after, experts)
    return {
        "layers": [own.layer for own in plan.layers],
        "replicas": replicas,
        "quantized_originals": [sum(bits > 0 for bits in own.bits[:experts]) for own in plan.layers],
        "load_before": before,
        "load_after": after,
        "lis_before": lis(before),
        "lis_mean_before": lis(before).mean(),
        "lis_logical": lis_logical,
        "lis_physical": lis(after),
        "lis_mean": lis_logical.mean(),
        "lis_even_split": predicted,
        "lis_even_split_gap": np.abs(lis_logical - predicted).max(),
        # Share of a layer's picks that went to another logical expert than before, at least.
        "routing_drift": np.abs(logical - before).sum(axis=1) / 2 / before.sum(axis=1),
    }


def rank_correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Spearman correlation over the last axis, ties by average rank: [..., E] x [..., E] -> [...].

    NaN where one side is constant: it has no ranks.
    """
    ranks = [rankdata(side, axis=-1) for side in (left, right)]
    a, b = (rank - rank.mean(axis=-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scale > 0, (a * b).sum(axis=-1) / scale, np.nan)
