"""Whether margins keep their promise on real requests: split them again and again, fit on one half, serve the other.

Splits of one set of requests are not independent, so no binomial test: the interval is a bootstrap over requests,
in which every split serves the requests with the weights of the redraw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.risk.control import FitSet, replay
from tasks.risk.frontier import frontier
from tasks.risk.refit import fit_linear, linear_refit

INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class SplitRows:
    """R requests with known damage, and a linear predictor's features."""

    damage: np.ndarray  # [R, I] nats
    groups: np.ndarray  # [R] int, the budget class
    strata: np.ndarray  # [R] int, the class; splits are stratified by it
    features: np.ndarray  # [R, P]
    penalty: np.ndarray  # [P] per fit request
    reward: np.ndarray  # [I]
    safest: int

    def fit_set(self, rows: np.ndarray, folds: int, rng: np.random.Generator) -> FitSet:
        known, penalty = self.damage[rows], self.penalty * len(rows)
        fold = rng.permutation(len(rows)) % folds
        refit = linear_refit(self.features[rows], known, penalty)
        return FitSet(known, self.groups[rows], self.strata[rows], fold, self.reward, self.safest, refit)


def standard_features(signals: np.ndarray, strata: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """1, the signals [R, S] standardised, and the class: features [R, P] and their penalty [P], none on the 1.

    Damage takes no part, so that the spread of all requests may be used. A constant signal becomes 0.
    """
    spread = signals.std(axis=0)
    scaled = (signals - signals.mean(axis=0)) / np.where(spread > 0, spread, np.inf)
    own = np.eye(int(strata.max()) + 1)[strata]
    features = np.hstack([np.ones((len(strata), 1)), scaled, own])
    return features, np.concatenate([[0.0], np.full(features.shape[1] - 1, ridge)])


def split_compliance(
    rows: SplitRows,
    tau: np.ndarray,
    delta: float,
    splits: int = 200,
    replicates: int = 199,
    bootstrap: int = 1000,
    folds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Halve the requests `splits` times; tau [C] nats is one for all splits, never estimated again.

    compliance   of the splits with a guaranteed class, those in which each such class kept its budget, with
                 `_low` and `_high`; absent where no split has one
    point        of all splits, those in which the point estimate kept all budgets
    guaranteed   [C] share of splits
    gain         mean reward above the safest instance, 0 for classes without guarantee; gain_point: without margins
    kept_gain    the mean of (gain / gain_point) over guaranteed classes, and kept_gain_least
    """
    count, classes = len(rows.damage), len(tau)
    served, guaranteed = np.full((splits, count), np.nan), np.zeros((splits, classes), dtype=bool)
    point, gain, gain_point = (np.zeros((splits, classes)) for _ in range(3))
    for split in range(splits):
        rng = np.random.default_rng([seed, split])
        fit = _half(rows.strata, rng)
        fresh = rng.permutation(np.setdiff1d(np.arange(count), fit))
        known = rows.fit_set(fit, folds, rng)
        sizes = np.bincount(rows.strata[fresh], minlength=int(rows.strata.max()) + 1)
        found = replay(known, classes, sizes, replicates, split).margins(tau, delta)
        coefficient = fit_linear(rows.features[fit], known.damage, rows.penalty * len(fit))
        for c, own in enumerate(found):
            here = fresh[rows.groups[fresh] == c]
            path = frontier((rows.features[here] @ coefficient)[None], rows.damage[here][None], rows.reward)
            uniform = rng.random(1)
            plain = path.at(float(tau[c]), uniform)
            point[split, c], gain_point[split, c] = plain.true[0], plain.reward[0] - rows.reward[rows.safest]
            guaranteed[split, c] = own.guaranteed
            if own.guaranteed:
                served[split, here] = path.served(float(tau[c]) - own.margin, uniform)[0]
                gain[split, c] = (
                    path.at(float(tau[c]) - own.margin, uniform).reward[0] - rows.reward[rows.safest]
                )
    figures: dict[str, Any] = {
        "splits": splits,
        "counted": int(guaranteed.any(axis=1).sum()),
        "point": float((point <= tau).all(axis=1).mean()),
        "guaranteed": guaranteed.mean(axis=0).tolist(),
        "gain": float(gain.mean()),
        "gain_point": float(gain_point.mean()),
    }
    if guaranteed.any():
        weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=bootstrap)
        weights = np.concatenate([np.ones((1, count)), weights])
        kept = np.concatenate([_kept(part, served, rows.groups, tau) for part in np.array_split(weights, 20)])
        low, high = np.percentile(kept[1:], INTERVAL)
        ratio = gain[guaranteed] / np.maximum(gain_point[guaranteed], 1e-300)
        figures |= {
            "compliance": float(kept[0]),
            "compliance_low": float(low),
            "compliance_high": float(high),
        }
        figures |= {"kept_gain": float(ratio.mean()), "kept_gain_least": float(ratio.min())}
    return figures


def _kept(weights: np.ndarray, served: np.ndarray, groups: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Share of splits that keep their budgets [W], under request weights [W, R]; `served` [K, R], NaN if not."""
    known = ~np.isnan(served)
    kept = np.ones((len(weights), len(served)), dtype=bool)
    for c, budget in enumerate(tau):
        own = groups == c
        excess = np.where(known[:, own], served[:, own] - budget, 0.0)
        kept &= weights[:, own] @ excess.T <= 1e-12
    return kept[:, known.any(axis=1)].mean(axis=1)


def _half(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the rows of each stratum, sorted; the odd ones go to either half in turn."""
    taken, turn = [], 0
    for stratum in np.unique(strata):
        own = rng.permutation(np.flatnonzero(strata == stratum))
        size = (len(own) + turn) // 2
        turn = (turn + len(own)) % 2
        taken.append(own[:size])
    return np.sort(np.concatenate(taken))
