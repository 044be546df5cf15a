"""Predictors judged on many halvings of all requests: fitted on one half, judged on the other, again and again.

One holdout split of a hundred requests says little, and says it with the luck of the split. Over random halves the
figure's spread is about its standard error over all requests (the half-sample jackknife: a half drawn without
replacement has twice the variance of the whole, times 1 - 1/2), so its percentiles over splits serve as an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.console import track
from tasks.params import CalibrateFwp
from tasks.risk.candidates import AUTO, choose
from tasks.risk.damage import DAMAGES, PARTS, ceiling
from tasks.risk.holdout import INTERVAL, auroc, calibration_slope, r_squared, spearman, spearman_within
from tasks.risk.maps import Rows, fit_ridge
from tasks.risk.measured import Measured
from tasks.risk.predictor import (
    CLASS_MEANS,
    Predictor,
    fit_class_mean,
    fit_predictor,
    stratified_folds,
    usable,
)

FIGURES = ("spearman", "spearman_within", "auroc", "r2", "slope")
# Ridge on ever more signals: what does each add?
STEPS = ("class", "log_length", "log_ppl", "log_fwp", "separable")


@dataclass(frozen=True)
class Halves:
    """S halvings. Every half has the same number of each class; judged rows are sorted by class."""

    fit: np.ndarray  # [S, F] rows
    judged: np.ndarray  # [S, J] rows
    classes: np.ndarray  # [J] of every split's judged rows


def resplit(measured: Measured, instances: Sequence[str], params: CalibrateFwp) -> dict[str, Any]:
    """`split_table` of both damages on both parts, and with `auto_figures` for the one in use.

    targets: <damage>_<part> -> instance -> figures and ceiling; beats: the same -> names of the predictors that beat
    the class mean within classes, none where the list is empty.
    """
    classes = measured.frame["class"].to_numpy(dtype=str)
    halves = stratified_halves(classes, params.splits, params.seed)
    targets: dict[str, dict[str, Any]] = {}
    goals = [(kind, part, name) for kind in DAMAGES for part in PARTS for name in instances]
    for kind, part, name in track(goals, "halve", len(goals)):
        rows, damage = measured.rows[name, kind], measured.damage[name, kind, part]
        found = split_table(rows, damage, halves, params.min_tokens)
        if (kind, part) == (params.damage, params.scored):
            own = auto_figures(rows, damage, halves, params.min_tokens, params.folds, params.seed)
            found["predictors"][AUTO] = own
        limit = ceiling(measured.halves[name, kind, part], classes)
        targets.setdefault(f"{kind}_{part}", {})[name] = {"ceiling": limit, **found}
    beats = {
        target: {
            name: [n for n, own in found["predictors"].items() if own.get("beats_class_mean")]
            for name, found in table.items()
        }
        for target, table in targets.items()
    }
    sizes = {"fit": halves.fit.shape[1], "judged": halves.judged.shape[1]}
    return {"count": params.splits, "requests": sizes, "targets": targets, "beats": beats}


def stratified_halves(classes: np.ndarray, count: int, seed: int) -> Halves:
    """Halve every class of `classes` [R] at random, `count` times; an odd one out goes to either half in turn.

    A class of one request cannot be halved: it is always judged, as a class never seen.
    """
    generator = np.random.default_rng(seed)
    fit, judged, turn = [], [], 1
    for name in sorted(set(classes)):
        rows = np.flatnonzero(classes == name)
        size = (len(rows) + turn * (len(rows) > 1)) // 2
        turn = 1 - turn if len(rows) % 2 else turn
        dealt = generator.permuted(np.tile(rows, (count, 1)), axis=1)
        fit.append(dealt[:, :size])
        judged.append(dealt[:, size:])
    judged = np.concatenate(judged, axis=1)
    return Halves(np.concatenate(fit, axis=1), judged, classes[judged[0]])


def split_table(
    rows: Rows, damage: np.ndarray, halves: Halves, min_tokens: int, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Figures of the predictors `names` (all that these rows allow, by default) for one target, and what signals add.

    Per predictor `<figure>`, `<figure>_low`, `<figure>_high`: mean and 95 % percentiles over splits of `FIGURES`,
    of within_gain (spearman_within above the class mean's, which orders nothing inside a class: 0) and of r2_gain
    (R2 above the class mean's in the same split). beats_class_mean: within_gain_low > 0.
    """
    names = names or usable(rows)
    true = damage[halves.judged]
    by_mean = r_squared(_predictions("class_mean", rows, damage, halves, min_tokens), true)
    predictors = {}
    for name in names:
        figures = _figures(
            _predictions(name, rows, damage, halves, min_tokens), true, halves.classes, by_mean
        )
        if name not in CLASS_MEANS:
            figures["beats_class_mean"] = figures["within_gain_low"] > 0
        predictors[name] = figures
    return {"predictors": predictors, "adds": _adds(rows, damage, halves, min_tokens, by_mean)}


def auto_figures(
    rows: Rows, damage: np.ndarray, halves: Halves, min_tokens: int, folds: int, seed: int
) -> dict[str, Any]:
    """The same for the choice by nested cross-validation, made again in every split on its own fit half.

    chosen: candidate -> number of splits; coverage: share of judged damages inside the predictor's interval.
    """
    predicted, chosen, inside = [], [], []
    for fit, judged in zip(halves.fit, halves.judged, strict=True):
        fold = stratified_folds(rows.classes[fit], folds, seed)
        found = choose(AUTO, rows[fit], damage[fit], fold, min_tokens).predictor
        predicted.append(found.predict(rows[judged]))
        chosen.append(found.name)
        low, high = found.interval(rows[judged]).T
        inside.append(((low <= damage[judged]) & (damage[judged] <= high)).mean())
    true = damage[halves.judged]
    by_mean = r_squared(_predictions("class_mean", rows, damage, halves, min_tokens), true)
    figures: dict[str, Any] = _figures(np.stack(predicted), true, halves.classes, by_mean)
    figures |= _over_splits("coverage", np.array(inside))
    counts = {name: chosen.count(name) for name in sorted(set(chosen))}
    return {**figures, "beats_class_mean": figures["within_gain_low"] > 0, "chosen": counts}


def _predictions(name: str, rows: Rows, damage: np.ndarray, halves: Halves, min_tokens: int) -> np.ndarray:
    """[S, J]"""
    pairs = zip(halves.fit, halves.judged, strict=True)
    return np.stack([fit_predictor(name, rows[f], damage[f], min_tokens).predict(rows[j]) for f, j in pairs])


def _adds(
    rows: Rows, damage: np.ndarray, halves: Halves, min_tokens: int, by_mean: np.ndarray
) -> dict[str, Any]:
    """Of every step of `STEPS` that these rows allow: the figures of ridge on it and the steps before."""
    steps = [name for name in STEPS if name == "class" or name in rows.signals]
    true, adds = damage[halves.judged], {}
    for count, name in enumerate(steps):
        signals, predicted = tuple(steps[1 : count + 1]), []
        for fit, judged in zip(halves.fit, halves.judged, strict=True):
            long = fit[rows.prompt_tokens[fit] >= min_tokens]
            ridge = fit_ridge(rows[long], damage[long], signals)
            mean = fit_class_mean(rows[fit], damage[fit])
            predicted.append(Predictor("ridge", {}, min_tokens, ridge, mean).predict(rows[judged]))
        figures = _figures(np.stack(predicted), true, halves.classes, by_mean)
        kept = ("spearman", "spearman_within", "r2")
        adds[name] = {
            key: value
            for key, value in figures.items()
            if key.removesuffix("_low").removesuffix("_high") in kept
        }
    return adds


def _figures(
    predicted: np.ndarray, true: np.ndarray, classes: np.ndarray, by_mean: np.ndarray
) -> dict[str, float]:
    """Mean and percentiles over the splits [S, J] in which a figure is defined; absent where there are none."""
    upper = true > np.median(true, axis=1, keepdims=True)
    within = spearman_within(predicted, true, classes)
    r2 = r_squared(predicted, true)
    values = {
        "spearman": spearman(predicted, true),
        "spearman_within": within,
        "auroc": auroc(predicted, upper),
        "r2": r2,
        "slope": calibration_slope(predicted, true),
        "within_gain": np.nan_to_num(within),  # constant inside every class: no order, as the class mean
        "r2_gain": r2 - by_mean,
    }
    return {key: figure for name, own in values.items() for key, figure in _over_splits(name, own).items()}


def _over_splits(name: str, values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {}
    low, high = np.percentile(values, INTERVAL)
    return {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
