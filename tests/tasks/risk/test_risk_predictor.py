"""Maps from signals to damage: against scikit-learn, on planted laws, out of fold, and through JSON."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.preprocessing import StandardScaler

from tasks.contracts import InputError, read_json, write_json
from tasks.risk.maps import Rows, constant_signals, design, fit_isotonic, fit_ridge
from tasks.risk.predictor import PREDICTORS, Predictor, fit_predictor, stratified_folds


def made(rows=200, seed=0):
    generator = np.random.default_rng(seed)
    signals = ("log_fwp", "log_ppl", "log_length", "routing_frequency")
    frame = pd.DataFrame({name: generator.normal(size=rows) for name in signals})
    frame["class"] = np.array(["a", "b", "c", "d"])[np.arange(rows) % 4]
    frame["prompt_tokens"] = 100
    return frame


def linear_damage(frame, noise=0.0):
    level = frame["class"].map({"a": 0.0, "b": 0.2, "c": 0.4, "d": 0.1}).to_numpy()
    random = np.random.default_rng(5).normal(size=len(frame))
    return level + 0.3 * frame["log_fwp"].to_numpy() - 0.1 * frame["log_length"].to_numpy() + noise * random


def fit(name, frame, damage, min_tokens=32):
    fold = stratified_folds(frame["class"].to_numpy(), 5, seed=0)
    return fit_predictor(name, Rows.of(frame), damage, fold, min_tokens)


def explained(predicted, damage):
    return 1 - ((predicted - damage) ** 2).sum() / ((damage - damage.mean()) ** 2).sum()


def test_a_planted_linear_law_is_recovered_and_shuffled_signals_lose_it():
    frame, fresh = made(), made(seed=1)
    fitted, out_of_fold = fit("ridge", frame, linear_damage(frame))
    assert explained(fitted.predict(Rows.of(fresh)), linear_damage(fresh)) > 0.99
    assert explained(out_of_fold, linear_damage(frame)) > 0.99
    shuffled = frame.assign(log_fwp=frame["log_fwp"].to_numpy()[np.random.default_rng(2).permutation(200)])
    lost, out_of_fold = fit("ridge", shuffled, linear_damage(frame))
    assert explained(out_of_fold, linear_damage(frame)) < 0.5
    assert explained(lost.predict(Rows.of(fresh)), linear_damage(fresh)) < 0.6
    baseline, _ = fit("ridge_ppl", frame, linear_damage(frame))
    assert explained(baseline.predict(Rows.of(fresh)), linear_damage(fresh)) < 0.6


def test_ridge_equals_scikit_learn():
    frame = made()
    damage = linear_damage(frame, noise=0.3)
    ours = fit_ridge(Rows.of(frame), damage, ("log_fwp", "log_length"), penalty=0.1)
    features = design(Rows.of(frame), ["log_fwp", "log_length"], ["a", "b", "c", "d"])
    scaled = StandardScaler().fit_transform(features)
    theirs = SklearnRidge(alpha=0.1 * len(frame)).fit(scaled, damage)
    assert ours.predict(Rows.of(frame)) == pytest.approx(theirs.predict(scaled), abs=1e-10)


@pytest.mark.parametrize("sign", [1, -1])
def test_isotonic_equals_scikit_learn(sign):
    frame = made()
    frame["log_fwp"] = frame["log_fwp"].round(1)  # ties
    damage = linear_damage(frame, noise=0.3) * sign
    ours = fit_isotonic(Rows.of(frame), damage, "log_fwp")
    theirs = IsotonicRegression(increasing=sign > 0, out_of_bounds="clip").fit(frame["log_fwp"], damage)
    probe = made(seed=3)
    assert ours.predict(Rows.of(probe)) == pytest.approx(theirs.predict(probe["log_fwp"]), abs=1e-9)
    assert (np.diff(ours.y) * sign >= 0).all()


def test_out_of_fold_predictions_never_see_their_own_row():
    # Noise that nothing explains: fitted values follow it a little, out-of-fold ones must not.
    frame = made()
    damage = np.random.default_rng(7).normal(size=len(frame))
    for name in PREDICTORS:
        _, out_of_fold = fit(name, frame, damage)
        assert explained(out_of_fold, damage) < 0.01, name
    changed = damage.copy()
    changed[3] += 100
    fold = stratified_folds(frame["class"].to_numpy(), 5, seed=0)
    mates = fold == fold[3]
    before = fit("class_mean", frame, damage)[1]
    after = fit("class_mean", frame, changed)[1]
    assert np.array_equal(before[mates], after[mates])
    assert not np.array_equal(before[~mates], after[~mates])


def test_class_mean_by_hand():
    frame = pd.DataFrame({"class": ["a", "a", "b", "b"], "prompt_tokens": 50})
    fitted, out_of_fold = fit_predictor(
        "class_mean", Rows.of(frame), np.array([1.0, 3, 10, 30]), np.array([0, 1, 0, 1]), min_tokens=32
    )
    assert fitted.predict(Rows.of(frame)).tolist() == [2, 2, 20, 20]
    assert out_of_fold.tolist() == [3, 1, 30, 10]  # the other row of the class
    with pytest.raises(InputError, match="'c' has no fit request"):
        fitted.predict(Rows.of(pd.DataFrame({"class": ["c"], "prompt_tokens": [50]})))


def test_short_prompts_get_the_class_mean_and_do_not_train():
    frame, fresh = made(), made(seed=1)
    damage = linear_damage(frame)
    short = np.arange(200) % 3 == 0
    frame["prompt_tokens"] = fresh["prompt_tokens"] = np.where(short, 10, 100)
    damage[short] += 50  # would wreck the fit if short prompts took part in it
    fitted, out_of_fold = fit("ridge", frame, damage)
    assert explained(fitted.predict(Rows.of(fresh))[~short], linear_damage(fresh)[~short]) > 0.99
    means = {name: damage[(frame["class"] == name).to_numpy()].mean() for name in "abcd"}
    assert fitted.predict(Rows.of(fresh))[short] == pytest.approx(fresh["class"].map(means)[short].to_numpy())
    assert explained(out_of_fold[~short], damage[~short]) > 0.99
    with pytest.raises(InputError, match=r"0 of .* at least 500 tokens.*min_tokens"):
        fit("ridge", frame, damage, min_tokens=500)


def test_constant_signals_are_left_out_and_named():
    frame = made().assign(log_length=2.0)
    damage = linear_damage(frame)
    fitted, _ = fit("ridge", frame, damage)
    assert explained(fitted.predict(Rows.of(frame)), damage) > 0.99
    assert fitted.map.coefficient[fitted.map.signals.index("log_length")] == 0
    assert constant_signals(Rows.of(frame), ("log_fwp", "log_length")) == ["log_length"]
    flat, _ = fit("isotonic_length", frame, damage)
    assert flat.predict(Rows.of(frame)) == pytest.approx(np.full(len(frame), damage.mean()))


def test_folds_are_stratified_balanced_and_seeded():
    classes = np.array(["a"] * 12 + ["b"] * 9 + ["c"] * 4)
    fold = stratified_folds(classes, 5, seed=1)
    assert np.bincount(fold).tolist() == [5, 5, 5, 5, 5]
    for name in "abc":
        count = np.bincount(fold[classes == name], minlength=5)
        assert count.max() - count.min() <= 1
    assert np.array_equal(fold, stratified_folds(classes, 5, seed=1))
    assert not np.array_equal(fold, stratified_folds(classes, 5, seed=2))
    with pytest.raises(InputError, match="4 fit requests cannot make 5 folds"):
        stratified_folds(classes[:4], 5, seed=0)
    with pytest.raises(InputError, match="'z' has 1 fit request"):
        stratified_folds(np.array([*classes, "z"]), 5, seed=0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_json_keeps_every_bit(name, tmp_path):
    frame = made()
    frame.loc[::7, "prompt_tokens"] = 5
    fitted, _ = fit(name, frame, linear_damage(frame, noise=0.3))
    write_json(tmp_path / "predictor.json", fitted.to_dict(), digits=17)
    values = read_json(tmp_path / "predictor.json")
    assert json.loads(json.dumps(values)) == values
    again = Predictor.from_dict(values)
    probe = made(seed=3).assign(prompt_tokens=np.where(np.arange(200) % 5 == 0, 5, 100))
    assert np.array_equal(again.predict(Rows.of(probe)), fitted.predict(Rows.of(probe)))
