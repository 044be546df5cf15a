"""Maps from signals of a prefill to damage: fitted on fit requests, kept as JSON, applied with numpy alone.

Three forms: `ridge` (standardised signals and class), `isotonic` (monotone in one signal) and `class_mean`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tasks.contracts import InputError

SIGNALS = ("log_fwp", "log_ppl", "log_length", "routing_frequency")

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
        signals = {name: frame[name].to_numpy(dtype=np.float64) for name in SIGNALS if name in frame}
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
