"""Gradient-boosted trees, kept as arrays: fitted by scikit-learn, applied with numpy alone.

They start from shrunk class means, so that what the trees add is about requests of one class. Their size is fixed
and small: at a few hundred requests, to choose it costs more than it gains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.risk.maps import ClassMean, Rows, design, fit_shrunk_mean

TREES, DEPTH, RATE, LEAF = 20, 2, 0.15, 5  # LEAF: requests at least


@dataclass(frozen=True)
class Boosted:
    """base + sum over trees of the value of the leaf that a request falls into."""

    signals: list[str]
    classes: list[str]  # one-hot features follow the signals
    base: ClassMean
    feature: list[list[int]]  # [trees, nodes]; -1: a leaf
    threshold: list[list[float]]  # a request goes left where its feature <= threshold
    left: list[list[int]]
    right: list[list[int]]
    value: list[list[float]]  # nats, the learning rate included

    def predict(self, requests: Rows) -> np.ndarray:
        # scikit-learn compares float32 features: at a threshold, float64 could go the other way
        features = design(requests, self.signals, self.classes).astype(np.float32)
        damage, row = self.base.predict(requests), np.arange(len(requests))
        trees = zip(self.feature, self.threshold, self.left, self.right, self.value, strict=True)
        for feature, threshold, left, right, value in trees:
            node = np.zeros(len(requests), dtype=np.int64)
            for _ in range(DEPTH):
                split = np.array(feature)[node]
                goes_left = features[row, np.maximum(split, 0)] <= np.array(threshold)[node]
                node = np.where(
                    split < 0, node, np.where(goes_left, np.array(left)[node], np.array(right)[node])
                )
            damage = damage + np.array(value)[node]
        return damage

    @classmethod
    def from_dict(cls, values: dict) -> Boosted:
        return cls(**{**values, "base": ClassMean(**values["base"])})


def fit_boosted(requests: Rows, damage: np.ndarray, signals: tuple[str, ...]) -> Boosted:
    """Trees of squared loss on what the shrunk class means leave (Friedman 2001); deterministic."""
    from sklearn import config_context
    from sklearn.ensemble import GradientBoostingRegressor

    base, classes = fit_shrunk_mean(requests, damage), np.unique(requests.classes).tolist()
    features = design(requests, list(signals), classes)
    model = GradientBoostingRegressor(
        n_estimators=TREES,
        max_depth=DEPTH,
        learning_rate=RATE,
        min_samples_leaf=LEAF,
        init="zero",
        random_state=0,
    )
    rest = damage - base.predict(requests)
    with config_context(
        skip_parameter_validation=True, assume_finite=True
    ):  # a third of the time of a small fit
        trees = [own.tree_ for own in model.fit(features, rest).estimators_[:, 0]]
    return Boosted(
        list(signals),
        classes,
        base,
        [np.where(tree.children_left < 0, -1, tree.feature).tolist() for tree in trees],
        [tree.threshold.tolist() for tree in trees],
        [tree.children_left.tolist() for tree in trees],
        [tree.children_right.tolist() for tree in trees],
        [(RATE * tree.value[:, 0, 0]).tolist() for tree in trees],
    )
