"""The risk benchmark end to end on few draws and splits, carried on, and what it says to bad files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.risk_control import main, played, real_rows, summary
from tasks.contracts import InputError
from tests.tasks.routing.made_predictions import made_predictions


def row(
    guaranteed: list[bool], kept: list[bool], kept_point: list[bool], gain: list[float], requests: list[int]
):
    return {
        "delta": 0.1, "guaranteed": guaranteed, "kept": kept, "kept_point": kept_point, "gain": gain,
        "gain_point": [0.4, 0.4], "requests": requests,
    }  # fmt: skip


def test_summary_by_hand():
    """Three draws count: kept, kept (the class that was not is without guarantee), not kept: 2 of 3."""
    found = summary([
        row([True, True], [True, True], [True, True], [0.2, 0.3], [50, 250]),
        row([False, True], [False, True], [False, True], [0.0, 0.1], [50, 250]),
        row([True, False], [False, True], [True, True], [0.4, 0.0], [50, 250]),
        row([False, False], [False, False], [False, False], [0.0, 0.0], [50, 250]),
    ])  # fmt: skip
    assert found["counted"] == 3 and found["compliance"] == pytest.approx(2 / 3)
    assert found["point"] == 0.5 and found["guaranteed"] == [0.5, 0.5]
    # large classes that are guaranteed: 0.3 / 0.4 and 0.1 / 0.4
    assert found["kept_gain"] == pytest.approx(0.5) and found["kept_gain_least"] == pytest.approx(0.25)
    # Clopper-Pearson of 2 in 3 at 95 %; P(at most 2 of 3 | 0.9) = 1 - 0.9^3
    assert (found["low"], found["high"]) == pytest.approx((0.0943, 0.9916), abs=1e-4)
    assert found["p"] == pytest.approx(0.271)


def test_both_tables_and_carrying_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    frame = made_predictions(per_class=40)
    frame.to_parquet(tmp_path / "predictions.parquet")
    options = {"file": tmp_path / "draws.jsonl", "splits": 2, "output": tmp_path / "risk.md"}
    main(draws=2, predictions=f"made={tmp_path / 'predictions.parquet'}", **options)
    text = options["output"].read_text()
    assert "independent draws" in text and "split again and again: made" in text
    assert text.count("| overall | agnostic |") == 2 + 4  # two deltas; twice two kinds of damage
    lines = options["file"].read_text().splitlines()
    assert len(lines) == 2 * 5 * 2
    assert len(played(options["file"], 2)) == len(lines) == len(options["file"].read_text().splitlines())


def test_tau_is_the_rule_on_all_requests(tmp_path: Path):
    frame = made_predictions(per_class=40)
    frame.to_parquet(tmp_path / "predictions.parquet")
    rows, tau = real_rows(tmp_path / "predictions.parquet", "kl", "overall", "signal")
    w4, w3 = frame["kl_W4"].mean(), frame["kl_W3"].mean()
    assert tau == pytest.approx([w4 + 0.758 * (w3 - w4)])
    assert rows.reward == pytest.approx([2, 4 / 3, 1]) and rows.safest == 2
    assert np.ptp(rows.groups) == 0 and rows.features.shape == (120, 1 + 3 + 3)


def test_bad_files_are_said_before_anything_is_played(tmp_path: Path):
    for given, said in (
        ("a=nowhere.parquet", "nowhere.parquet: no such file"),
        ("nowhere", "expected NAME=FILE"),
    ):
        with pytest.raises(InputError, match=said):
            main(
                draws=1,
                file=tmp_path / "draws.jsonl",
                predictions=given,
                splits=1,
                output=tmp_path / "risk.md",
            )
    assert not (tmp_path / "draws.jsonl").exists()
