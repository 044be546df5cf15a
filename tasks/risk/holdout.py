"""How good predictions of damage are on holdout requests, with bootstrap intervals over requests.

Everything is vectorised over draws: `draws` [B, n] holds row indices, draws[0] is the sample itself, so
entry 0 of every result is the figure and the rest are its bootstrap replicates.
"""

from __future__ import annotations

import numpy as np

# Below this many replicates in which a figure exists, it gets no interval.
LEAST_REPLICATES = 20
INTERVAL = (2.5, 97.5)  # percentiles


def stratified_draws(classes: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Row indices [count + 1, n]: the sample, then `count` redraws with replacement inside each class.

    Class sizes are fixed by the stratified split, so a redraw keeps them, and column j always has the class
    of row j.
    """
    generator = np.random.default_rng(seed)
    draws = np.tile(np.arange(len(classes)), (count + 1, 1))
    for name in sorted(set(classes)):
        rows = np.flatnonzero(classes == name)
        draws[1:, rows] = generator.choice(rows, size=(count, len(rows)))
    return draws


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1 along the last axis, ties at their mean rank: [B, n] -> [B, n]. What scipy.stats.rankdata gives, in
    a fraction of its time on small arrays."""
    order = np.argsort(x, axis=-1, kind="stable")
    placed = np.take_along_axis(x, order, axis=-1)
    starts = np.ones(x.shape, dtype=bool)
    starts[..., 1:] = placed[..., 1:] != placed[..., :-1]
    group = starts.ravel().cumsum() - 1  # runs of equal values, over all rows
    first, count = np.flatnonzero(starts), np.bincount(group)
    mean = first % x.shape[-1] + (count + 1) / 2
    result = np.empty(x.shape)
    np.put_along_axis(result, order, mean[group].reshape(x.shape), axis=-1)
    return result


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Correlation along the last axis [B, n] -> [B]; NaN where x or y is constant."""
    x, y = x - x.mean(axis=-1, keepdims=True), y - y.mean(axis=-1, keepdims=True)
    norm = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 1e-300, (x * y).sum(axis=-1) / norm, np.nan)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rank correlation along the last axis, ties at their mean rank: [B, n] -> [B]."""
    return pearson(ranks(x), ranks(y))


def spearman_within(x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Mean over classes [n] of the rank correlation inside each, weighted by class size: [B, n] -> [B].

    Classes in which x or y is constant are left out; NaN where all are.
    """
    total, weight = np.zeros(len(x)), np.zeros(len(x))
    for name in sorted(set(classes)):
        rows = classes == name
        inside = spearman(x[:, rows], y[:, rows])
        known = ~np.isnan(inside)
        total += np.where(known, inside, 0.0) * rows.sum()
        weight += known * rows.sum()
    return np.where(weight > 0, total / np.maximum(weight, 1), np.nan)


def auroc(score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Chance that a positive row scores higher, ties half: [B, n], bool [B, n] -> [B]; NaN without both."""
    count = positive.sum(axis=-1)
    other = positive.shape[-1] - count
    wins = np.where(positive, ranks(score), 0.0).sum(axis=-1) - count * (count + 1) / 2
    return np.where(count * other > 0, wins / np.maximum(count * other, 1), np.nan)


def r_squared(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """1 - squared error / squared deviation of `true` from its mean: [B, n] -> [B]; NaN: constant truth."""
    spread = ((true - true.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    error = ((true - predicted) ** 2).sum(axis=-1)
    return np.where(spread > 0, 1 - error / np.where(spread > 0, spread, 1), np.nan)


def calibration_slope(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Slope of truth on prediction by least squares, ideally 1: [B, n] -> [B]; NaN: constant predictions."""
    centred = predicted - predicted.mean(axis=-1, keepdims=True)
    spread = (centred**2).sum(axis=-1)
    flat = spread <= 1e-18 * (1 + (predicted**2).sum(axis=-1))
    return np.where(flat, np.nan, (centred * true).sum(axis=-1) / np.where(flat, 1, spread))


def rank_figures(
    signal: np.ndarray, damage: np.ndarray, classes: np.ndarray, draws: np.ndarray
) -> dict[str, float]:
    """Spearman overall and within classes, and AUROC of the upper half of the true damage.

    `signal`, `damage`, `classes` [n]. The upper half is that of the sample, in every redraw. Each figure has
    `<name>_low` and `<name>_high`, 95 % percentiles over the redraws; what is undefined is absent.
    """
    x, y = signal[draws], damage[draws]
    upper = damage > np.median(damage)
    return {
        **_with_interval("spearman", spearman(x, y)),
        **_with_interval("spearman_within", spearman_within(x, y, classes)),
        **_with_interval("auroc", auroc(x, upper[draws])),
    }


def prediction_figures(
    predicted: np.ndarray, damage: np.ndarray, classes: np.ndarray, draws: np.ndarray
) -> dict[str, float]:
    """The figures of `rank_figures`, R2 against the holdout mean, and the calibration slope."""
    return {
        **rank_figures(predicted, damage, classes, draws),
        **_with_interval("r2", r_squared(predicted[draws], damage[draws])),
        **_with_interval("slope", calibration_slope(predicted[draws], damage[draws])),
    }


def _with_interval(name: str, values: np.ndarray) -> dict[str, float]:
    if np.isnan(values[0]):
        return {}
    figures = {name: float(values[0])}
    replicates = values[1:][~np.isnan(values[1:])]
    if len(replicates) >= LEAST_REPLICATES:
        low, high = np.percentile(replicates, INTERVAL)
        figures |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    return figures
