"""A population of requests with a known law, on which a promise about risk can be tested by drawing again and again.

Damage on instance i of a request of class c: mean[i] x scale[c] x exp(sigma z - sigma^2 / 2) x noise, z normal, and
noise 1 on average with a Pareto tail (finite variance, no third moment). A signal sees z with an error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.risk.control import FitSet, replay
from tasks.risk.frontier import frontier
from tasks.risk.refit import fit_linear, linear_refit

TAIL = 3.5  # Pareto index of the noise
FOLDS, RIDGE = 5, 1e-3


@dataclass(frozen=True)
class Population:
    """The law. Three classes by default, small to large."""

    means: tuple[float, ...] = (0.94, 0.18, 0.05)  # [I] nats, of W2, W3, W4
    reward: tuple[float, ...] = (2.0, 4 / 3, 1.0)  # [I] 4 / bits
    scale: tuple[float, ...] = (0.8, 1.0, 1.2)  # [C]
    fit: tuple[int, ...] = (50, 100, 250)  # [C] requests
    fresh: tuple[int, ...] = (50, 100, 250)  # [C]
    sigma: float = 0.6  # spread of log damage that a signal could know
    blur: float = 0.4  # error of the signal of it
    noise: float = 0.5  # share of the Pareto noise; the rest is constant

    def tau(self, value: float) -> np.ndarray:
        """[C] W4 + value (W3 - W4) of the true class means: fixed, no draw takes part."""
        return np.array(self.scale) * (self.means[-1] + value * (self.means[-2] - self.means[-1]))

    def draw(self, sizes: tuple[int, ...], rng: np.random.Generator) -> Sample:
        """Independent requests, `sizes` [C] of each class, in random order."""
        classes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
        z = rng.normal(size=len(classes))
        shared = np.array(self.scale)[classes] * np.exp(self.sigma * z - self.sigma**2 / 2)
        pareto = rng.pareto(TAIL, (len(classes), len(self.means))) * (TAIL - 1)
        damage = shared[:, None] * np.array(self.means) * (1 - self.noise + self.noise * pareto)
        return Sample(damage, classes, z + self.blur * rng.normal(size=len(classes)))


@dataclass(frozen=True)
class Sample:
    damage: np.ndarray  # [n, I]
    classes: np.ndarray  # [n] int
    signal: np.ndarray  # [n]


PREDICTORS = ("signal", "class_mean", "agnostic")


def design(sample: Sample, predictor: str) -> np.ndarray:
    """Features [n, P]: class by class, exp of the signal and 1 (`signal`), 1 (`class_mean`), or one 1 for all."""
    if predictor == "agnostic":
        return np.ones((len(sample.classes), 1))
    own = (sample.classes[:, None] == np.unique(sample.classes)).astype(np.float64)
    return own if predictor == "class_mean" else np.hstack([own, own * np.exp(0.5 * sample.signal)[:, None]])


@dataclass(frozen=True)
class Trial:
    """One draw of fit and fresh requests under one delta: what was promised, and what the fresh requests did, [C]."""

    guaranteed: np.ndarray  # bool
    kept: np.ndarray  # bool, true mean of the fresh requests routed with the margin <= tau
    kept_point: np.ndarray  # bool, without the margin
    gain: np.ndarray  # mean reward above the safest instance's, with the margin; 0 without guarantee
    gain_point: np.ndarray  # without the margin
    margin: np.ndarray  # nats
    requests: np.ndarray  # int, fit

    @property
    def complies(self) -> bool | None:
        """Whether every guaranteed class kept its budget; None where none was."""
        return bool(self.kept[self.guaranteed].all()) if self.guaranteed.any() else None


def play(
    law: Population,
    seed: int,
    deltas: Sequence[float],
    value: float,
    predictor: str,
    scope: Literal["overall", "class"],
    replicates: int,
) -> dict[float, Trial]:
    """Draw fit and fresh requests independently, set margins on the first, route and judge the second, by delta."""
    rng = np.random.default_rng([seed, 1])
    fit, fresh = law.draw(law.fit, rng), law.draw(law.fresh, rng)
    reward, safest = np.array(law.reward), len(law.means) - 1
    if scope == "class":
        tau, groups, routed = law.tau(value), fit.classes, fresh.classes
    else:
        tau = np.array([law.tau(value) @ np.array(law.fresh) / sum(law.fresh)])
        groups, routed = np.zeros_like(fit.classes), np.zeros_like(fresh.classes)
    features, fold = design(fit, predictor), rng.permutation(len(groups)) % FOLDS
    penalty = np.full(features.shape[1], RIDGE)
    known = FitSet(
        fit.damage, groups, fit.classes, fold, reward, safest, linear_refit(features, fit.damage, penalty)
    )
    replicated = replay(known, len(tau), np.array(law.fresh), replicates, seed)
    predicted = design(fresh, predictor) @ fit_linear(features, fit.damage, penalty)
    paths = [
        frontier(predicted[routed == c][None], fresh.damage[routed == c][None], reward)
        for c in range(len(tau))
    ]
    uniform = rng.random((len(tau), 1))
    point = [path.at(t, u) for path, t, u in zip(paths, tau, uniform, strict=True)]
    trials = {}
    for delta in deltas:
        found = replicated.margins(tau, delta)
        safe = [
            path.at(t - own.margin, u) for path, t, own, u in zip(paths, tau, found, uniform, strict=True)
        ]
        guaranteed = np.array([own.guaranteed for own in found])
        trials[delta] = Trial(
            guaranteed=guaranteed,
            kept=np.array([one.true[0] for one in safe]) <= tau,
            kept_point=np.array([one.true[0] for one in point]) <= tau,
            gain=np.where(guaranteed, np.array([one.reward[0] for one in safe]) - reward[safest], 0.0),
            gain_point=np.array([one.reward[0] for one in point]) - reward[safest],
            margin=np.array([own.margin for own in found]),
            requests=np.array([own.fit for own in found]),
        )
    return trials
