"""Put the results where people look: MLflow, the report, README's tables.

In: metrics/, artifacts/fwp/predictions.parquet, artifacts/decomposition/terms.parquet, params.yaml. Out: one
flat MLflow run per reference, instance, variant and policy in <project>/mlruns/mlflow.db
(reporting/records.py), artifacts/report/, the tables between README's markers, and mlruns/tracked.json, which a
clone lacks, so that its first run fills MLflow. Costs ten to twenty seconds, most of them MLflow's import and
the first creation of its tables.

The fingerprint of parameters and metrics (timings aside) is a tag: equal results add no run, they only bring
the timings up to date; a run that a kill left half-logged is logged again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pandas as pd

from tasks.console import run_step, timed
from tasks.contracts import InputError, project_root, replacing_folder, write_json
from tasks.params import Params, load_params
from tasks.reporting import readme, report, tables
from tasks.reporting.records import Record, records

if TYPE_CHECKING:
    from mlflow import MlflowClient

VERSION = 1

SERVER = "http://127.0.0.1:5000"  # where `make ui` serves
TIMINGS = ("tokens_per_s", "z.speed.prefill_tokens_per_s")


def run(
    metrics: Path,
    predictions: Path,
    terms: Path,
    report_folder: Path,
    readme_file: Path,
    root: Path,
    params: Params,
) -> dict[str, str]:
    """Write the report and README's tables, log what root/mlruns lacks; returns what tracked.json holds."""
    found = tables.read_metrics(metrics, params.model_names)
    flat = {key: "" if value is None else value for key, value in tables.flatten(params.model_dump()).items()}
    mark = fingerprint(found, flat)
    pipeline_run = mark[:12]
    frame, taken_apart = (pd.read_parquet(own) if own.exists() else None for own in (predictions, terms))

    with tracking(root) as client:
        experiment = experiment_id(client, params.track_runs.experiment, root)
        path = filter_path(experiment, pipeline_run)
        with timed("report"), replacing_folder(report_folder) as folder:
            report.write_report(folder, found, frame, flat, pipeline_run, SERVER + path, taken_apart)
        missing = readme.write_tables(readme_file, readme_tables(found))
        with timed("MLflow runs"):
            ids, new, timed_again = log_records(
                client, experiment, records(found), mark, run_tags(found, params), flat
            )

    unchanged = f"{len(ids) - new} unchanged ({timed_again} with new timings)"
    print(f"MLflow: {new} runs logged, {unchanged}, in {root / 'mlruns' / 'mlflow.db'}")
    print(f"        pipeline run {pipeline_run} of experiment '{params.track_runs.experiment}'")
    print(f"compare (after `make ui`): {SERVER}{compare_path(experiment, ids)}")
    print(f"report: {report_folder / 'report.html'}")
    for name in missing:
        print(
            f"{readme_file}: no markers <!-- results:{name} --> ... <!-- /results:{name} -->: table left out"
        )
    return {"fingerprint": mark, "compare_url_path": path}


def readme_tables(metrics: Mapping[str, Any]) -> dict[str, str]:
    """README's tables by marker name; timings are left out, so that a repetition changes nothing."""
    untimed = {key: value for key, value in metrics.items() if key != "throughput"}
    return {
        "instances": tables.markdown(tables.instance_rows(untimed)),
        "variants": tables.markdown(tables.variant_rows(untimed)),
        "policies": tables.markdown(tables.policy_rows(untimed)),
    }


def fingerprint(metrics: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """sha256 of metrics and flat parameters, but for timings and `runtime`."""
    content = {
        "metrics": {key: value for key, value in metrics.items() if key != "throughput"},
        "params": {key: value for key, value in params.items() if not key.startswith("runtime.")},
        "version": VERSION,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- MLflow -------------------------------------------------------------------------------------------------


@contextmanager
def tracking(root: Path) -> Iterator[MlflowClient]:
    """The client of root/mlruns/mlflow.db, under a file lock: two first starts at once would spoil it.

    Raises OSError (no space) where the database cannot be written, InputError where it is of an older MLflow.
    """
    folder = root / "mlruns"
    folder.mkdir(exist_ok=True)
    database = folder / "mlflow.db"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with timed("MLflow's import"):
            from mlflow import (
                MlflowClient,
                MlflowException,
            )  # seconds to import: not before the inputs are read
            from sqlalchemy.exc import SQLAlchemyError
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            if not database.exists():
                with timed("MLflow's tables"):
                    _create(database)
            yield MlflowClient(f"sqlite:///{database}")
        except (SQLAlchemyError, MlflowException, sqlite3.Error) as error:
            if "out-of-date database schema" in str(error):
                upgrade = f"mlflow db upgrade sqlite:///{database}"
                raise InputError(
                    f"{database} is of an older MLflow; keep a copy and run: {upgrade}"
                ) from None
            if "disk" not in str(error):  # SQLite: "database or disk is full", "disk I/O error"
                raise
            raise OSError(errno.ENOSPC, "the disk is full", str(database)) from None


def _create(database: Path) -> None:
    """Make the tables in a scratch folder and move them into place: half a migration cannot be carried on."""
    from mlflow import MlflowClient

    scratch = database.parent / ".first"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
    scratch.mkdir()
    try:
        MlflowClient(f"sqlite:///{scratch / 'new.db'}").search_experiments(max_results=1)
        with (
            closing(sqlite3.connect(scratch / "new.db")) as source,
            closing(sqlite3.connect(scratch / "whole.db")) as whole,
        ):
            source.backup(whole)  # MLflow's pool still holds the first file
        (scratch / "whole.db").replace(database)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def experiment_id(client: MlflowClient, name: str, root: Path) -> str:
    """The id of experiment `name`, created with its artifacts under root/mlruns/artifacts, or restored."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, artifact_location=(root / "mlruns" / "artifacts").as_uri())
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def log_records(
    client: MlflowClient,
    experiment: str,
    listed: list[Record],
    mark: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
) -> tuple[list[str], int, int]:
    """Log the records that have no finished run with fingerprint `mark`.

    Returns the run ids of all records in their order, the number of new runs, and that of unchanged ones with
    new timings. Logged from the last to the first: the UI shows the latest ten at once.
    """
    there: dict[tuple[str, str], Any] = {}
    for old in client.search_runs([experiment], f"tags.fingerprint = '{mark}'", max_results=1000):
        if old.info.status == "FINISHED":
            there[old.data.tags["kind"], old.data.tags["name"]] = old
        else:
            client.delete_run(old.info.run_id)
    ids, new, timed_again = [], 0, 0
    for record in reversed(listed):
        old = there.get((record.kind, record.name))
        if old is None:
            ids.append(_log(client, experiment, record, {**tags, "fingerprint": mark}, params))
            new += 1
            continue
        ids.append(old.info.run_id)
        timings = [point for point in record.points() if point[0] in TIMINGS]
        if any(old.data.metrics.get(key) != value for key, value, _ in timings):
            _log_metrics(client, old.info.run_id, timings)
            timed_again += 1
    return ids[::-1], new, timed_again


def _log(
    client: MlflowClient, experiment: str, record: Record, tags: Mapping[str, str], params: Mapping[str, Any]
) -> str:
    from mlflow.entities import Param

    own = {"kind": record.kind, "name": record.name, "pipeline_run": tags["fingerprint"][:12]}
    logged = client.create_run(experiment, run_name=record.name, tags={**tags, **record.tags, **own})
    _log_metrics(client, logged.info.run_id, record.points())
    values = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, len(values), 100):  # MLflow's limit per batch
        client.log_batch(logged.info.run_id, params=values[start : start + 100])
    client.set_terminated(logged.info.run_id)
    return logged.info.run_id


def _log_metrics(client: MlflowClient, run_id: str, points: list[tuple[str, float, int]]) -> None:
    """log_batch, in batches: a thousand log_metric calls take seconds."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    for start in range(0, len(points), 1000):
        batch = [Metric(key, value, now, step) for key, value, step in points[start : start + 1000]]
        client.log_batch(run_id, metrics=batch)


def model_name(params: Params) -> str:
    """The reference's source, and which model where the source has several."""
    source = params.prepare_reference.source
    which = {
        "hub": params.prepare_reference.hub.id,
        "path": Path(params.prepare_reference.path.folder or "").name,
    }
    return which.get(source, source)


def run_tags(metrics: Mapping[str, Any], params: Params) -> dict[str, str]:
    """Tags that every run of this pipeline run carries."""
    tags = {f"version.{step}": str(version) for step, version in tables.step_versions(metrics).items()}
    tags |= {"version.track_runs": str(VERSION), "model": model_name(params)}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return tags | ({"git_commit": commit.stdout.strip()} if commit.returncode == 0 else {})


def compare_path(experiment: str, run_ids: list[str]) -> str:
    """The UI's page that compares exactly these runs."""
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":"))) for ids in (run_ids, [experiment]))
    return f"/#/compare-runs?runs={runs}&experiments={experiments}"


def filter_path(experiment: str, pipeline_run: str) -> str:
    """The UI's charts of one pipeline run, without run ids, so that equal results give an equal report."""
    wanted = quote(f"tags.pipeline_run = '{pipeline_run}'")
    return f"/#/experiments/{experiment}/runs?searchFilter={wanted}&compareRunsMode=CHART"


def main() -> None:
    params = load_params()
    artifacts = Path("artifacts")
    tracked = run(
        Path("metrics"),
        artifacts / "fwp" / "predictions.parquet",
        artifacts / "decomposition" / "terms.parquet",
        artifacts / "report",
        Path("README.md"),
        project_root(),
        params,
    )
    write_json("mlruns/tracked.json", tracked)


if __name__ == "__main__":
    run_step(main)
