"""Holdout figures: by hand, against scipy and scikit-learn, and on data with a planted truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import r2_score, roc_auc_score

from tasks.risk.holdout import (
    auroc,
    calibration_slope,
    prediction_figures,
    r_squared,
    rank_figures,
    ranks,
    spearman,
    spearman_within,
    stratified_draws,
)


def planted(rho, rows=600, seed=0):
    """Signal and damage with a rank correlation near `rho` within three classes of far-apart damage."""
    generator = np.random.default_rng(seed)
    classes = np.repeat(["a", "b", "c"], rows // 3)
    signal = generator.normal(size=rows)
    damage = rho * signal + np.sqrt(1 - rho**2) * generator.normal(size=rows)
    return signal, damage + np.select([classes == "a", classes == "b"], [0.0, 5.0], 10.0), classes


def test_figures_agree_with_the_libraries():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 40).astype(float), generator.normal(size=40)  # with ties
    upper = y > np.median(y)
    assert spearman(x[None], y[None])[0] == pytest.approx(spearmanr(x, y).statistic)
    assert auroc(x[None], upper[None])[0] == pytest.approx(roc_auc_score(upper, x))
    assert r_squared(x[None], y[None])[0] == pytest.approx(r2_score(y, x))
    assert calibration_slope(x[None], y[None])[0] == pytest.approx(np.polyfit(x, y, 1)[0])


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(-3, 3)))
def test_ranks_are_scipys(values):
    assert np.array_equal(ranks(values), rankdata(values, axis=-1))


def test_by_hand():
    # Within a: ranks 1 2 3 against 1 2 3: 1; within b: 1 2 against 2 1: -1;
    # weighted (3 * 1 + 2 * -1) / 5 = 0.2.
    classes = np.array(["a", "a", "a", "b", "b"])
    x, y = np.array([[1.0, 2, 3, 1, 2]]), np.array([[1.0, 2, 3, 2, 1]])
    assert spearman_within(x, y, classes) == pytest.approx([0.2])
    # R2: truth 0 2 (mean 1, spread 2), predicted 1 2: error 1, R2 = 1 - 1/2
    assert r_squared(np.array([[1.0, 2]]), np.array([[0.0, 2]])) == pytest.approx([0.5])
    # slope: predicted 0 1 against truth 0 2 is 2
    assert calibration_slope(np.array([[0.0, 1]]), np.array([[0.0, 2]])) == pytest.approx([2])


def test_draws_start_with_the_sample_and_keep_the_classes():
    classes = np.array(["a", "b", "a", "b", "b"])
    draws = stratified_draws(classes, 50, seed=3)
    assert draws.shape == (51, 5) and draws[0].tolist() == [0, 1, 2, 3, 4]
    assert (classes[draws] == classes).all()
    assert len(np.unique(draws[1:], axis=0)) > 30
    assert np.array_equal(draws, stratified_draws(classes, 50, seed=3))


def test_a_planted_correlation_is_found_and_a_permuted_one_is_not():
    signal, damage, classes = planted(0.5)
    draws = stratified_draws(classes, 200, seed=0)
    found = rank_figures(signal, damage, classes, draws)
    # Spearman of a bivariate normal with correlation 0.5: 6/pi * asin(0.25) = 0.483
    assert found["spearman_within"] == pytest.approx(0.483, abs=0.06)
    assert found["spearman_within_low"] < 0.483 < found["spearman_within_high"]
    shuffled = damage[np.random.default_rng(9).permutation(len(damage))]
    lost = rank_figures(signal, shuffled, classes, draws)
    assert lost["spearman_within_low"] < 0 < lost["spearman_within_high"]


def test_a_true_prediction_has_slope_one():
    signal, damage, classes = planted(0.9)
    centre = np.select([classes == "a", classes == "b"], [0.0, 5.0], 10.0)
    found = prediction_figures(centre + 0.9 * signal, damage, classes, stratified_draws(classes, 100, seed=0))
    assert found["slope"] == pytest.approx(1, abs=0.02)
    assert found["r2"] > 0.97
    assert found["auroc"] > 0.95
    assert found["r2_low"] < found["r2"] < found["r2_high"]


def test_the_interval_covers_the_truth():
    # 60 samples of 90 rows: the 95 % interval of the within-class Spearman has to cover 0.483 nearly always.
    covered = 0
    for seed in range(60):
        signal, damage, classes = planted(0.5, rows=90, seed=seed)
        found = rank_figures(signal, damage, classes, stratified_draws(classes, 120, seed))
        covered += found["spearman_within_low"] <= 0.483 <= found["spearman_within_high"]
    assert covered >= 50


def test_what_is_undefined_is_absent():
    classes = np.array(["a", "a", "b", "b"])
    draws = stratified_draws(classes, 30, seed=0)
    by_class = prediction_figures(np.array([1.0, 1, 2, 2]), np.array([1.0, 2, 3, 4]), classes, draws)
    assert "spearman" in by_class and "spearman_within" not in by_class
    flat = prediction_figures(np.ones(4), np.array([1.0, 2, 3, 4]), classes, draws)
    assert "spearman" not in flat and "slope" not in flat
    assert flat["auroc"] == 0.5
    assert not any(np.isnan(value) for value in (*by_class.values(), *flat.values()))
