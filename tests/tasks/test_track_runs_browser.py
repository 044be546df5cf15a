"""What a person sees in MLflow: the comparison of all runs, and their charts, in a headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tasks import track_runs
from tasks.contracts import read_json
from tasks.reporting import report
from tasks.reporting.records import NINE_KEYS
from tests.headless_browser import chromium, open_page
from tests.reporting_metrics import POLICIES, build

ROOT = Path(__file__).parents[2]
CARD = "[data-testid=experiment-view-compare-runs-card]"
RUNS = 1 + 3 + 1 + len(POLICIES)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("browser"))
    shutil.copy(ROOT / "params.yaml", folder)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.chdir(folder)
        patched.setattr(report, "draw", lambda *arguments: [])
        track_runs.main()
    return folder


@pytest.fixture(scope="module")
def server(workspace):
    """The address of an MLflow server on a free port, with the settings of `make ui`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--workers",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--backend-store-uri",
        f"sqlite:///{workspace / 'mlruns/mlflow.db'}",
    ]
    quiet = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    log = (workspace / "server.log").open("w")
    process = subprocess.Popen(
        command, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
    )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", workspace / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"the MLflow server did not answer:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def page(server):
    executable = chromium()
    assert executable
    with open_page(executable) as page:
        yield page


def run_ids(server: str) -> list[str]:
    body = json.dumps({"experiment_ids": ["1"], "max_results": 100}).encode()
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return [run["info"]["run_id"] for run in json.load(answer)["runs"]]


def test_the_compare_page_shows_every_run_and_the_nine_keys(server, page):
    page.open(server + track_runs.compare_path("1", run_ids(server)))
    text = page.wait_for(f"document.body.innerText.includes('Comparing {RUNS} Runs from 1 Experiment')")
    text = page.wait_for("document.body.innerText.includes('tokens_per_s')")
    for name in ("reference", "W2", "W3", "W4", "rq", *POLICIES):
        assert name in text, name


def test_the_report_s_link_charts_the_nine_keys_of_the_first_ten_runs(workspace, server, page, tmp_path):
    page.open(server + read_json(workspace / "mlruns/tracked.json")["compare_url_path"])
    text = page.wait_for("document.querySelectorAll('.js-plotly-plot .barlayer .point').length >= 10")
    assert f"{RUNS} matching runs" in text
    titles = page.evaluate(f"[...document.querySelectorAll('{CARD}')].map(e => e.innerText.split('\\n')[0])")
    assert titles[:9] == sorted(NINE_KEYS)
    picture = tmp_path / "charts.png"
    page.picture(picture)
    assert picture.stat().st_size > 20_000
