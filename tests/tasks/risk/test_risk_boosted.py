"""Boosted trees: as scikit-learn applies them, and what they start from."""

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingRegressor

from tasks.risk.boosted import DEPTH, LEAF, RATE, TREES, Boosted, fit_boosted
from tasks.risk.maps import Rows, design, fit_shrunk_mean

CLASSES = np.array(["a", "b", "c"])


def rows_of(count, seed):
    generator = np.random.default_rng(seed)
    signals = {name: generator.normal(size=count) for name in ("log_fwp", "log_length")}
    return Rows(CLASSES[np.arange(count) % 3], np.full(count, 100), signals)


def test_kept_as_arrays_they_predict_as_scikit_learn_does():
    rows, fresh = rows_of(120, 0), rows_of(500, 1)
    damage = np.abs(rows.signals["log_fwp"]) + (rows.classes == "b") + rows.signals["log_length"] ** 2
    ours = Boosted.from_dict(fit_boosted(rows, damage, ("log_fwp", "log_length")).__dict__ | {
        "base": fit_shrunk_mean(rows, damage).__dict__
    })  # fmt: skip
    base = fit_shrunk_mean(rows, damage)
    features = [design(own, ["log_fwp", "log_length"], ["a", "b", "c"]) for own in (rows, fresh)]
    theirs = GradientBoostingRegressor(
        n_estimators=TREES,
        max_depth=DEPTH,
        learning_rate=RATE,
        min_samples_leaf=LEAF,
        init="zero",
        random_state=0,
    ).fit(features[0], damage - base.predict(rows))
    assert ours.predict(fresh) == pytest.approx(base.predict(fresh) + theirs.predict(features[1]), abs=1e-12)
    # a law that no linear map sees
    error = ours.predict(rows) - damage
    assert error.var() < 0.6 * damage.var()


def test_no_more_than_a_leaf_of_requests_leaves_the_class_means():
    rows = rows_of(2 * LEAF - 1, 0)
    damage = rows.signals["log_fwp"]
    predicted = fit_boosted(rows, damage, ("log_fwp",)).predict(rows)
    base = fit_shrunk_mean(rows, damage).predict(rows)
    assert np.ptp(predicted - base) < 1e-12  # one leaf: the same for all
