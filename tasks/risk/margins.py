"""The margins of a run: each policy that promises a budget, from the fit requests that it knows.

All get the same treatment (`tasks/risk/control.py`): the same redraws and folds, their own knowledge of a request,
which is a refit of what predicts its damage.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import InputError
from tasks.risk.control import ClassMargin, FitSet, replay
from tasks.risk.maps import Rows
from tasks.risk.predictor import refit, stratified_folds
from tasks.risk.refit import Refit, linear_refit, refit_each

_RIDGE = 1e-6  # only keeps a class that a redraw left out from dividing by zero: it gets the mean of all


@dataclass(frozen=True)
class FitDamage:
    """What is known of F fit requests, and of the window to serve."""

    damage: np.ndarray  # [F, I] true
    classes: np.ndarray  # [F] int, of requests; redraws keep their sizes
    groups: np.ndarray  # [F] int, budget classes
    fresh: np.ndarray  # [B] requests of each class to serve
    tau: np.ndarray  # [C] nats, fixed beforehand
    reward: np.ndarray  # [I]
    safest: int

    def class_refit(self) -> Refit:
        """Mean damage of a request's class, drawn to the mean of all only where a redraw has none of it."""
        one_hot = np.eye(len(self.fresh))[self.classes]
        features = np.hstack([np.ones((len(one_hot), 1)), one_hot])
        return linear_refit(features, self.damage, np.r_[0.0, np.full(len(self.fresh), _RIDGE)])

    def agnostic_refit(self) -> Refit:
        """Mean damage of a request's budget class: nothing tells its requests apart."""
        one_hot = np.eye(len(self.tau))[self.groups]
        return linear_refit(one_hot, self.damage, np.full(len(self.tau), _RIDGE))


def refit_predictor(
    stored: dict[str, Any], fit: pd.DataFrame, instances: tuple[str, ...], damage: np.ndarray
) -> Refit:
    """The predictors of predictor.json `stored` fitted again, with their settings, on redrawn fit sets.

    `fit`: the fit rows [F] of predictions.parquet, `damage` [F, I]. Raises InputError where predictor.json is of other
    instances.
    """
    if set(stored["instances"]) != set(instances):
        raise InputError(
            f"predictor.json predicts for {', '.join(sorted(stored['instances']))}, the pool has "
            f"{', '.join(instances)}: run the stage calibrate_fwp again"
        )
    rows = [Rows.of(fit, name) for name in instances]
    known = [stored["instances"][name] for name in instances]

    def predict(train: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        columns = []
        for own, values, true in zip(rows, known, damage.T, strict=True):
            fitted = refit(values["name"], values["settings"], own[train], true[train], values["min_tokens"])
            columns.append(fitted.predict(own[wanted]))
        return np.stack(columns, axis=1)

    return refit_each(predict)


def margins(
    known: FitDamage, refits: dict[str, Refit], delta: float, replicates: int, folds: int, seed: int
) -> dict[str, list[ClassMargin]]:
    """The margin of every budget class [C] by policy, joint over classes at 1 - delta, policies apart.

    `refits`: policy -> how it predicts damage. Raises InputError for too few replicates or fit requests.
    """
    fold = stratified_folds(known.classes, folds, seed)
    found = {}
    for name, own in refits.items():
        fit = FitSet(known.damage, known.groups, known.classes, fold, known.reward, known.safest, own)
        found[name] = replay(fit, len(known.tau), known.fresh, replicates, seed).margins(known.tau, delta)
    return found


def margins_json(found: dict[str, list[ClassMargin]], names: tuple[str, ...]) -> dict[str, Any]:
    """{policy: {budget class: its margin's fields}}."""
    return {
        policy: {name: asdict(own) for name, own in zip(names, classes, strict=True)}
        for policy, classes in found.items()
    }
