from __future__ import annotations

import subprocess
import sys

import pytest

from flows import results, ui
from tasks.contracts import write_json
from tests.flows.toy_dag import ROOT


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(
        (ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tables_and_what_to_do_next(project, capsys):
    write_json("metrics/reference.json", {"name": "reference", "size_gib": 0.25, "stored_bits": 16.0})
    write_json("metrics/instances/W3.json", {"name": "W3", "size_gib": 0.214, "stored_bits": 3.75})
    write_json("metrics/instances/W8.json", {"name": "W8", "size_gib": 0.238, "stored_bits": 8.5})
    write_json("metrics/scores/W3.json", {"holdout": {"dnll_mean": 0.1234, "kl_mean": 0.2345}})
    policy = {"multiplier": 1.284, "budget_kept": True, "dnll_mean": 0.15, "shares": {"W3": 0.85, "W4": 0.15}}
    write_json("metrics/routing.json", {"policies": {"lp_fwp": policy}})
    results.main()
    text = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "0.214" in rows["W3"] and "0.123" in rows["W3"] and "–" in rows["W3"]
    assert "1.284" in text and "yes" in text
    assert "W8" not in rows  # left behind by an earlier params.yaml
    assert "Variants: –" in text
    assert "make ui" in text and "dvc exp run -S" in text and "not written yet" in text


def test_no_results_is_a_clear_error(project):
    with pytest.raises(SystemExit, match="make run"):
        results.main()


def test_printing_results_loads_nothing_heavy():
    """`make run` with nothing to do takes 3 s in all."""
    heavy = {"torch", "numpy", "dvc", "prefect", "mlflow", "pandas"}
    code = f"import flows.results, sys; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_comparison_page_comes_from_the_last_tracked_run(project):
    assert ui.comparison_url(5001) == "http://127.0.0.1:5001/#/experiments"
    write_json("mlruns/tracked.json", {"compare_url_path": "/#/compare-runs?runs=1"})
    assert ui.comparison_url(5001) == "http://127.0.0.1:5001/#/compare-runs?runs=1"


def test_the_server_listens_on_this_machine_only(project):
    command = ui.server_command(5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--workers") + 1] == "1"
    assert command[-1] == f"sqlite:///{project / 'mlruns' / 'mlflow.db'}"
