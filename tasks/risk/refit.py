"""Fit a predictor again on every redrawn fit set: any predictor one by one, or a linear one all at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (times that each fit request is in the training set [B, F]) -> predicted damage of every fit request [B, F, I].
Refit = Callable[[np.ndarray], np.ndarray]


def refit_each(predict: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Refit:
    """A Refit out of predict(training rows, rows to predict) -> [rows, I], called once a replicate."""

    def refit(times: np.ndarray) -> np.ndarray:
        everyone = np.arange(times.shape[1])
        return np.stack([predict(np.repeat(everyone, row), everyone) for row in times])

    return refit


def linear_refit(features: np.ndarray, damage: np.ndarray, penalty: np.ndarray) -> Refit:
    """A Refit by ridge regression of damage [F, I] on features [F, P], penalty [P]: one product for all replicates."""
    products = np.einsum("fp,fq->fpq", features, features).reshape(len(features), -1)
    targets = np.einsum("fp,fi->fpi", features, damage).reshape(len(features), -1)
    size = features.shape[1]

    def refit(times: np.ndarray) -> np.ndarray:
        weights = times.astype(np.float64)
        gram = (weights @ products).reshape(-1, size, size) + np.diag(penalty)
        coefficient = np.linalg.solve(gram, (weights @ targets).reshape(len(times), size, -1))
        return features @ coefficient

    return refit


def fit_linear(features: np.ndarray, damage: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """The coefficients [P, I] of the same map, fitted once."""
    return np.linalg.solve(features.T @ features + np.diag(penalty), features.T @ damage)
