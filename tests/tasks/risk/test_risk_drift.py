"""Requests unlike the fit requests: flagged for the right reason, and rarely by chance."""

import json

import numpy as np
import pandas as pd
import pytest

from tasks.contracts import InputError
from tasks.risk.drift import WIDEN, Drift, drift_figures, words


def made(**columns):
    base = {"class": ["a", "b"], "log_length": [4.0, 5.0], "log_ppl": [1.0, 2.0], "separable_W3": [0.1, 0.3]}
    return pd.DataFrame({**base, **columns})


def test_by_hand():
    drift = Drift.of(made(), ["W2", "W3"])
    assert drift.signals == {"log_length": [4, 5], "log_ppl": [1, 2], "separable_W3": [0.1, 0.3]}
    assert WIDEN == 0.1  # log_length may be 3.9 to 5.1, log_ppl 0.9 to 2.1, separable_W3 0.08 to 0.32
    fresh = pd.DataFrame(
        {
            "class": ["a", "c", "a", "b", "a"],
            "log_length": [3.95, 4.5, 3.85, 4.5, 5.2],
            "log_ppl": [2.05, 1.5, 1.5, 1.5, 0.5],
            "separable_W3": [0.31, 0.2, 0.2, 0.33, 0.2],
        }
    )
    outside, reasons = drift.flags(fresh)
    assert outside.tolist() == [False, True, True, True, True]
    assert reasons.tolist() == [
        "",
        "class 'c' never seen",
        "prompt length below the fit range",
        "separable term of W3 above the fit range",
        "prompt length above the fit range; log PPL below the fit range",
    ]
    split = np.array(["fit", "holdout", "holdout", "holdout", "holdout"])
    figures = drift_figures(split, outside, reasons, drift)
    assert figures["fit"] == {"requests": 1, "outside": 0, "reasons": {}}
    assert figures["holdout"]["outside"] == 4
    assert figures["holdout"]["reasons"]["prompt length above the fit range"] == 1
    assert figures["chance_at_most"] == 1  # 2 * 3 / (2 + 1)


def test_fit_requests_are_never_outside_and_constants_stay_exact():
    frame = made(log_ppl=[1.5, 1.5])
    drift = Drift.of(frame, ["W3"])
    assert not drift.flags(frame)[0].any()
    assert drift.flags(frame.assign(log_ppl=[1.5, 1.6]))[1].tolist() == ["", "log PPL above the fit range"]
    assert words("log_fwp_W2") == "log FWP of W2" and words("log_fwp") == "log FWP"


def test_chance_flags_no_more_than_it_may():
    # 60 fit requests, one normal signal: 2 / 61 = 3.3 % of fresh ones would pass the range; widened by a tenth of it
    # at each end, fewer.
    shares = []
    for seed in range(60):
        values = np.random.default_rng(seed).normal(size=1060)
        frame = pd.DataFrame({"class": "a", "log_ppl": values})
        drift = Drift.of(frame[:60], [])
        assert drift.chance_at_most == pytest.approx(2 / 61)
        shares.append(drift.flags(frame[60:])[0].mean())
    assert 0.001 < np.mean(shares) < 2 / 61
    # unwidened, the law itself: exactly 2 / (n + 1)
    passed = []
    for seed in range(400):
        values = np.random.default_rng(seed).normal(size=1060)
        passed.append(np.mean((values[60:] < values[:60].min()) | (values[60:] > values[:60].max())))
    assert np.mean(passed) == pytest.approx(2 / 61, rel=0.15)


def test_json_and_what_cannot_be_held_against_it():
    drift = Drift.of(made(), ["W3"])
    stored = json.loads(json.dumps({"fit_range": drift.to_dict(), "version": 2}))
    assert Drift.from_dict(stored) == Drift.from_dict(stored["fit_range"]) == drift
    with pytest.raises(InputError, match="version 1"):
        Drift.from_dict({"version": 1, "instances": {}})
    with pytest.raises(InputError, match="no column 'separable_W3'"):
        drift.flags(made().drop(columns="separable_W3"))
    with pytest.raises(InputError, match="'log_ppl' of row 1 is nan"):
        drift.flags(made(log_ppl=[1.0, np.nan]))
