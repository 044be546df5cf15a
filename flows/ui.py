"""`python -m flows.ui`: the MLflow server with safe, quick settings, and the address of the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from tasks.contracts import project_root, read_json

START_SECONDS = 120.0


def server_command(port: int) -> list[str]:
    """One worker, loopback only; the default of four and a job runner takes four times as long to start."""
    database = project_root() / "mlruns" / "mlflow.db"
    return [
        sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1",
        "--port", str(port), "--backend-store-uri", f"sqlite:///{database}",
    ]  # fmt: skip


def comparison_url(port: int) -> str:
    """The page that compares the runs of the last pipeline run, or the list of experiments without one."""
    address = f"http://127.0.0.1:{port}"
    tracked = Path("mlruns/tracked.json")
    path = read_json(tracked).get("compare_url_path") if tracked.exists() else None
    return address + (path or "/#/experiments")


def main(port: Annotated[int, typer.Option(help="the server's port on this machine")] = 5000) -> None:
    """Start the MLflow server, print the address of the comparison, and serve until interrupted."""
    if not (project_root() / "mlruns" / "mlflow.db").exists():
        print("ui: error: mlruns/mlflow.db is missing; run the pipeline first: make run", file=sys.stderr)
        raise typer.Exit(1)
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    print("Starting the MLflow server, about 15 s ...", flush=True)
    server = subprocess.Popen(server_command(port), env=environment, stdin=subprocess.DEVNULL)
    try:
        if _answers(server, port):
            print(f"Comparison of all runs: {comparison_url(port)}\nCtrl-C ends the server.", flush=True)
        status = server.wait()
    except KeyboardInterrupt:
        status = 0
    finally:
        server.terminate()
        server.wait()
    raise typer.Exit(status)


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; False when it ended or took too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


if __name__ == "__main__":
    typer.run(main)
