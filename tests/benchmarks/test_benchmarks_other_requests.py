"""Other requests on a run's pool: which steps run where, carrying on, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks import other_requests
from tasks.contracts import InputError, read_json
from tests.tiny_run import small_params


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path):
    (tmp_path / "artifacts/reference").mkdir(parents=True)
    with pytest.raises(InputError, match="lacks instances, experts, decomposition: run `make run` first"):
        other_requests.workspace(tmp_path / "w", tmp_path / "artifacts", tmp_path / "rows.jsonl", 8)
    for name in other_requests.SHARED:
        (tmp_path / "artifacts" / name).mkdir(exist_ok=True)
    with pytest.raises(InputError, match=r"rows.jsonl: no such file"):
        other_requests.workspace(tmp_path / "w", tmp_path / "artifacts", tmp_path / "rows.jsonl", 8)
    assert not (tmp_path / "w").exists()


def test_steps_run_on_the_rows_with_the_runs_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(small_params()), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in other_requests.SHARED:
        (tmp_path / "artifacts" / name).mkdir(parents=True)
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    params = other_requests.workspace(Path("w"), Path("artifacts"), file, 24)
    own = params.prepare_requests
    assert (own.source, own.count, own.jsonl.file) == ("jsonl", 24, str(file))
    assert Path("w/artifacts/reference").resolve() == (tmp_path / "artifacts/reference").resolve()
    ran: list[list[str]] = []

    class Done:
        returncode = 0

    def fake(command: list[str], cwd: Path, **_: object) -> Done:
        ran.append(command[2:])
        if command[2] == "tasks.prepare_requests":
            (cwd / "artifacts/requests").mkdir(parents=True, exist_ok=True)
            (cwd / "artifacts/requests/requests.parquet").write_bytes(b"rows")
        (cwd / "artifacts/scores").mkdir(exist_ok=True)
        return Done()

    monkeypatch.setattr(other_requests.subprocess, "run", fake)
    other_requests.steps(Path("w"), params)
    assert [" ".join(command) for command in ran] == [
        "tasks.prepare_requests", "tasks.score_requests reference", "tasks.score_requests W2",
        "tasks.score_requests W3", "tasks.score_requests W4", "tasks.calibrate_fwp", "tasks.solve_routing",
    ]  # fmt: skip
    ran.clear()
    other_requests.steps(Path("w"), params)  # carried on: the scores are there
    assert [command[0] for command in ran] == [
        "tasks.prepare_requests",
        "tasks.calibrate_fwp",
        "tasks.solve_routing",
    ]
    monkeypatch.setattr(
        other_requests.subprocess, "run", lambda *_, **__: type("Failed", (), {"returncode": 1})
    )
    with pytest.raises(InputError, match="prepare_requests failed"):
        other_requests.steps(Path("w"), params)


def test_the_figures_keep_the_target_in_use(tmp_path: Path):
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    both = {"kl_response": {"W2": []}, "dnll_response": {"W2": ["ridge"]}}
    fwp = {
        "damage": "kl",
        "scored": "response",
        "splits": {"count": 2, "targets": both, "beats": both},
        "holdout": 1,
    }
    (metrics / "fwp.json").write_text(json.dumps(fwp))
    (metrics / "requests.json").write_text(json.dumps({"requests": 9, "classes": {"a": {}}}))
    (metrics / "routing.json").write_text(json.dumps({"budget": {}}))
    found = other_requests.figures(tmp_path, "rows.jsonl")
    assert found["requests"] == {"count": 9, "classes": {"a": {}}} and found["file"] == "rows.jsonl"
    assert found["fwp"] == {
        "damage": "kl", "scored": "response",
        "splits": {"count": 2, "targets": {"kl_response": {"W2": []}}, "beats": {"kl_response": {"W2": []}}},
    }  # fmt: skip
    assert read_json(metrics / "fwp.json")["holdout"] == 1
