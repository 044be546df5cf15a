"""The power benchmark end to end on few draws, carried on, and its table by hand."""

from __future__ import annotations

import pytest

from benchmarks.prediction_power import draw, main, report
from tasks.contracts import InputError


def test_a_run_is_carried_on_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.prediction_power.SPLITS", 5)
    file, output = tmp_path / "draws.jsonl", tmp_path / "power.md"
    first = draw(file, 1, 70, ["0.5"])
    kept = file.read_text()
    main(draws=1, requests=70, laws="0.5,permuted", file=file, output=output)
    assert file.read_text().startswith(kept) and len(file.read_text().splitlines()) == 2
    assert first[0]["law"] == "0.5" and first[0]["seed"] == 0
    text = output.read_text()
    assert "| 0.5 | 1 |" in text and "| permuted | 1 |" in text and "| 0.3 |" not in text
    assert text.strip() in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--laws has '0\.9'"):
        main(draws=1, requests=70, laws="0.9", file=file, output=output)


def test_rates_by_hand():
    rows = [{"law": "0.5", "found": seed < 3, "chosen": True, "ridge": False} for seed in range(4)]
    # Clopper-Pearson of 3 in 4: 0.194 to 0.994; of 4 in 4: 0.025^(1/4) = 0.398 to 1; of 0 in 4: 0 to 0.602
    assert "| 0.5 | 4 | 0.750 (0.194 to 0.994) | 1.000 (0.398 to 1.000) | 0.000 (0.000 to 0.602) |" in report(
        rows, 9
    )
