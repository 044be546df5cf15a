"""Tracking is flat, idempotent, and reaches the project's own mlruns/ from wherever it runs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from tasks import track_runs
from tasks.contracts import read_json, write_json
from tasks.reporting import report
from tasks.reporting.records import NINE_KEYS
from tests.reporting_metrics import POLICIES, build

ROOT = Path(__file__).parents[2]
RUNS = 1 + 3 + 1 + len(POLICIES)  # reference, instances, variant, policies
README = "\n".join(f"<!-- results:{name} -->\n<!-- /results:{name} -->" for name in ("instances", "policies"))


@pytest.fixture(scope="module")
def tracked_once(tmp_path_factory):
    """A workspace whose results are tracked: MLflow's tables are created once for all tests."""
    folder = build(tmp_path_factory.mktemp("tracked"))
    shutil.copy(ROOT / "params.yaml", folder)
    (folder / "README.md").write_text(README)
    track(folder)
    return folder


@pytest.fixture
def workspace(tracked_once, tmp_path, monkeypatch):
    """A copy of it; pictures are drawn in other tests."""
    folder = tmp_path / "project"
    shutil.copytree(tracked_once, folder)
    monkeypatch.setattr(report, "draw", lambda *arguments: [])
    return folder


def track(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        track_runs.main()
    finally:
        os.chdir(before)


def query(folder: Path, text: str) -> list[tuple]:
    with sqlite3.connect(folder / "mlruns/mlflow.db") as database:
        return database.execute(text).fetchall()


def runs(folder: Path) -> list[tuple]:
    return query(folder, "select run_uuid from runs where lifecycle_stage = 'active'")


def change(path: Path, *keys: str, value: object) -> None:
    values = place = read_json(path)
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    write_json(path, values)


def test_flat_runs_with_the_same_keys_and_single_valued_params(tracked_once):
    assert len(runs(tracked_once)) == RUNS
    tags = query(tracked_once, "select key, value from tags")
    assert not [key for key, _ in tags if key == "mlflow.parentRunId"]
    assert {value for key, value in tags if key == "kind"} == {"reference", "instance", "variant", "policy"}
    assert {value for key, value in tags if key == "model"} == {"smollm2-moe"}
    assert sum(key == "version.quantize_instances" for key, _ in tags) == RUNS
    assert len({value for key, value in tags if key == "pipeline_run"}) == 1
    keys = {key for (key,) in query(tracked_once, "select distinct key from latest_metrics")}
    assert {key for key in keys if not key.startswith("z.")} == set(NINE_KEYS)
    params = dict(query(tracked_once, "select distinct key, value from params"))
    assert params["quantize_instances.group_size"] == "64"
    assert params["build_variants.variants.rq.replicas"] == "1"
    assert {status for (status,) in query(tracked_once, "select status from runs")} == {"FINISHED"}
    curve = query(tracked_once, "select count(*) from metrics where key = 'z.layers.lis_calibration'")
    assert curve == [(2 * 15,)]  # reference and variant, 15 MoE layers


def test_artifacts_of_the_experiment_lie_in_mlruns(tracked_once):
    (place,) = query(tracked_once, "select artifact_location from experiments where name = 'expertpool'")[0]
    assert place == (tracked_once / "mlruns/artifacts").as_uri()


def test_report_and_readme_are_written(tracked_once, capsys):
    assert (tracked_once / "artifacts/report/policies.png").exists()
    tracked = read_json(tracked_once / "mlruns/tracked.json")
    html = (tracked_once / "artifacts/report/report.html").read_text()
    assert tracked["compare_url_path"].replace("&", "&amp;") in html
    readme = (tracked_once / "README.md").read_text()
    assert "| W3 |" in readme and "tok/s" not in readme


def test_the_same_results_add_nothing(workspace, capsys):
    before, tracked = runs(workspace), (workspace / "mlruns/tracked.json").read_bytes()
    track(workspace)
    assert runs(workspace) == before
    assert (workspace / "mlruns/tracked.json").read_bytes() == tracked
    out = capsys.readouterr().out
    assert f"0 runs logged, {RUNS} unchanged (0 with new timings)" in out
    assert "README.md: no markers <!-- results:variants -->" in out


def test_changed_results_add_a_pipeline_run(workspace):
    change(workspace / "metrics/instances/W3.json", "size_gib", value=0.5)
    track(workspace)
    assert len(runs(workspace)) == 2 * RUNS
    assert len(query(workspace, "select distinct value from tags where key = 'pipeline_run'")) == 2


def test_a_new_timing_updates_the_run_that_is_there(workspace, capsys):
    change(workspace / "metrics/throughput.json", "W3", "decode_tokens_per_s", "median", value=99.0)
    track(workspace)
    assert len(runs(workspace)) == RUNS
    assert "(1 with new timings)" in capsys.readouterr().out
    latest = query(
        workspace,
        "select m.value from latest_metrics m join runs using (run_uuid) "
        "where key = 'tokens_per_s' and name = 'W3'",
    )
    assert latest == [(99.0,)]


def test_a_half_logged_run_is_logged_again(workspace, capsys):
    with sqlite3.connect(workspace / "mlruns/mlflow.db") as database:
        database.execute("update runs set status = 'RUNNING' where name = 'W3'")
    track(workspace)
    assert len(runs(workspace)) == RUNS
    assert f"1 runs logged, {RUNS - 1} unchanged" in capsys.readouterr().out


def test_what_params_no_longer_list_is_not_tracked(workspace):
    params = (workspace / "params.yaml").read_text().replace("bits: [2, 3, 4]", "bits: [2, 4]")
    (workspace / "params.yaml").write_text(params)
    track(workspace)
    new = query(
        workspace,
        "select name from runs where run_uuid in (select run_uuid from tags where key = 'fingerprint' and "
        f"value = '{read_json(workspace / 'mlruns/tracked.json')['fingerprint']}')",
    )
    assert len(new) == RUNS - 1
    assert ("W2",) in new and ("W3",) not in new


@pytest.mark.parametrize("place", [".dvc/tmp/exps/standard/tmpabc", ".study"])
def test_a_run_in_a_copy_reaches_the_main_mlruns(workspace, place):
    copy = workspace / place
    copy.mkdir(parents=True)
    for name in ("params.yaml", "metrics", "artifacts", "README.md"):
        source = workspace / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy)
    change(copy / "metrics/instances/W3.json", "size_gib", value=0.75)
    track(copy)
    assert len(runs(workspace)) == 2 * RUNS
    assert not (copy / "mlruns/mlflow.db").exists()
    assert (copy / "mlruns/tracked.json").exists()


def test_the_fingerprint_leaves_out_timings_and_threads():
    params = {"runtime.threads": 2, "a.b": 1}
    one = track_runs.fingerprint({"fwp": {"x": 1}, "throughput": {"W3": 1}}, params)
    assert one == track_runs.fingerprint(
        {"fwp": {"x": 1}, "throughput": {"W3": 2}}, params | {"runtime.threads": 1}
    )
    assert one != track_runs.fingerprint({"fwp": {"x": 2}, "throughput": {"W3": 1}}, params)
    assert one != track_runs.fingerprint({"fwp": {"x": 1}}, params | {"a.b": 2})


def test_a_full_disk_is_an_os_error_and_a_bug_is_not(tracked_once):
    from sqlalchemy.exc import SQLAlchemyError

    with pytest.raises(OSError, match="disk is full") as raised, track_runs.tracking(tracked_once):
        raise SQLAlchemyError("(sqlite3.OperationalError) database or disk is full")
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(SQLAlchemyError), track_runs.tracking(tracked_once):
        raise SQLAlchemyError("no such column")


def test_a_first_start_that_fails_leaves_no_half_database(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    def fail(*arguments, **options):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "search_experiments", fail)
        with pytest.raises(OSError, match="disk is full"), track_runs.tracking(tmp_path):
            pass
    assert [path.name for path in (tmp_path / "mlruns").iterdir()] == [".lock"]
    (tmp_path / "mlruns/.first").mkdir()  # what a kill leaves
    (tmp_path / "mlruns/.first/new.db").write_bytes(b"half")
    create_experiment(str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "mlruns").iterdir()) == [".lock", "mlflow.db"]


def create_experiment(root: str) -> None:
    with track_runs.tracking(Path(root)) as client:
        track_runs.experiment_id(client, "expertpool", Path(root))


def test_two_first_starts_at_once_share_one_experiment(tmp_path):
    spawn = multiprocessing.get_context("fork")
    starts = [spawn.Process(target=create_experiment, args=(str(tmp_path),)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(120)
    assert [start.exitcode for start in starts] == [0, 0]
    assert query(tmp_path, "select count(*) from experiments where name = 'expertpool'") == [(1,)]


def test_compare_page_takes_run_and_experiment_ids_as_json():
    path = track_runs.compare_path("1", ["a", "b"])
    assert path == "/#/compare-runs?runs=%5B%22a%22%2C%22b%22%5D&experiments=%5B%221%22%5D"
