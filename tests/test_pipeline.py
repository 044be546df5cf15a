"""The whole DAG on the tiny model: in one process, and through one real `dvc repro`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny_run import ROOT, make_workspace, small_params, stages


def run_stage(step: str, item: str | None) -> None:
    """Run a step's `main` in this process, in the current folder."""
    main = importlib.import_module(f"tasks.{step}").main
    if item is None:
        main()
    else:
        main(int(item) if step == "quantize_instances" else item)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_reference):
    """The artifacts and metrics of a whole run on the trained tiny checkpoint."""
    params = small_params(
        prepare_reference__source="path", prepare_reference__path__folder=str(tiny_reference)
    )
    folder = make_workspace(tmp_path_factory.mktemp("pipeline"), params)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for step, item in stages(params):
            run_stage(step, item)
    finally:
        os.chdir(before)
    return folder


def metric(folder: Path, name: str):
    return json.loads((folder / "metrics" / f"{name}.json").read_text())


def test_damage_falls_with_the_width(workspace):
    damage = [metric(workspace, f"scores/W{bits}")["all"]["kl_mean"] for bits in (2, 3, 4)]
    assert damage[0] > damage[1] > damage[2] > 0


def test_every_stage_left_its_metrics(workspace):
    dag = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((workspace / "params.yaml").read_text())
    items = {
        "${item}": [str(bits) for bits in params["quantize_instances"]["bits"]],
        "${key}": list(params["build_variants"]["variants"]),
    }
    for stage in dag.values():
        for entry in stage.get("do", stage).get("metrics", []):
            (name,) = entry
            marker = next((mark for mark in items if mark in name), None)
            names = [name.replace(marker, item) for item in items[marker]] if marker else [name]
            for path in names:
                assert (workspace / path).exists(), path


def test_metrics_hold_no_timing_but_throughput(workspace):
    for path in (workspace / "metrics").rglob("*.json"):
        if path.stem != "throughput":
            assert "second" not in path.read_text(), path


def test_a_variant_stays_within_its_bytes_and_evens_the_load(workspace):
    variant = metric(workspace, "variants/rq")
    assert variant["size_bytes"] <= variant["size_bytes_before"]
    assert variant["lis_mean"] < variant["lis_mean_before"]


def test_policies_are_judged_on_true_holdout_damage(workspace):
    routing = metric(workspace, "routing")
    assert routing["policies"]["static_W4"]["multiplier"] == pytest.approx(1)
    assert routing["policies"]["static_W2"]["multiplier"] == pytest.approx(2)


def test_a_second_run_of_a_step_writes_the_same_bytes(workspace, monkeypatch, tmp_path):
    copy = tmp_path / "again"
    shutil.copytree(workspace, copy)
    monkeypatch.chdir(copy)
    for step, item in [
        ("quantize_instances", "3"), ("measure_experts", None), ("score_requests", "W3"), ("calibrate_fwp", None),
        ("solve_routing", None), ("build_variants", "rq"),
    ]:  # fmt: skip
        run_stage(step, item)
    first = {path.relative_to(workspace): path.read_bytes() for path in sorted(workspace.rglob("artifacts/**/*"))
             if path.is_file()}  # fmt: skip
    again = {path.relative_to(copy): path.read_bytes() for path in sorted(copy.rglob("artifacts/**/*"))
             if path.is_file()}  # fmt: skip
    assert first.keys() == again.keys()
    assert [str(name) for name in first if first[name] != again[name]] == []


@pytest.fixture(scope="module")
def repro_workspace(tmp_path_factory, tiny_reference):
    """A copy of the project's tracked code with a reduced tiny configuration, as a stranger's clone would run it."""
    folder = tmp_path_factory.mktemp("repro")
    for name in ("tasks", "flows", ".dvc", "dvc.yaml", "pyproject.toml", "README.md", ".dvcignore"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tmp", "cache")
            )
        else:
            shutil.copy(source, folder)
    params = small_params(
        prepare_reference__source="path", prepare_reference__path__folder=str(tiny_reference),
        quantize_instances__bits=[3, 4], build_variants__variants={},
    )  # fmt: skip
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    (folder / "mlruns").mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def dvc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_dvc_repro_runs_everything_once_and_then_nothing(repro_workspace):
    first = dvc(repro_workspace, "repro")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert (repro_workspace / "artifacts/report/report.html").exists()
    lock = (repro_workspace / "dvc.lock").read_text()

    second = dvc(repro_workspace, "repro")
    assert second.returncode == 0
    assert "Running stage" not in second.stdout
    assert (repro_workspace / "dvc.lock").read_text() == lock
