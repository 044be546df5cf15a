"""The choice among candidates: by hand, on planted laws, on noise; intervals that cover."""

import numpy as np
import pytest

from tasks.risk.candidates import AUTO, choose, residual_quantiles, simplest_of_the_best
from tasks.risk.predictor import CANDIDATES, CLASS_MEANS, fit_predictor, stratified_folds
from tasks.risk.simulated import simulated_requests


def test_the_simplest_within_one_standard_error_by_hand():
    # Paired differences to the best, "rich": of "plain" 0 2 0 2 (mean 1, deviation sqrt(4/3), error 0.577): too far
    # behind; of "middle" -1 2 -1 2 (mean 0.5, deviation sqrt(3), error 0.866): as good.
    rich = np.array([1.0, 1, 1, 1])
    squared = {"plain": np.array([1.0, 3, 1, 3]), "middle": np.array([0.0, 3, 0, 3]), "rich": rich}
    name, errors = simplest_of_the_best(squared)
    assert name == "middle"
    assert errors["plain"] == pytest.approx({"mse": 2, "behind": 1, "behind_se": np.sqrt(4 / 3) / 2})
    assert errors["middle"] == pytest.approx({"mse": 1.5, "behind": 0.5, "behind_se": np.sqrt(3) / 2})
    assert simplest_of_the_best({"plain": rich, "rich": rich})[0] == "plain"


def chosen(requests, within, seed, **how):
    rows, damage = simulated_requests(requests, within, seed, **how)
    fold = stratified_folds(rows.classes, 5, seed)
    return choose(AUTO, rows, damage, fold, 32), rows, damage, fold


def test_a_clear_signal_is_chosen_and_refitted_on_all_rows():
    found, rows, damage, fold = chosen(400, 0.7, 0)
    assert found.predictor.name not in CLASS_MEANS
    assert set(found.errors) == set(CANDIDATES)
    again = fit_predictor(found.predictor.name, rows, damage, 32)
    assert np.array_equal(again.predict(rows), found.predictor.predict(rows))
    # the predictions that routing reads: no row's own damage, nor that of its fold, is in them
    changed = damage.copy()
    changed[fold == 2] += 1000.0
    other = choose(found.predictor.name, rows, changed, fold, 32)
    assert np.array_equal(other.out_of_fold[fold == 2], found.out_of_fold[fold == 2])
    assert not np.allclose(other.out_of_fold[fold != 2], found.out_of_fold[fold != 2])


def test_noise_leaves_a_class_mean():
    names = [chosen(140, 0.0, seed)[0].predictor.name for seed in range(12)]
    assert sum(name in CLASS_MEANS for name in names) >= 10


def test_a_fixed_choice_is_obeyed():
    rows, damage = simulated_requests(100, 0.9, 0)
    fold = stratified_folds(rows.classes, 5, 0)
    found = choose("class_mean", rows, damage, fold, 32)
    assert found.predictor.name == "class_mean" and found.errors == {}
    assert found.to_dict() == {"name": "class_mean"}


def test_residual_quantiles_by_hand():
    # 39 residuals 1..39: 0.05 * 40 = 2, so the 2nd least and the 2nd largest
    assert residual_quantiles(np.arange(39.0, 0, -1)) == (2, 38)
    assert residual_quantiles(np.array([3.0, 1, 2])) == (1, 3)


def test_the_interval_covers_nine_of_ten_fresh_requests():
    covered = []
    for seed in range(20):
        rows, damage = simulated_requests(300, 0.5, seed)
        fit, fresh = np.arange(300) < 150, np.arange(300) >= 150
        fold = stratified_folds(rows.classes[fit], 5, seed)
        fitted = choose("ridge", rows[fit], damage[fit], fold, 32).predictor
        low, high = fitted.interval(rows[fresh]).T
        covered.append(np.mean((low <= damage[fresh]) & (damage[fresh] <= high)))
    # 20 means of 150: standard error of the mean about 0.006 from the fresh rows, 0.006 from the fit rows
    assert np.mean(covered) == pytest.approx(0.9, abs=0.03)
    with pytest.raises(ValueError, match="has no interval"):
        fit_predictor("ridge", rows, damage, 32).interval(rows)
