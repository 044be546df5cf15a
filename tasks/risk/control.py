"""How far below its budget a class must be routed so that the budget is kept with probability 1 - delta.

A point estimate keeps a budget about every other time (arXiv 2609.12550 reports 35-50 % of held-out splits). The
window LP therefore gets tau[c] - margin[c]: the (1 - delta / C) quantile of (realised - predicted) class mean over
bootstrap replicates that play the whole game on the fit requests. Each redraws the fit set and a fresh window of
the size to be served, predicts the window out of fold by maps of the redrawn fit set, solves the LP again at
tau - margin and rounds it. The choice of what looked cheap by chance (the winner's curse) is so inside the margin,
which is a fixed point, found by bisection. Joint over C classes by delta / C each.

A class whose normal error z s sqrt(1 / n_fit + 1 / n_fresh), or whose margin, passes `USABLE` of the room between tau
and its safest instance has no guarantee: it goes to the safest instance and is counted. By concavity of the LP the
others keep at least half of what the point estimate gains. A small class that has met no large damage yet looks
safe; to be guaranteed for that reason would break the promise, so variances are moderated: s is at least what
`PRIOR` further requests of the classes' common relative spread would make it (Smyth 2004), and the margin at least
the normal error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from tasks.contracts import InputError
from tasks.risk.frontier import Frontier, frontier
from tasks.risk.refit import Refit

GUARANTEED, NO_GUARANTEE = "guaranteed", "no guarantee"
PRIOR = 100  # requests
USABLE = 0.47  # of the room; a little less than half, as a fresh window's mix is not quite the fit set's

_BISECTIONS = 30


@dataclass(frozen=True)
class FitSet:
    """What the margin is estimated from: F fit requests, I instances."""

    damage: np.ndarray  # [F, I] true
    groups: np.ndarray  # [F] int, the budget class
    strata: np.ndarray  # [F] int, redraws keep their sizes; each lies inside one budget class
    fold: np.ndarray  # [F] int, a request is predicted by maps that saw no request of its fold
    reward: np.ndarray  # [I]
    safest: int  # the instance that a class without guarantee goes to
    refit: Refit


@dataclass(frozen=True)
class ClassMargin:
    """The margin of one budget class, nats per token."""

    status: str  # guaranteed | no guarantee
    margin: float  # taken off tau; 0 without guarantee
    spread: float  # s: of (true - predicted) over fit requests at the point estimate's allocation, moderated
    error: float  # z s sqrt(1 / n_fit + 1 / n_fresh)
    room: float  # tau - mean fit damage on the safest instance
    fit: int
    fresh: int

    @property
    def guaranteed(self) -> bool:
        return self.status == GUARANTEED


@dataclass(frozen=True)
class _Class:
    """The replicates of one budget class, and its fit requests as they are."""

    window: Frontier | None  # [B] windows; None: no request to serve
    real: Frontier  # [1] the fit set
    safest: float  # mean fit damage on the safest instance
    uniform: np.ndarray  # [B]

    @property
    def size(self) -> float:
        """sqrt(1 / n_fit + 1 / n_fresh)."""
        return 0.0 if self.window is None else (1 / self.real.requests + 1 / self.window.requests) ** 0.5

    def quantile(self, budget: float, level: float) -> float:
        """Of (realised - predicted) class mean where every replicate's window is routed at `budget`."""
        assert self.window is not None
        outcome = self.window.at(budget, self.uniform)
        place = min(int(np.ceil((len(self.uniform) + 1) * level - 1e-9)), len(self.uniform)) - 1
        return float(np.partition(outcome.true - outcome.predicted, place)[place])


@dataclass(frozen=True)
class Replay:
    """Bootstrap replicates of fitting, predicting and serving; margins of any tau and delta come from the same."""

    classes: list[_Class]  # [C]

    def margins(self, tau: np.ndarray, delta: float) -> list[ClassMargin]:
        """The margin of each budget class [C], for tau [C] nats fixed beforehand, joint at 1 - delta.

        Raises InputError where the replicates are too few for the quantile.
        """
        level = 1 - delta / len(self.classes)
        needed, replicates = replicates_needed(delta, len(self.classes)), len(self.classes[0].uniform)
        if replicates < needed:
            raise InputError(
                f"{replicates} replicates cannot give the {level:.4g} quantile of {len(self.classes)} joint "
                f"classes: at least {needed} are needed; raise the replicates or delta"
            )
        spread = _moderated(self.classes, np.asarray(tau, dtype=np.float64))
        return [
            _class_margin(played, float(own), float(s), level)
            for played, own, s in zip(self.classes, tau, spread, strict=True)
        ]


def replicates_needed(delta: float, classes: int) -> int:
    """The fewest replicates of which an order statistic bounds the 1 - delta / classes quantile."""
    return int(np.ceil(classes / delta - 1e-9)) - 1


def replay(fit: FitSet, classes: int, fresh: np.ndarray, replicates: int, seed: int) -> Replay:
    """Play the game `replicates` times, for windows of `fresh` [G] requests of each stratum.

    Raises InputError where a stratum to serve has fewer than two fit requests.
    """
    _check(fit, classes, fresh)
    rng = np.random.default_rng(seed)
    have = np.bincount(fit.strata, minlength=len(fresh))
    redrawn, window = (_redraw(rng, fit.strata, sizes, replicates) for sizes in (have, fresh))
    predicted, once = _out_of_fold(fit, redrawn), _out_of_fold(fit, np.arange(len(fit.groups))[None])
    uniform = rng.random((classes, replicates))
    played = []
    for c in range(classes):
        own = np.flatnonzero(fit.groups == c)
        served = np.flatnonzero(fit.groups[window[0]] == c)
        played.append(
            _Class(
                window=_frontier(fit, predicted, window[:, served]) if served.size else None,
                real=_frontier(fit, once, rng.permutation(own)[None]),
                safest=float(fit.damage[own, fit.safest].mean()),
                uniform=uniform[c],
            )
        )
    return Replay(played)


def _moderated(classes: list[_Class], tau: np.ndarray) -> np.ndarray:
    """s [C]: own spread, or if larger, moderated by PRIOR requests of the common spread relative to tau."""
    count = np.array([played.real.requests for played in classes], dtype=np.float64)
    own = np.array([played.real.errors(t).std(ddof=1) for played, t in zip(classes, tau, strict=True)])
    common = (
        np.sqrt((count * (own / tau) ** 2).sum() / count.sum()) * np.abs(tau) if (tau != 0).all() else own
    )
    return np.maximum(own, np.sqrt((count * own**2 + PRIOR * common**2) / (count + PRIOR)))


def _class_margin(played: _Class, tau: float, spread: float, level: float) -> ClassMargin:
    error, room = float(norm.ppf(level)) * spread * played.size, tau - played.safest
    status, margin = NO_GUARANTEE, 0.0
    # Judged at the largest margin first: a larger one would not be used.
    most = USABLE * room
    if played.window is not None and error <= most >= played.quantile(tau - most, level):
        low, high = error, most
        if played.quantile(tau - low, level) <= low:
            high = low
        else:
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                low, high = (
                    (low, middle) if played.quantile(tau - middle, level) <= middle else (middle, high)
                )
        status, margin = GUARANTEED, high
    fresh = 0 if played.window is None else played.window.requests
    return ClassMargin(status, margin, spread, error, room, played.real.requests, fresh)


def _frontier(fit: FitSet, predicted: np.ndarray, rows: np.ndarray) -> Frontier:
    """The frontier of fit rows [B, n] under each replicate's predictions [B, F, I]."""
    flat = rows + np.arange(len(rows))[:, None] * predicted.shape[1]
    seen = np.take(predicted.reshape(-1, predicted.shape[2]), flat, axis=0)
    return frontier(seen, np.take(fit.damage, rows, axis=0), fit.reward)


def _redraw(rng: np.random.Generator, strata: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """`sizes` [G] rows of each stratum with replacement, `count` times: [count, sum of sizes].

    A column has the same stratum in every replicate; the columns of strata are mixed, for steps that tie.
    """
    drawn = [
        rng.choice(np.flatnonzero(strata == stratum), size=(count, size))
        for stratum, size in enumerate(sizes)
        if size
    ]
    together = np.concatenate(drawn, axis=1)
    return together[:, rng.permutation(together.shape[1])]


def _out_of_fold(fit: FitSet, drawn: np.ndarray) -> np.ndarray:
    """Predicted damage [B, F, I] of every fit request by maps of the fit sets `drawn` [B, F] without its fold."""
    times = np.stack([np.bincount(row, minlength=len(fit.groups)) for row in drawn])
    predicted = np.empty((len(drawn), *fit.damage.shape))
    for fold in np.unique(fit.fold):
        held = fit.fold == fold
        predicted[:, held] = fit.refit(np.where(held, 0, times))[:, held]
    return predicted


def _check(fit: FitSet, classes: int, fresh: np.ndarray) -> None:
    have = np.bincount(fit.strata, minlength=len(fresh))
    if len(have) > len(fresh) or set(fit.groups.tolist()) != set(range(classes)):
        raise ValueError(
            f"{len(have)} strata for {len(fresh)} sizes, budget classes {sorted(set(fit.groups.tolist()))}"
        )
    if len(set(zip(fit.strata.tolist(), fit.groups.tolist(), strict=True))) > np.count_nonzero(have):
        raise ValueError("a stratum lies in several budget classes")
    lacking = np.flatnonzero((np.asarray(fresh) > 0) & (have < 2))
    if lacking.size:
        raise InputError(
            f"class number {int(lacking[0])} of the window has {int(have[lacking[0]])} fit requests, a margin "
            "needs at least 2: merge the class or give more requests"
        )
