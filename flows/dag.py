"""The DAG as DVC sees it: its graph, what is unchanged, running one stage. The only file that imports dvc.

Everything works in the current folder, the project's root, as the stages themselves do. A `Repo` is
opened per call: it must not be shared between threads.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import yaml
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.utils.hydra import apply_overrides as dvc_apply_overrides

from tasks.contracts import InputError
from tasks.params import ParamsError, load_params

PARAMS = Path("params.yaml")
TAIL_LINES = 40  # of a failed stage's output, repeated in the error
GRACE_SECONDS = 3.0  # between SIGINT, SIGTERM and SIGKILL


class DagError(InputError):
    """dvc.yaml, params.yaml or dvc.lock cannot be read as one graph, or another run holds a lock."""


class StageFailed(RuntimeError):
    """A stage ended with an error; the message ends in the last lines of its output."""


@dataclass(frozen=True)
class StageNode:
    name: str  # as DVC addresses it, `quantize_instances@3`
    upstream: tuple[str, ...]  # names of the stages whose outputs it reads
    description: str


# --- the graph ----------------------------------------------------------------------------------------------


def read_graph() -> list[StageNode]:
    """Every stage, upstreams first, otherwise in the order of dvc.yaml. Raises DagError."""
    with _repo() as repo:
        graph = repo.index.graph  # an edge leads from a stage to what it depends on
        place = {stage: number for number, stage in enumerate(repo.index.stages)}
        ordered = networkx.lexicographical_topological_sort(graph.reverse(copy=True), key=place.__getitem__)
        nodes = []
        for stage in ordered:
            above = sorted(graph.successors(stage), key=place.__getitem__)
            upstream = tuple(item.addressing for item in above)
            nodes.append(StageNode(stage.addressing, upstream, stage.desc or ""))
        return nodes


def is_unchanged(name: str) -> bool:
    """Does DVC consider stage `name` up to date with the files that lie there now? Raises DagError."""
    with _repo() as repo, repo.lock:
        (stage,) = repo.stage.collect(name)
        return not stage.changed()


def stages_to_run() -> list[StageNode]:
    """The stages that a run would execute or restore: changed ones and all downstream. Raises DagError."""
    nodes = read_graph()
    pending: dict[str, StageNode] = {}
    with _repo() as repo, repo.lock:
        for node in nodes:
            if any(above in pending for above in node.upstream):
                pending[node.name] = node
                continue
            (stage,) = repo.stage.collect(node.name)
            if stage.changed():
                pending[node.name] = node
    return list(pending.values())


@contextlib.contextmanager
def _repo() -> Iterator[Repo]:
    try:
        with Repo(".", _wait_for_lock=True) as repo:
            yield repo
    except DvcException as error:
        causes = [str(error)]
        while error.__cause__ is not None:  # DVC puts what is wrong with dvc.yaml into the cause
            error = error.__cause__
            causes.append(str(error))
        raise DagError("\n".join(dict.fromkeys(causes))) from None


# --- running a stage ----------------------------------------------------------------------------------------

_children: set[subprocess.Popen[str]] = set()
_cancelled = threading.Event()


def run_stage(name: str, emit: Callable[[str], Any]) -> None:
    """Let DVC run (or restore from its cache) stage `name`, and pass on its output line by line.

    The stage runs in its own process group, so that `ending_children` can stop it with all its children. A
    lock held by another run is reported by DVC with the process id, and not retried. Raises StageFailed.
    """
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", name]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    child = subprocess.Popen(
        command,
        env={**os.environ, "PATH": search, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _children.add(child)
    try:
        if _cancelled.is_set():  # after being listed, so that a cancel either sees the child or is seen here
            _signal_group(child, signal.SIGKILL)
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line.rstrip("\n"))
            emit(tail[-1])
        status = child.wait()
    finally:
        _children.discard(child)
    if _cancelled.is_set():
        raise StageFailed(f"stage '{name}' was cancelled")
    if status != 0:
        last = "\n".join(tail)
        raise StageFailed(f"stage '{name}' failed with exit status {status}; its last lines:\n{last}")


@contextlib.contextmanager
def ending_children() -> Iterator[None]:
    """On any exception in the body (Ctrl-C and a worker's SIGTERM too) first end every running stage.

    To be entered in the main thread, where Python delivers signals.
    """
    _cancelled.clear()
    try:
        yield
    except BaseException:
        _cancelled.set()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            running = [child for child in list(_children) if child.poll() is None]
            for child in running:
                _signal_group(child, number)
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(child.poll() is None for child in running):
                time.sleep(0.05)
        raise


def _signal_group(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


# --- overrides ----------------------------------------------------------------------------------------------


def override_strings(overrides: Mapping[str, Any]) -> list[str]:
    """{"quantize_instances.bits": [2, 4]} -> ["quantize_instances.bits=[2,4]"], as `dvc exp run -S` takes.

    A dict is merged into what is there and may bring new keys (a benchmark, a variant), hence Hydra's `++`.
    """
    return [
        f"{'++' if isinstance(value, dict) else ''}{key}={_hydra_value(value)}"
        for key, value in overrides.items()
    ]


def apply_overrides(overrides: Iterable[str]) -> None:
    """Write overrides into params.yaml, as `dvc exp run -S` does (comments stay), but checked first.

    Raises ParamsError, and leaves params.yaml as it was, when a name is unknown or a value does not fit.
    """
    overrides = list(overrides)
    if not overrides:
        return
    trial = PARAMS.with_name(f".params.{os.getpid()}.yaml")
    try:
        shutil.copyfile(PARAMS, trial)
        try:
            dvc_apply_overrides(str(trial), overrides)
        except DvcException as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ParamsError(f"override {' '.join(overrides)}: {reason}{_nearest(overrides)}") from None
        try:
            load_params(trial)
        except ParamsError as error:
            raise ParamsError(str(error).replace(str(trial), f"override {' '.join(overrides)}")) from None
        trial.replace(PARAMS)
    finally:
        trial.unlink(missing_ok=True)


def _hydra_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra_value(item) for item in value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # Hydra unescapes a quote, and a backslash only where one precedes a quote.
    return "'" + str(value).replace("'", "\\'") + "'"


def _nearest(overrides: Iterable[str]) -> str:
    """For overrides of names that params.yaml lacks: the nearest names that it has."""
    known = list(_paths(yaml.safe_load(PARAMS.read_text(encoding="utf-8")), ""))
    names = [override.partition("=")[0].lstrip("+~") for override in overrides]
    unknown = [name for name in names if name not in known]
    found = [near for name in unknown for near in difflib.get_close_matches(name, known, n=1)]
    return f"; did you mean '{', '.join(found)}'?" if found else ""


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
