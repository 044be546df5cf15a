"""The overhead's arithmetic on made-up rounds, and one round on a model of random weights."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from benchmarks import fwp_overhead
from tests.seeded_models import seeded_checkpoint


def test_median_interval_by_hand():
    # Of 6 values, both ends: P(Binomial(6, 1/2) < 1) = 1/64 < 2.5 %, < 2 would be 7/64. Of 5, no value is sure enough.
    assert fwp_overhead.median_interval(np.array([5.0, 1, 3, 2, 6, 4])) == (3.5, 1, 6)
    assert fwp_overhead.median_interval(np.arange(5.0)) == (2, -np.inf, np.inf)
    # Of 30, the 10th from either end: P(Binomial(30, 1/2) < 10) = 2.1 %, < 11 is 4.9 %
    assert fwp_overhead.median_interval(np.arange(1.0, 31)) == (15.5, 10, 21)
    assert binom.cdf(9, 30, 0.5) <= 0.025 < binom.cdf(10, 30, 0.5)


def row(number: int, extra: float) -> dict:
    ways = {"losses": 2.0, "fwp": 2.0 * (1 + extra), "everything": 2.2, "last": 1.6}
    return {"tokens": 512, "round": number, "threads": 1} | {
        way: {"wall": 2 * seconds, "cpu": seconds, "inside": 0.004 * seconds} for way, seconds in ways.items()
    }


def test_report_by_hand():
    # fwp / losses - 1 is 0.3 % or 0.5 %: at most 1 %; everything is 10 % over; losses / last - 1 = 25 %.
    rows = [row(number, 0.003 if number % 2 else 0.005) for number in range(30)]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in fwp_overhead.report(rows).splitlines()[6:]
    ]
    assert [line[1] for line in lines] == ["FWP (gate_prob)", "every signal of every instance", "no signal"]
    own, every, plain = lines
    assert own[:4] == ["512", "FWP (gate_prob)", "30", "1"]
    assert own[5] == own[6] == "0.40 % [0.30, 0.50]"
    assert own[7:10] == ["0.40 % [0.40, 0.40]", "3.1 %", "yes"]
    assert every[9] == "no" and every[8] == ""
    assert plain[10] == "25.00 % [25.00, 25.00]"
    few = fwp_overhead.report(rows[:3])
    assert "too few rounds" in few and "cannot tell" in few


@pytest.fixture
def artifacts(tmp_path):
    seeded_checkpoint(tmp_path / "artifacts/instances/W4")
    (tmp_path / "artifacts/requests").mkdir()
    ids = [np.arange(2, 40), np.arange(5, 60)]
    pd.DataFrame({"id": ["a", "b"], "ids": ids}).to_parquet(
        tmp_path / "artifacts/requests/calibration.parquet"
    )
    return tmp_path / "artifacts"


def test_rounds_are_added_to_the_file(artifacts, tmp_path, monkeypatch):
    file, report = tmp_path / "rounds.jsonl", tmp_path / "report.md"
    command = ["fwp_overhead", "--artifacts", artifacts, "--tokens", "64", "--file", file, "--report", report]
    monkeypatch.setattr("sys.argv", [*map(str, command), "--pairs", "1"])
    fwp_overhead.main()
    monkeypatch.setattr("sys.argv", [*map(str, command), "--pairs", "3"])
    fwp_overhead.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["round"] for r in rows] == [0, 1, 2]
    for own in rows:
        assert 0 < own["fwp"]["inside"] < own["fwp"]["cpu"] and own["losses"]["inside"] == 0
    assert "| 64 | FWP (gate_prob) | 3 | 1 |" in report.read_text()
