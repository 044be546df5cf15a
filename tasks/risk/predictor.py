"""Predictors of damage: a map, the signals it reads, and the class mean for prompts too short to say much.

FWP and every baseline signal go through the same forms of map with the same care (`PREDICTORS`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tasks.contracts import InputError
from tasks.risk.boosted import Boosted, fit_boosted
from tasks.risk.maps import (
    ClassMean,
    Isotonic,
    Map,
    Ridge,
    Rows,
    fit_class_mean,
    fit_isotonic,
    fit_ridge,
    fit_shrunk_mean,
)

ALL = ("log_fwp", "separable", "log_ppl", "log_length")

# name -> form and signals. `CANDIDATES` are what `calibrate_fwp.predictor` may choose, the rest are baselines and
# parts, for comparison.
PREDICTORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "class_mean": ("class_mean", ()),
    "shrunk_mean": ("shrunk_mean", ()),
    "isotonic": ("isotonic", ("log_fwp",)),
    "ridge": ("ridge", ALL),
    "boosted": ("boosted", ALL),
    "ridge_fwp": ("ridge", ("log_fwp", "log_length")),
    "ridge_separable": ("ridge", ("separable", "log_length")),
    "isotonic_separable": ("isotonic", ("separable",)),
    "ridge_ppl": ("ridge", ("log_ppl", "log_length")),
    "isotonic_ppl": ("isotonic", ("log_ppl",)),
    "ridge_length": ("ridge", ("log_length",)),
    "isotonic_length": ("isotonic", ("log_length",)),
    "ridge_routing_frequency": ("ridge", ("routing_frequency", "log_length")),
    "isotonic_routing_frequency": ("isotonic", ("routing_frequency",)),
}
CANDIDATES = (  # simplest first
    "class_mean",
    "shrunk_mean",
    "isotonic",
    "ridge_length",
    "ridge_ppl",
    "ridge_fwp",
    "ridge",
    "boosted",
)
CLASS_MEANS = ("class_mean", "shrunk_mean")  # say nothing about requests of one class
# A signal that a model may lack: these do without it, other predictors that read it are left out.
OPTIONAL, DO_WITHOUT = "separable", ("ridge", "boosted")

FORMS: dict[str, Any] = {
    "class_mean": ClassMean,
    "shrunk_mean": ClassMean,
    "ridge": Ridge,
    "isotonic": Isotonic,
    "boosted": Boosted,
}


@dataclass(frozen=True)
class Predictor:
    """A map for prompts of at least `min_tokens` tokens, the (shrunk) class mean for shorter ones.

    `settings`: what was chosen on fit requests, with which `refit` gives the same predictor again. `residuals`:
    the 5 % and 95 % quantiles of true - predicted, out of fold, nats; None where they were not taken.
    """

    name: str
    settings: dict[str, float]
    min_tokens: int
    map: Map
    class_mean: ClassMean
    residuals: tuple[float, float] | None = None

    def predict(self, requests: Rows) -> np.ndarray:
        """Damage [R], nats per token."""
        short = requests.prompt_tokens < self.min_tokens
        return np.where(short, self.class_mean.predict(requests), self.map.predict(requests))

    def interval(self, requests: Rows) -> np.ndarray:
        """[R, 2] where 90 % of true damages lie: the prediction plus the quantiles of residuals (additive)."""
        if self.residuals is None:
            raise ValueError(f"predictor '{self.name}' was fitted without residuals, so it has no interval")
        return self.predict(requests)[:, None] + np.array(self.residuals)

    def to_dict(self) -> dict[str, Any]:
        values = {
            "name": self.name,
            "settings": self.settings,
            "min_tokens": self.min_tokens,
            "form": PREDICTORS[self.name][0],
            "map": asdict(self.map),  # pyright: ignore[reportArgumentType]  # every map is a dataclass
            "class_mean": asdict(self.class_mean),
        }
        return values if self.residuals is None else {**values, "interval": list(self.residuals)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Predictor:
        form, own = FORMS[values["form"]], values["map"]
        fitted = form.from_dict(own) if form is Boosted else form(**own)
        residuals = tuple(values["interval"]) if "interval" in values else None
        mean = ClassMean(**values["class_mean"])
        return cls(values["name"], values["settings"], values["min_tokens"], fitted, mean, residuals)


def usable(rows: Rows) -> list[str]:
    """The names of `PREDICTORS` whose signals these rows have."""
    return [
        name for name, (_, own) in PREDICTORS.items() if name in DO_WITHOUT or set(own) <= set(rows.signals)
    ]


def stratified_folds(classes: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Fold of every row [R]: each class is shuffled and dealt out, going on where the last one stopped.

    A class of one row is predicted out of fold as a class never seen. Raises InputError where there are fewer rows
    than folds.
    """
    if len(classes) < folds:
        raise InputError(f"{len(classes)} fit requests cannot make {folds} folds; lower calibrate_fwp.folds")
    generator = np.random.default_rng(seed)
    fold, dealt = np.empty(len(classes), dtype=np.int64), 0
    for name in sorted(set(classes)):
        rows = np.flatnonzero(classes == name)
        fold[generator.permutation(rows)] = (dealt + np.arange(len(rows))) % folds
        dealt += len(rows)
    return fold


def fit_predictor(name: str, requests: Rows, damage: np.ndarray, min_tokens: int) -> Predictor:
    """Fit predictor `name` on `damage` [R] nats of fit requests, its hyperparameters chosen on these rows alone.

    Prompts shorter than `min_tokens` take no part in ridge, isotonic and boosted fits.
    """
    return refit(name, {}, requests, damage, min_tokens)


def refit(
    name: str, settings: dict[str, float], requests: Rows, damage: np.ndarray, min_tokens: int
) -> Predictor:
    """Fit with given hyperparameters; those that `settings` lacks are chosen. Rows may repeat a request."""
    form, signals = PREDICTORS[name]
    means = fit_class_mean(requests, damage)
    if form == "class_mean":
        return Predictor(name, {}, min_tokens, means, means)
    if form == "shrunk_mean":
        shrunk = fit_shrunk_mean(requests, damage)
        return Predictor(name, {}, min_tokens, shrunk, shrunk)
    long = requests.prompt_tokens >= min_tokens
    if long.sum() < 2:
        raise InputError(
            f"{int(long.sum())} of {len(long)} fit prompts have at least {min_tokens} tokens, so nothing "
            "can be calibrated; lower calibrate_fwp.min_tokens, or give longer prompts"
        )
    rows, target = requests[long], damage[long]
    signals = tuple(own for own in signals if own != OPTIONAL or own in requests.signals)
    if form == "isotonic":
        return Predictor(name, {}, min_tokens, fit_isotonic(rows, target, signals[0]), means)
    if form == "boosted":
        return Predictor(name, {}, min_tokens, fit_boosted(rows, target, signals), means)
    ridge = fit_ridge(rows, target, signals, settings.get("penalty"))
    return Predictor(name, {"penalty": ridge.penalty}, min_tokens, ridge, means)


def out_of_fold(
    name: str, requests: Rows, damage: np.ndarray, fold: np.ndarray, min_tokens: int
) -> np.ndarray:
    """Predictions [R], each by a fit on the other folds, hyperparameters included; `fold` [R]."""
    predicted = np.empty(len(damage))
    for held in np.unique(fold):
        rest = fold != held
        fitted = fit_predictor(name, requests[rest], damage[rest], min_tokens)
        predicted[~rest] = fitted.predict(requests[~rest])
    return predicted
