"""Splits of one set of requests: what is counted, and the interval over requests."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.risk.population import Population
from tasks.risk.splits import SplitRows, _half, _kept, split_compliance, standard_features

LAW = Population(fit=(60, 100, 140), noise=0.1)


def rows() -> SplitRows:
    sample = LAW.draw(LAW.fit, np.random.default_rng(0))
    features, penalty = standard_features(np.exp(0.5 * sample.signal)[:, None], sample.classes, 0.01)
    everyone = np.zeros_like(sample.classes)
    return SplitRows(sample.damage, everyone, sample.classes, features, penalty, np.array(LAW.reward), 2)


def test_splits_of_real_rows():
    found = split_compliance(rows(), np.array([0.2]), 0.1, splits=30, replicates=39, bootstrap=200)
    assert found["splits"] == 30 and found["counted"] >= 15
    assert found["compliance"] >= 0.8 and found["point"] < found["compliance"]
    assert found["compliance_low"] <= found["compliance"] <= found["compliance_high"]
    assert 0.5 <= found["kept_gain_least"] <= found["kept_gain"] < 1
    assert found["gain"] < found["gain_point"]


def test_without_room_nothing_is_promised_and_nothing_counted():
    found = split_compliance(rows(), np.array([0.052]), 0.1, splits=3, replicates=19)
    assert found["counted"] == 0 and found["guaranteed"] == [0.0] and found["gain"] == 0
    assert "compliance" not in found and "kept_gain" not in found


def test_weighted_requests_decide_whether_a_split_kept_its_budget():
    """Split 0 serves requests 0 and 1 (0.1 and 0.4, tau 0.3), split 1 has no guarantee, split 2 serves 2 (0.5)."""
    served = np.array([[0.1, 0.4, np.nan], [np.nan] * 3, [np.nan, np.nan, 0.5]])
    weights = np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    # kept: (0.25, not 0.5) -> 1/2; (not 0.4, nothing) -> 1/2; (0.3, nothing) -> 1
    assert _kept(weights, served, np.zeros(3, dtype=int), np.array([0.3])).tolist() == [0.5, 0.5, 1.0]


def test_halves_are_stratified():
    strata = np.repeat([0, 1, 2], [5, 5, 8])
    half = _half(strata, np.random.default_rng(0))
    assert np.bincount(strata[half]).tolist() == [2, 3, 4] and len(set(half)) == 9


def test_a_constant_signal_says_nothing():
    features, penalty = standard_features(np.ones((4, 1)), np.array([0, 0, 1, 1]), 0.5)
    assert features[:, 1].tolist() == [0] * 4 and penalty.tolist() == [0, 0.5, 0.5, 0.5]
    assert features[:, 2:].sum(axis=1) == pytest.approx(1)
