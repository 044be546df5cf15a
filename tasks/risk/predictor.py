"""Maps from signals of a prefill to damage: fitted on fit requests, kept as JSON, applied with numpy alone.

Three forms: `ridge` (standardised signals and class), `isotonic` (monotone in one signal) and `class_mean`.
FWP and every baseline signal go through the same forms with the same care (`PREDICTORS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import InputError

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

# A feature whose spread is below this share of its size is constant.
CONSTANT = 1e-9


@dataclass(frozen=True)
class Rows:
    """What a map may read of R requests."""

    classes: np.ndarray  # [R] str
    prompt_tokens: np.ndarray  # [R]
    signals: dict[str, np.ndarray]  # name -> [R] float64

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Rows:
        """Of a frame with columns class, prompt_tokens and signals, other columns being ignored."""
        used = dict.fromkeys(name for _, signals in PREDICTORS.values() for name in signals)
        signals = {name: frame[name].to_numpy(dtype=np.float64) for name in used if name in frame}
        return cls(frame["class"].to_numpy(dtype=str), frame["prompt_tokens"].to_numpy(), signals)

    def __getitem__(self, chosen: np.ndarray) -> Rows:
        signals = {name: values[chosen] for name, values in self.signals.items()}
        return Rows(self.classes[chosen], self.prompt_tokens[chosen], signals)

    def __len__(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class ClassMean:
    """The mean damage of the fit requests of a class."""

    means: dict[str, float]

    def predict(self, requests: Rows) -> np.ndarray:
        """Damage [R] of `requests`; raises InputError on a class without fit requests."""
        names, place = np.unique(requests.classes, return_inverse=True)
        unknown = [name for name in names if name not in self.means]
        if unknown:
            raise InputError(f"class '{unknown[0]}' has no fit request; known classes: {sorted(self.means)}")
        return np.array([self.means[name] for name in names], dtype=np.float64)[place]


@dataclass(frozen=True)
class Ridge:
    """intercept + sum over features f of coefficient[f] (x[f] - mean[f]) / std[f]."""

    signals: list[str]
    classes: list[str]  # one-hot features follow the signals
    mean: list[float]  # [F], F = signals + classes
    std: list[float]  # [F]; 0: the feature was constant on the fit set and is left out
    coefficient: list[float]  # [F], 0 for a constant feature
    intercept: float
    penalty: float  # relative to the number of rows

    def predict(self, requests: Rows) -> np.ndarray:
        std = np.array(self.std)
        scaled = (design(requests, self.signals, self.classes) - self.mean) / np.where(std > 0, std, 1.0)
        return self.intercept + scaled @ np.array(self.coefficient)


@dataclass(frozen=True)
class Isotonic:
    """Linear interpolation between knots of a monotone step fit, constant beyond them."""

    signal: str
    x: list[float]  # [K] rising
    y: list[float]  # [K] monotone

    def predict(self, requests: Rows) -> np.ndarray:
        return np.interp(requests.signals[self.signal], self.x, self.y)


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


def fit_class_mean(requests: Rows, damage: np.ndarray) -> ClassMean:
    names, place = np.unique(requests.classes, return_inverse=True)
    means = np.bincount(place, weights=damage) / np.bincount(place)
    return ClassMean({str(name): float(mean) for name, mean in zip(names, means, strict=True)})


def fit_ridge(requests: Rows, damage: np.ndarray, signals: tuple[str, ...], penalty: float) -> Ridge:
    """Least squares with penalty x rows on coefficients of standardised features, the intercept free."""
    classes = np.unique(requests.classes).tolist()
    features = design(requests, list(signals), classes)
    mean, std = features.mean(axis=0), features.std(axis=0)
    std[std <= CONSTANT * (1 + np.abs(mean))] = 0
    kept = std > 0
    scaled = (features[:, kept] - mean[kept]) / std[kept]
    gram = scaled.T @ scaled + penalty * len(damage) * np.eye(int(kept.sum()))
    coefficient = np.zeros(features.shape[1])
    coefficient[kept] = np.linalg.solve(gram, scaled.T @ (damage - damage.mean()))
    return Ridge(
        list(signals),
        classes,
        mean.tolist(),
        std.tolist(),
        coefficient.tolist(),
        float(damage.mean()),
        penalty,
    )


def fit_isotonic(requests: Rows, damage: np.ndarray, signal: str) -> Isotonic:
    """Monotone least squares in `signal`, rising or falling as its rank correlation with the damage says.

    Equal signals share a knot, so a constant signal gives the mean.
    """
    from scipy.optimize import isotonic_regression
    from scipy.stats import rankdata

    values = requests.signals[signal]
    x, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean = np.bincount(place, weights=damage) / count
    trend = np.cov(rankdata(values), rankdata(damage))[0, 1]
    y = isotonic_regression(mean, weights=count, increasing=bool(trend >= 0)).x
    return Isotonic(signal, x.tolist(), y.tolist())


def design(requests: Rows, signals: list[str], classes: list[str]) -> np.ndarray:
    """The features [R, F]: the signals, then one column of 0 and 1 per class."""
    columns = [requests.signals[name] for name in signals]
    columns += [(requests.classes == name).astype(np.float64) for name in classes]
    return np.stack(columns, axis=1)


def constant_signals(requests: Rows, signals: tuple[str, ...]) -> list[str]:
    """The `signals` that do not vary over `requests`: ridge leaves them out, isotonic becomes the mean."""
    values = design(requests, list(signals), [])
    constant = values.std(axis=0) <= CONSTANT * (1 + np.abs(values.mean(axis=0)))
    return [name for name, flag in zip(signals, constant, strict=True) if flag]


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
