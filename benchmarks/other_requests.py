"""The finished run's pool on other requests: scored, predicted and routed beside the run's own.

    python -m benchmarks.other_requests ../shared/data/requests/requests.jsonl [--count 252]

In: artifacts/ of a finished `make run`, and a file of requests (one {"id", "class", "prompt", "response"} a line).
Works in .study/other_requests, where a killed run carries on. Out: metrics/other_requests.json, which the report shows
and `make run` never changes; `make run` again for the report. Costs four passes over the requests.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tasks.console import run_step
from tasks.contracts import InputError, read_json, write_json
from tasks.params import Params, load_params

FOLDER = Path(".study/other_requests")
OUTPUT = Path("metrics/other_requests.json")
SHARED = ("reference", "instances", "experts", "decomposition")  # of the run's artifacts
KEPT = ("chosen", "coverage", "damage", "drift", "predictor", "requests", "scored", "scorer", "splits")


def workspace(folder: Path, artifacts: Path, file: Path, count: int) -> Params:
    """A folder where steps run on `count` requests of `file`, with the run's models. Raises InputError."""
    missing = [name for name in SHARED if not (artifacts / name).exists()]
    if missing:
        raise InputError(f"{artifacts} lacks {', '.join(missing)}: run `make run` first")
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a JSON Lines file of requests")
    values = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    values["prepare_requests"] |= {"source": "jsonl", "count": count, "jsonl": {"file": str(file.resolve())}}
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    for name in SHARED:
        link = folder / "artifacts" / name
        link.unlink(missing_ok=True)
        link.symlink_to((artifacts / name).resolve())
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load_params(folder / "params.yaml")


def steps(folder: Path, params: Params) -> None:
    """Prepare, score, calibrate and route in `folder`; scores of the same requests are not made again."""

    def step(name: str, *items: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-m", f"tasks.{name}", *items]
        if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
            raise InputError(f"{' '.join([name, *items])} failed; what it said stands above")

    step("prepare_requests")
    file = folder / "artifacts/requests/requests.parquet"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for model in ("reference", *params.quantize_instances.names):
        mark = folder / f"artifacts/scores/{model}.requests"
        if not (mark.is_file() and mark.read_text() == digest):
            step("score_requests", model)
            mark.write_text(digest)
    step("calibrate_fwp")
    step("solve_routing")


def figures(folder: Path, name: str) -> dict[str, Any]:
    """What the report shows of the other requests."""
    fwp, requests = read_json(folder / "metrics/fwp.json"), read_json(folder / "metrics/requests.json")
    used = f"{fwp['damage']}_{fwp['scored']}"
    fwp["splits"] |= {key: {used: fwp["splits"][key][used]} for key in ("targets", "beats")}
    return {
        "file": name,
        "requests": {"count": requests["requests"], "classes": requests["classes"]},
        "fwp": {key: fwp[key] for key in KEPT if key in fwp},
        "routing": read_json(folder / "metrics/routing.json"),
    }


def main(
    file: Annotated[Path, typer.Argument(help="JSON Lines with id, class, prompt and response")],
    count: Annotated[int, typer.Option(min=2, help="requests of all classes together")] = 252,
    artifacts: Annotated[Path, typer.Option(help="of a finished run")] = Path("artifacts"),
    output: Annotated[Path, typer.Option(help="the figures")] = OUTPUT,
) -> None:
    """Score, predict and route, write the figures."""
    steps(FOLDER, workspace(FOLDER, artifacts, file, count))
    write_json(output, figures(FOLDER, file.name))
    print(f"{output}: written; `make run` puts it into the report")


if __name__ == "__main__":
    run_step(main)
