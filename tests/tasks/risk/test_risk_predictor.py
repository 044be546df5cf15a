"""Maps from signals to damage: against scikit-learn, on planted laws, out of fold, and through JSON."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.preprocessing import StandardScaler

from tasks.contracts import InputError, read_json, write_json
from tasks.risk.maps import (
    PENALTIES,
    Rows,
    constant_signals,
    design,
    fit_isotonic,
    fit_ridge,
    fit_shrunk_mean,
)
from tasks.risk.predictor import (
    PREDICTORS,
    Predictor,
    fit_predictor,
    out_of_fold,
    refit,
    stratified_folds,
    usable,
)


def made(rows=200, seed=0):
    generator = np.random.default_rng(seed)
    signals = ("log_fwp", "log_ppl", "log_length", "routing_frequency", "separable")
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
    rows = Rows.of(frame)
    return fit_predictor(name, rows, damage, min_tokens), out_of_fold(name, rows, damage, fold, min_tokens)


def explained(predicted, damage):
    return 1 - ((predicted - damage) ** 2).sum() / ((damage - damage.mean()) ** 2).sum()


def test_a_planted_linear_law_is_recovered_and_shuffled_signals_lose_it():
    frame, fresh = made(), made(seed=1)
    fitted, folded = fit("ridge", frame, linear_damage(frame))
    assert explained(fitted.predict(Rows.of(fresh)), linear_damage(fresh)) > 0.99
    assert explained(folded, linear_damage(frame)) > 0.99
    shuffled = frame.assign(log_fwp=frame["log_fwp"].to_numpy()[np.random.default_rng(2).permutation(200)])
    lost, folded = fit("ridge", shuffled, linear_damage(frame))
    assert explained(folded, linear_damage(frame)) < 0.5
    assert explained(lost.predict(Rows.of(fresh)), linear_damage(fresh)) < 0.6
    baseline, _ = fit("ridge_ppl", frame, linear_damage(frame))
    assert explained(baseline.predict(Rows.of(fresh)), linear_damage(fresh)) < 0.6


def scaled(rows, signals):
    """Standardised signals, and the 0 and 1 of four equal classes times sqrt(4), centred."""
    features = design(rows, list(signals), ["a", "b", "c", "d"])
    features[:, len(signals) :] *= 2
    features[:, : len(signals)] = StandardScaler().fit_transform(features[:, : len(signals)])
    return features - features.mean(axis=0)


def test_ridge_equals_scikit_learn():
    rows, damage = Rows.of(made()), linear_damage(made(), noise=0.3)
    features = scaled(rows, ("log_fwp", "log_length"))
    ours = fit_ridge(rows, damage, ("log_fwp", "log_length"), penalty=0.1)
    theirs = SklearnRidge(alpha=0.1 * len(rows)).fit(features, damage)
    assert ours.predict(rows) == pytest.approx(theirs.predict(features), abs=1e-10)


@pytest.mark.parametrize("noise", [0.01, 1.0, 5.0])
def test_the_penalty_is_that_of_leaving_each_row_out(noise):
    # Brute force: fit without row i on the same scaled features, by scikit-learn.
    rows, damage = Rows.of(made(40)), linear_damage(made(40), noise=noise)
    features, errors = scaled(rows, ("log_fwp", "log_length")), []
    for penalty in PENALTIES:
        squares = []
        for row in range(40):
            rest = np.arange(40) != row
            centre = features[rest].mean(axis=0)
            model = SklearnRidge(alpha=penalty * 40).fit(features[rest] - centre, damage[rest])
            squares.append((damage[row] - model.predict(features[[row]] - centre)[0]) ** 2)
        errors.append(np.mean(squares))
    assert fit_ridge(rows, damage, ("log_fwp", "log_length")).penalty == PENALTIES[int(np.argmin(errors))]


def test_a_small_class_is_drawn_closer_to_the_mean_by_ridge():
    # Two classes of 100 and one of 4, all of damage 1 above or below 0, no signal that varies.
    frame = pd.DataFrame(
        {"class": ["a"] * 100 + ["b"] * 100 + ["c"] * 4, "prompt_tokens": 50, "log_fwp": 1.0}
    )
    damage = np.repeat([-1.0, 1.0, 1.0], [100, 100, 4])
    predicted = fit_ridge(Rows.of(frame), damage, ("log_fwp",), penalty=0.1).predict(Rows.of(frame))
    assert predicted[0] < -0.8 and predicted[100] > 0.8
    assert 0 < predicted[200] < 0.6


def test_shrunk_means_by_hand():
    # a: 0 2 (mean 1), b: 4 6 (mean 5), c: 8 10 (mean 9). Inside: squares 2 + 2 + 2 = 6 with 3 degrees: within = 2.
    # Between: sum of 2 (mean - 5)^2 = 64; size = 6 - (4 + 4 + 4) / 6 = 4; between = (64 - 2 * 2) / 4 = 15.
    # Share = 15 / (15 + 2 / 2) = 15/16: means 5 - 4 * 15/16 = 1.25, 5, 8.75.
    frame = pd.DataFrame({"class": list("aabbcc"), "prompt_tokens": 50})
    found = fit_shrunk_mean(Rows.of(frame), np.array([0.0, 2, 4, 6, 8, 10]))
    assert found.means == pytest.approx({"a": 1.25, "b": 5, "c": 8.75})
    assert found.grand == pytest.approx(5)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-100, 100)), min_size=2, max_size=40))
def test_a_shrunk_mean_lies_between_the_plain_one_and_that_of_all(pairs):
    classes, damage = np.array([c for c, _ in pairs]), np.array([value for _, value in pairs])
    rows = Rows(classes, np.full(len(pairs), 50), {})
    found, plain = fit_shrunk_mean(rows, damage), fit_predictor("class_mean", rows, damage, 1).map
    assert damage.min() - 1e-6 <= found.grand <= damage.max() + 1e-6
    for name, mean in found.means.items():
        low, high = sorted((plain.means[name], found.grand))
        assert low - 1e-6 <= mean <= high + 1e-6


@given(st.floats(0.001, 1000), st.floats(-100, 100))
def test_the_unit_of_a_signal_changes_no_ridge_prediction(scale, shift):
    rows, damage = Rows.of(made(60)), linear_damage(made(60), noise=0.3)
    moved = {**rows.signals, "log_fwp": rows.signals["log_fwp"] * scale + shift}
    other = Rows(rows.classes, rows.prompt_tokens, moved)
    before, after = (fit_ridge(own, damage, ("log_fwp", "log_length")).predict(own) for own in (rows, other))
    assert after == pytest.approx(before, abs=1e-6)


def test_shrinking_is_strongest_for_small_classes_and_total_where_classes_are_alike():
    generator = np.random.default_rng(0)
    sizes = {"a": 40, "b": 40, "c": 3}
    frame = pd.DataFrame({"class": np.repeat(list(sizes), list(sizes.values())), "prompt_tokens": 50})
    level = frame["class"].map({"a": 0.0, "b": 1.0, "c": 2.0}).to_numpy()
    damage = level + generator.normal(size=83)
    found, plain = (
        fit_shrunk_mean(Rows.of(frame), damage),
        fit_predictor("class_mean", Rows.of(frame), damage, 1).map,
    )
    moved = {c: abs(found.means[c] - plain.means[c]) / abs(found.grand - plain.means[c]) for c in sizes}
    assert moved["c"] > 3 * moved["a"] > 0
    # the same values in every class: nothing between them
    alike = fit_shrunk_mean(Rows.of(frame.iloc[:80]), np.tile(damage[:40], 2))
    assert alike.means["a"] == alike.means["b"] == pytest.approx(damage[:40].mean())
    # classes of one request each: nothing is known about the spread inside, so all get the mean of all
    single = pd.DataFrame({"class": list("abc"), "prompt_tokens": 50})
    assert fit_shrunk_mean(Rows.of(single), np.array([1.0, 2, 6])).means == pytest.approx(
        dict.fromkeys("abc", 3)
    )


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
        _, folded = fit(name, frame, damage)
        assert explained(folded, damage) < 0.01, name
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
    rows, damage = Rows.of(frame), np.array([1.0, 3, 10, 30])
    assert fit_predictor("class_mean", rows, damage, 32).predict(rows).tolist() == [2, 2, 20, 20]
    folded = out_of_fold("class_mean", rows, damage, np.array([0, 1, 0, 1]), 32)
    assert folded.tolist() == [3, 1, 30, 10]  # the other row of the class


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_class_never_seen_counts_as_an_average_one(name):
    frame = made()
    damage = linear_damage(frame, noise=0.1)
    fitted, _ = fit(name, frame, damage)
    probe = made(40, seed=4)
    seen = np.mean([fitted.predict(Rows.of(probe.assign(**{"class": c}))) for c in "abcd"], axis=0)
    unseen = fitted.predict(Rows.of(probe.assign(**{"class": "z"})))
    # equal classes: the average over them (trees may split on a class, where the average is not exact)
    assert unseen == pytest.approx(seen, abs=0.2 if name == "boosted" else 1e-9)
    if name in ("class_mean", "shrunk_mean"):
        assert unseen == pytest.approx(np.full(40, damage.mean()))


def test_short_prompts_get_the_class_mean_and_do_not_train():
    frame, fresh = made(), made(seed=1)
    damage = linear_damage(frame)
    short = np.arange(200) % 3 == 0
    frame["prompt_tokens"] = fresh["prompt_tokens"] = np.where(short, 10, 100)
    damage[short] += 50  # would wreck the fit if short prompts took part in it
    fitted, folded = fit("ridge", frame, damage)
    assert explained(fitted.predict(Rows.of(fresh))[~short], linear_damage(fresh)[~short]) > 0.99
    means = {name: damage[(frame["class"] == name).to_numpy()].mean() for name in "abcd"}
    assert fitted.predict(Rows.of(fresh))[short] == pytest.approx(fresh["class"].map(means)[short].to_numpy())
    assert explained(folded[~short], damage[~short]) > 0.99
    with pytest.raises(InputError, match=r"0 of .* at least 500 tokens.*min_tokens"):
        fit("ridge", frame, damage, min_tokens=500)


def test_constant_signals_are_left_out_and_named():
    frame = made().assign(log_length=2.0)
    damage = linear_damage(frame)
    fitted, _ = fit("ridge", frame, damage)
    assert explained(fitted.predict(Rows.of(frame)), damage) > 0.99
    assert fitted.map.coefficient[fitted.map.signals.index("log_length")] == 0
    assert constant_signals(Rows.of(frame)) == ["log_length"]
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


def test_refitting_with_the_kept_settings_gives_the_same_predictor():
    frame = made()
    damage = linear_damage(frame, noise=0.5)
    for name in PREDICTORS:
        fitted, _ = fit(name, frame, damage)
        again = refit(fitted.name, fitted.settings, Rows.of(frame), damage, 32)
        assert again.to_dict() == fitted.to_dict(), name
    other = refit("ridge", {"penalty": 100.0}, Rows.of(frame), damage, 32)
    assert other.settings == {"penalty": 100.0}
    assert np.ptp(other.predict(Rows.of(frame))) < np.ptp(
        fit("ridge", frame, damage)[0].predict(Rows.of(frame))
    )


def test_an_instance_reads_its_own_signals():
    frame = made(4).assign(separable_W3=[1.0, 2, 3, 4])
    assert Rows.of(frame, "W3").signals["separable"].tolist() == [1, 2, 3, 4]
    assert Rows.of(frame, "W2").signals["separable"].tolist() == frame["separable"].tolist()
    assert Rows.of(frame, "W3").signals["log_ppl"].tolist() == frame["log_ppl"].tolist()


def test_without_a_separable_term_the_others_stay():
    frame = made().drop(columns="separable")
    damage = linear_damage(frame)
    assert {*PREDICTORS} - {*usable(Rows.of(frame))} == {"ridge_separable", "isotonic_separable"}
    fitted, _ = fit("ridge", frame, damage)
    assert fitted.map.signals == ["log_fwp", "log_ppl", "log_length"]
    assert explained(fitted.predict(Rows.of(frame)), damage) > 0.99


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
