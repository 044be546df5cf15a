"""A full disk or a SIGKILL in any stage: the old outputs are whole, the error is clear, and the next run carries on.

Children are forked from a server that has imported the steps once, so that a stage costs its work and not its imports.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import yaml

from tasks.console import run_step
from tests.tiny_run import make_workspace, small_params, stages

STEPS = sorted({step for step, _ in stages(small_params())})
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([f"tasks.{step}" for step in STEPS])


def child(folder: str, step: str, item: str | None, fate: str, log: Connection) -> None:
    """Run a stage like its command. Fate: 'live', 'full' (no file over 200 bytes), 'killed' (at its first output)."""
    os.chdir(folder)
    sys.argv = [f"{step}.py", *([item] if item else [])]
    os.dup2(log.fileno(), 1)  # a pipe: the limit on files does not cut the log
    os.dup2(log.fileno(), 2)
    log.close()
    main = importlib.import_module(f"tasks.{step}").main
    if fate == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    if fate == "killed":
        replace = Path.replace

        def replace_or_die(source, target):
            if "artifacts" in str(target) or "metrics" in str(target):
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(source, target)

        Path.replace = replace_or_die
    run_step(main)


def run(folder: Path, step: str, item: str | None, fate: str) -> tuple[int, str]:
    """Exit status (minus the signal) and everything printed."""
    reader, writer = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=child, args=(str(folder), step, item, fate, writer))
    process.start()
    writer.close()
    log = b""
    while part := os.read(reader.fileno(), 65536):
        log += part
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.decode(errors="replace")


def digest(folder: Path) -> dict[str, str]:
    """Hash of every file of artifacts/ and metrics/, timings left out."""
    files = [
        path
        for root in ("artifacts", "metrics")
        for path in sorted((folder / root).rglob("*"))
        if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.stem != "throughput" and "artifacts/report" not in str(path)
    }


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_reference):
    params = small_params(
        prepare_reference__source="path", prepare_reference__path__folder=str(tiny_reference),
        quantize_instances__bits=[3, 4],
    )  # fmt: skip
    folder = make_workspace(tmp_path_factory.mktemp("interruption"), params)
    for step, item in stages(params):
        code, log = run(folder, step, item, "live")
        assert code == 0, log
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "item"),
    [stage for stage in stages(small_params(quantize_instances__bits=[3, 4])) if stage[1] != "4"],
)
def test_a_stage_survives_a_full_disk_and_a_kill(workspace, step, item):
    expected = digest(workspace)

    code, log = run(workspace, step, item, "full")
    assert code == 1, log
    assert "run again" in log, log
    assert "Traceback" not in log, log
    assert digest(workspace) == expected, "a full disk changed what existed"

    code, _ = run(workspace, step, item, "killed")
    assert code == -signal.SIGKILL

    code, log = run(workspace, step, item, "live")
    assert code == 0, log
    assert digest(workspace) == expected
    assert not list(workspace.rglob("*.tmp")), "temporary files are left"
    assert yaml.safe_load((workspace / "params.yaml").read_text())
