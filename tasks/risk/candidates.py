"""Which predictor to use: by nested cross-validation on the fit requests, the simplest that is as good as the best.

Inner: a candidate chooses its own hyperparameters on the rows that it is fitted on. Outer: the candidates are compared
on folds that their fits never saw. Errors of two candidates on a request go up and down together, so they are compared
in pairs: a more complex one must lower the mean squared error by more than one standard error of the difference
(the one-standard-error rule of Breiman et al. 1984, on paired errors), else noise would choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tasks.risk.maps import Rows
from tasks.risk.predictor import CANDIDATES, Predictor, fit_predictor, out_of_fold, usable

AUTO = "auto"
NOMINAL = 0.9  # of the interval of residuals


@dataclass(frozen=True)
class Choice:
    """A predictor fitted on all fit requests, and what the folds said."""

    predictor: Predictor
    out_of_fold: np.ndarray  # [F] of the chosen candidate, each request predicted by a fit without its fold
    errors: dict[
        str, dict[str, float]
    ]  # candidate -> mse; behind and behind_se: mse - the best's; empty: not compared

    def to_dict(self) -> dict[str, Any]:
        settings = {"settings": self.predictor.settings} if self.predictor.settings else {}
        errors = {"errors": self.errors} if self.errors else {}
        return {"name": self.predictor.name, **settings, **errors}


def choose(name: str, requests: Rows, damage: np.ndarray, fold: np.ndarray, min_tokens: int) -> Choice:
    """Fit predictor `name`, or with "auto" the candidate that wins, on `damage` [F] nats; `fold` [F]."""
    names = [own for own in CANDIDATES if own in usable(requests)] if name == AUTO else [name]
    predicted = {own: out_of_fold(own, requests, damage, fold, min_tokens) for own in names}
    errors: dict[str, dict[str, float]] = {}
    if name == AUTO:
        name, errors = simplest_of_the_best({own: (p - damage) ** 2 for own, p in predicted.items()})
    fitted = fit_predictor(name, requests, damage, min_tokens)
    residuals = residual_quantiles(damage - predicted[name])
    return Choice(replace(fitted, residuals=residuals), predicted[name], errors)


def simplest_of_the_best(squared: dict[str, np.ndarray]) -> tuple[str, dict[str, dict[str, float]]]:
    """The first candidate whose mean error is at most one paired standard error behind the least.

    `squared`: candidate -> squared errors [F], simplest first.
    """
    best = min(squared, key=lambda name: float(squared[name].mean()))
    errors: dict[str, dict[str, float]] = {}
    chosen = ""
    for name, own in squared.items():
        behind = own - squared[best]
        error = float(behind.std(ddof=1)) / np.sqrt(len(own)) if len(own) > 1 else 0.0
        errors[name] = {"mse": float(own.mean()), "behind": float(behind.mean()), "behind_se": float(error)}
        if not chosen and behind.mean() <= error:
            chosen = name
    return chosen, errors


def residual_quantiles(residual: np.ndarray) -> tuple[float, float]:
    """5 % and 95 % quantiles [nats] of residuals [F] out of fold, as order statistics that a fresh residual of the
    same law passes with probability 5 % at most each (Vovk et al. 2005); the extremes where F < 19."""
    ranked, count = np.sort(residual), len(residual)
    tail = int(np.floor((1 - NOMINAL) / 2 * (count + 1) + 1e-9))
    return float(ranked[max(tail - 1, 0)]), float(ranked[min(count - tail, count - 1)])
