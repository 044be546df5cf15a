"""Predictors of damage: a map, the signals it reads, and the class mean for prompts too short to say much.

FWP and every baseline signal go through the same forms of map with the same care (`PREDICTORS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tasks.contracts import InputError
from tasks.risk.maps import (
    ClassMean,
    Isotonic,
    Ridge,
    Rows,
    fit_class_mean,
    fit_isotonic,
    fit_ridge,
)

# name -> form and signals; the first three are what `calibrate_fwp.predictor` may choose, the rest are
# baselines.
PREDICTORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ridge": ("ridge", ("log_fwp", "log_length")),
    "isotonic": ("isotonic", ("log_fwp",)),
    "class_mean": ("class_mean", ()),
    "ridge_ppl": ("ridge", ("log_ppl", "log_length")),
    "isotonic_ppl": ("isotonic", ("log_ppl",)),
    "ridge_length": ("ridge", ("log_length",)),
    "isotonic_length": ("isotonic", ("log_length",)),
    "ridge_routing_frequency": ("ridge", ("routing_frequency", "log_length")),
    "isotonic_routing_frequency": ("isotonic", ("routing_frequency",)),
}

# Ridge penalties tried, relative to the number of rows (features have unit variance).
PENALTIES = tuple(float(10.0**power) for power in np.arange(-3, 3))

Map = ClassMean | Ridge | Isotonic
Fit = Callable[[Rows, np.ndarray], Map]
FORMS: dict[str, type[Map]] = {"class_mean": ClassMean, "ridge": Ridge, "isotonic": Isotonic}


@dataclass(frozen=True)
class Predictor:
    """A map for prompts of at least `min_tokens` tokens, the class mean for shorter ones."""

    name: str
    min_tokens: int
    map: Map
    class_mean: ClassMean

    def predict(self, requests: Rows) -> np.ndarray:
        """Damage [R], nats per token."""
        short = requests.prompt_tokens < self.min_tokens
        return np.where(short, self.class_mean.predict(requests), self.map.predict(requests))

    def to_dict(self) -> dict[str, Any]:
        form = PREDICTORS[self.name][0]
        return {
            "name": self.name,
            "min_tokens": self.min_tokens,
            "form": form,
            "map": asdict(self.map),
            "class_mean": self.class_mean.means,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Predictor:
        fitted = FORMS[values["form"]](**values["map"])
        return cls(values["name"], values["min_tokens"], fitted, ClassMean(values["class_mean"]))


def stratified_folds(classes: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Fold of every row [R]: each class is shuffled and dealt out, going on where the last one stopped.

    Raises InputError where there are fewer rows than folds or a class has one row, whose mean out of fold is
    none.
    """
    if len(classes) < folds:
        raise InputError(f"{len(classes)} fit requests cannot make {folds} folds; lower calibrate_fwp.folds")
    generator = np.random.default_rng(seed)
    fold, dealt = np.empty(len(classes), dtype=np.int64), 0
    for name in sorted(set(classes)):
        rows = np.flatnonzero(classes == name)
        if len(rows) < 2:
            raise InputError(
                f"class '{name}' has {len(rows)} fit request; at least 2 are needed: merge the class"
            )
        fold[generator.permutation(rows)] = (dealt + np.arange(len(rows))) % folds
        dealt += len(rows)
    return fold


def fit_predictor(
    name: str, requests: Rows, damage: np.ndarray, fold: np.ndarray, min_tokens: int
) -> tuple[Predictor, np.ndarray]:
    """Fit predictor `name` on fit requests; returns it and its out-of-fold predictions [R] of the same rows.

    `damage` [R] nats; `fold` [R]. Prompts
    shorter than `min_tokens` take no part in ridge and isotonic fits. The ridge's penalty is the one with
    the least out-of-fold error on these rows; the out-of-fold predictions use that one penalty.
    """
    form, signals = PREDICTORS[name]
    means = fit_class_mean(requests, damage)
    if form == "class_mean":
        fit: Fit = fit_class_mean
    elif form == "isotonic":
        fit = lambda rows, values: fit_isotonic(rows, values, signals[0])  # noqa: E731
    else:
        trials = [
            _out_of_fold(_ridge(signals, p), requests, damage, fold, name, min_tokens) for p in PENALTIES
        ]
        errors = [float(np.mean((trial - damage) ** 2)) for trial in trials]
        fit = _ridge(signals, PENALTIES[int(np.argmin(errors))])
    long = _long(requests, min_tokens, form)
    fitted = Predictor(name, min_tokens, fit(requests[long], damage[long]), means)
    return fitted, _out_of_fold(fit, requests, damage, fold, name, min_tokens)


def _ridge(signals: tuple[str, ...], penalty: float) -> Fit:
    return lambda requests, damage: fit_ridge(requests, damage, signals, penalty)


def _long(requests: Rows, min_tokens: int, form: str) -> np.ndarray:
    """The rows that a fit may use [R] bool."""
    if form == "class_mean":
        return np.ones(len(requests), dtype=bool)
    long = requests.prompt_tokens >= min_tokens
    if long.sum() < 2:
        raise InputError(
            f"{int(long.sum())} of {len(long)} fit prompts have at least {min_tokens} tokens, so nothing "
            "can be calibrated; lower calibrate_fwp.min_tokens, or give longer prompts"
        )
    return long


def _out_of_fold(
    fit: Fit,
    requests: Rows,
    damage: np.ndarray,
    fold: np.ndarray,
    name: str,
    min_tokens: int,
) -> np.ndarray:
    """Predictions [R], each made by a fit on the other folds."""
    predicted = np.empty(len(damage))
    for held in np.unique(fold):
        rest, form = fold != held, PREDICTORS[name][0]
        train, target = requests[rest], damage[rest]
        long = _long(train, min_tokens, form)
        fitted = Predictor(name, min_tokens, fit(train[long], target[long]), fit_class_mean(train, target))
        predicted[~rest] = fitted.predict(requests[~rest])
    return predicted
