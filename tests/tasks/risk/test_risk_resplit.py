"""Halvings of all requests: what is fitted where, figures by hand, and that findings are neither missed nor made up."""

import numpy as np
import pytest

from tasks.risk.candidates import AUTO, choose
from tasks.risk.holdout import r_squared, spearman_within
from tasks.risk.maps import Rows
from tasks.risk.predictor import CLASS_MEANS, PREDICTORS, fit_predictor, stratified_folds
from tasks.risk.resplit import STEPS, auto_figures, split_table, stratified_halves
from tasks.risk.simulated import permuted, simulated_requests

CHEAP = [name for name in PREDICTORS if name != "boosted"]


def test_halves_are_disjoint_stratified_and_seeded():
    classes = np.array(["b"] * 5 + ["a"] * 4 + ["c"] * 3 + ["d"])
    halves = stratified_halves(classes, 30, seed=1)
    for fit, judged in zip(halves.fit, halves.judged, strict=True):
        assert sorted([*fit, *judged]) == list(range(13))
        # a 2 and 2; b 3 fitted, 2 judged; c the other way round; the single d is always judged
        assert sorted(classes[fit]) == list("aabbbc")
        assert classes[judged].tolist() == halves.classes.tolist() == list("aabbccd")
    assert len(np.unique(np.sort(halves.fit, axis=1), axis=0)) > 20
    assert np.array_equal(halves.fit, stratified_halves(classes, 30, seed=1).fit)
    assert not np.array_equal(halves.fit, stratified_halves(classes, 30, seed=2).fit)


def test_every_split_is_a_fit_on_one_half_and_a_judgement_on_the_other():
    rows, damage = simulated_requests(70, 0.6, 0)
    halves = stratified_halves(rows.classes, 3, seed=0)
    found = split_table(rows, damage, halves, 32, ["class_mean", "ridge"])
    within, gain = [], []
    for fit, judged in zip(halves.fit, halves.judged, strict=True):
        true = damage[judged][None]
        ridge, mean = (
            fit_predictor(name, rows[fit], damage[fit], 32).predict(rows[judged])[None]
            for name in ("ridge", "class_mean")
        )
        within.append(spearman_within(ridge, true, rows.classes[judged])[0])
        gain.append((r_squared(ridge, true) - r_squared(mean, true))[0])
    figures = found["predictors"]["ridge"]
    assert figures["spearman_within"] == pytest.approx(np.mean(within))
    assert figures["within_gain_low"] == pytest.approx(np.percentile(within, 2.5))
    assert figures["r2_gain"] == pytest.approx(np.mean(gain))
    assert figures["r2_gain_high"] == pytest.approx(np.percentile(gain, 97.5))
    by_class = found["predictors"]["class_mean"]
    assert by_class["within_gain"] == by_class["r2_gain"] == 0
    assert "spearman_within" not in by_class and "beats_class_mean" not in by_class


def test_what_each_signal_adds():
    # log_fwp carries the damage, log_ppl follows it closely and comes first: it gets nearly all the credit; the length
    # gets none.
    rows, damage = simulated_requests(280, 0.7, 0)
    adds = split_table(rows, damage, stratified_halves(rows.classes, 20, 0), 32, ["class_mean"])["adds"]
    assert list(adds) == list(STEPS)
    assert abs(adds["log_length"]["r2"] - adds["class"]["r2"]) < 0.03
    assert adds["log_ppl"]["spearman_within"] > adds["log_length"]["spearman_within"] + 0.4
    assert adds["log_fwp"]["r2"] > adds["log_ppl"]["r2"]
    # all together are the predictor ridge
    whole = split_table(rows, damage, stratified_halves(rows.classes, 20, 0), 32, ["ridge"])["predictors"][
        "ridge"
    ]
    assert adds["separable"]["r2"] == pytest.approx(whole["r2"])


def finding(rows, damage, seed):
    """Does the choice on all rows read signals, and does what it chose beat the class mean over splits?"""
    fold = stratified_folds(rows.classes, 5, seed)
    name = choose(AUTO, rows, damage, fold, 32).predictor.name
    if name in CLASS_MEANS:
        return False
    halves = stratified_halves(rows.classes, 50, seed)
    return split_table(rows, damage, halves, 32, [name])["predictors"][name]["beats_class_mean"]


def test_a_rank_correlation_of_a_half_is_found_and_none_is_not_made_up():
    # benchmarks/prediction_power.py does the same with hundreds of simulations.
    made = [simulated_requests(168, 0.5, seed) for seed in range(8)]
    found = [finding(rows, damage, seed) for seed, (rows, damage) in enumerate(made)]
    assert sum(found) >= 7
    lost = [finding(rows, permuted(rows, damage, seed), seed) for seed, (rows, damage) in enumerate(made)]
    assert sum(lost) <= 1


def test_the_choice_is_made_again_in_every_split():
    rows, damage = simulated_requests(84, 0.0, 3)
    halves = stratified_halves(rows.classes, 4, 0)
    figures = auto_figures(rows, damage, halves, 32, 5, 0)
    assert sum(figures["chosen"].values()) == 4
    assert 0.7 < figures["coverage"] <= 1
    by_hand = []
    for fit in halves.fit:
        fold = stratified_folds(rows.classes[fit], 5, 0)
        by_hand.append(choose(AUTO, rows[fit], damage[fit], fold, 32).predictor.name)
    assert figures["chosen"] == {name: by_hand.count(name) for name in sorted(set(by_hand))}


def test_constant_signals_and_single_classes_are_judged_too():
    rows, damage = simulated_requests(60, 0.0, 1)
    classes = rows.classes.copy()
    classes[0] = "alone"
    flat = {name: np.ones(60) for name in rows.signals}
    rows = Rows(classes, rows.prompt_tokens, flat)
    halves = stratified_halves(classes, 5, 0)
    found = split_table(rows, damage, halves, 32, CHEAP)["predictors"]
    for name, figures in found.items():
        assert not any(np.isnan(value) for value in figures.values()), name
        assert not figures.get("beats_class_mean", False), name
    assert found["ridge"]["within_gain"] == 0
    assert "slope" not in found["isotonic"]  # the mean for everybody
