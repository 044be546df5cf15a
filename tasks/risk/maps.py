"""Maps from signals of a prefill to damage: fitted on fit requests, kept as JSON, applied with numpy alone.

Three forms: `class_mean` (plain, or shrunk towards the mean of all), `ridge` (signals and class) and `isotonic`
(monotone in one signal); the fourth, boosted trees, is in tasks/risk/boosted.py. A class that a map never saw counts
as an average one; tasks/risk/drift.py flags its requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

SIGNALS = ("log_fwp", "separable", "log_ppl", "log_length", "routing_frequency")

# A feature whose spread is below this share of its size is constant.
CONSTANT = 1e-9

# Ridge penalties tried, relative to the number of rows (signals have unit variance).
PENALTIES = tuple(float(10.0**power) for power in np.arange(-3, 3))


@dataclass(frozen=True)
class Rows:
    """What a map may read of R requests."""

    classes: np.ndarray  # [R] str
    prompt_tokens: np.ndarray  # [R]
    signals: dict[str, np.ndarray]  # name -> [R] float64

    @classmethod
    def of(cls, frame: pd.DataFrame, instance: str = "") -> Rows:
        """Of a frame with columns class, prompt_tokens and signals, other columns being ignored.

        A signal that is `instance`'s own is in the column <signal>_<instance>, which goes before <signal>.
        """
        own = {name: f"{name}_{instance}" for name in SIGNALS}
        column = {name: own[name] if own[name] in frame else name for name in SIGNALS}
        signals = {name: frame[c].to_numpy(dtype=np.float64) for name, c in column.items() if c in frame}
        return cls(frame["class"].to_numpy(dtype=str), frame["prompt_tokens"].to_numpy(), signals)

    def __getitem__(self, chosen: np.ndarray) -> Rows:
        signals = {name: values[chosen] for name, values in self.signals.items()}
        return Rows(self.classes[chosen], self.prompt_tokens[chosen], signals)

    def __len__(self) -> int:
        return len(self.classes)


class Map(Protocol):
    def predict(self, requests: Rows) -> np.ndarray:
        """Damage [R], nats per token."""
        ...


@dataclass(frozen=True)
class ClassMean:
    """One damage per class, and `grand` for a class without fit requests."""

    means: dict[str, float]
    grand: float

    def predict(self, requests: Rows) -> np.ndarray:
        names, place = np.unique(requests.classes, return_inverse=True)
        return np.array([self.means.get(str(name), self.grand) for name in names], dtype=np.float64)[place]


@dataclass(frozen=True)
class Ridge:
    """intercept + sum over features f of coefficient[f] (x[f] - mean[f]) / std[f].

    The features of a class never seen are the means, so that it has no effect.
    """

    signals: list[str]
    classes: list[str]  # one-hot features follow the signals
    mean: list[float]  # [F], F = signals + classes
    std: list[float]  # [F]; 0: the feature was constant on the fit set and is left out
    coefficient: list[float]  # [F], 0 for a constant feature
    intercept: float
    penalty: float  # relative to the number of rows

    def predict(self, requests: Rows) -> np.ndarray:
        std, centred = np.array(self.std), design(requests, self.signals, self.classes) - self.mean
        centred[~np.isin(requests.classes, self.classes), len(self.signals) :] = 0
        return self.intercept + centred / np.where(std > 0, std, 1.0) @ np.array(self.coefficient)


@dataclass(frozen=True)
class Isotonic:
    """Linear interpolation between knots of a monotone step fit, constant beyond them."""

    signal: str
    x: list[float]  # [K] rising
    y: list[float]  # [K] monotone

    def predict(self, requests: Rows) -> np.ndarray:
        return np.interp(requests.signals[self.signal], self.x, self.y)


def fit_class_mean(requests: Rows, damage: np.ndarray) -> ClassMean:
    names, mean, _, _ = _by_class(requests, damage)
    return ClassMean(dict(zip(names, mean.tolist(), strict=True)), float(damage.mean()))


def fit_shrunk_mean(requests: Rows, damage: np.ndarray) -> ClassMean:
    """Class means drawn towards their common mean, small classes most: B = between / (between + within / n).

    An empirical Bayes estimate: `within` is the pooled variance inside classes, `between` the variance of true class
    means by the method of moments, 0 at least (Efron and Morris 1975; Searle, Variance Components, 1992, chapter 3).
    """
    names, mean, count, within = _by_class(requests, damage)
    spread = float(count @ (mean - damage.mean()) ** 2)
    size = len(damage) - float(count @ count) / len(damage)
    between = max((spread - (len(names) - 1) * within) / size, 0.0) if size > 0 else 0.0
    precision = (
        count / within if between == 0 and within > 0 else 1 / np.maximum(between + within / count, 1e-300)
    )
    grand = float(precision @ mean / precision.sum())
    noise = within / count
    share = np.where(between + noise > 0, between / np.maximum(between + noise, 1e-300), 0.0)
    shrunk = grand + share * (mean - grand)
    return ClassMean(dict(zip(names, shrunk.tolist(), strict=True)), grand)


def _by_class(requests: Rows, damage: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray, float]:
    """Names, means and sizes of the classes [C], and the pooled variance inside them, 0 where all are single."""
    names, place, count = np.unique(requests.classes, return_inverse=True, return_counts=True)
    mean = np.bincount(place, weights=damage) / count
    freedom = len(damage) - len(names)
    within = (
        float(((damage - mean[place]) ** 2).sum()) / freedom
        if freedom > 0
        else float(damage.var(ddof=len(damage) > 1))
    )
    return [str(name) for name in names], mean, count.astype(np.float64), within


def fit_ridge(
    requests: Rows, damage: np.ndarray, signals: tuple[str, ...], penalty: float | None = None
) -> Ridge:
    """Least squares with penalty x rows on the coefficients, the intercept free.

    Signals have unit variance, and the one-hot columns of C classes are scaled by sqrt(C): equal classes are
    penalised like signals, smaller ones drawn closer to the mean. Without a `penalty`, the one of `PENALTIES` with
    the least error when each row is left out in turn (PRESS, in closed form; Allen 1974) is taken.
    """
    classes = np.unique(requests.classes).tolist()
    features = design(requests, list(signals), classes)
    mean, std = features.mean(axis=0), features.std(axis=0)
    std[std <= CONSTANT * (1 + np.abs(mean))] = 0
    std[len(signals) :] = np.where(std[len(signals) :] > 0, len(classes) ** -0.5, 0)
    kept, rows = std > 0, len(damage)
    left, singular, right = np.linalg.svd((features[:, kept] - mean[kept]) / std[kept], full_matrices=False)
    along = left.T @ (damage - damage.mean())
    if penalty is None:
        shares = singular**2 / (singular**2 + rows * np.array(PENALTIES)[:, None])  # [penalties, rank]
        residual = damage - damage.mean() - (shares * along) @ left.T
        leverage = 1 / rows + shares @ (left**2).T
        errors = ((residual / np.maximum(1 - leverage, 1e-9)) ** 2).mean(axis=1)
        penalty = PENALTIES[int(np.argmin(errors))]
    coefficient = np.zeros(features.shape[1])
    coefficient[kept] = right.T @ (singular / (singular**2 + rows * penalty) * along)
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


def constant_signals(requests: Rows) -> list[str]:
    """The signals that do not vary over `requests`: ridge leaves them out, isotonic becomes the mean."""
    values = design(requests, names := list(requests.signals), [])
    constant = values.std(axis=0) <= CONSTANT * (1 + np.abs(values.mean(axis=0)))
    return [name for name, flag in zip(names, constant, strict=True) if flag]
