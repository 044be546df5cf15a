from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows import dag
from tasks.contracts import project_root
from tasks.params import ParamsError
from tests.flows.toy_dag import ADD, dvc, read_params

SLEEP = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("pids.txt").write_text(f"{__import__('os').getpid()} {child.pid}")
print("asleep", flush=True)
time.sleep(60)
"""


def run(name: str) -> list[str]:
    lines: list[str] = []
    dag.run_stage(name, lines.append)
    return lines


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


# --- the graph ----------------------------------------------------------------------------------------------


def test_upstreams_come_first_and_otherwise_the_order_of_dvc_yaml(toy):
    nodes = dag.read_graph()
    assert [node.name for node in nodes] == ["add", "double@2", "double@4", "total", "lone"]
    assert {node.name: node.upstream for node in nodes} == {
        "add": (),
        "double@2": ("add",),
        "double@4": ("add",),
        "total": ("add", "double@2", "double@4"),
        "lone": (),
    }
    assert nodes[0].description == "two numbers -> their sum"


def test_a_broken_dvc_yaml_is_one_clear_error(toy):
    (toy / "dvc.yaml").write_text("stages:\n  add:\n    cmd: ${quantize_instances.width}\n")
    with pytest.raises(dag.DagError, match=r"quantize_instances\.width"):
        dag.read_graph()


def test_unchanged_is_what_dvc_says(toy):
    assert not dag.is_unchanged("add")
    assert "added" in run("add")
    assert dag.is_unchanged("add")
    assert [node.name for node in dag.stages_to_run()] == [
        "double@2",
        "double@4",
        "total",
        "lone",
    ]
    (toy / "add.py").write_text((toy / "add.py").read_text() + "# changed\n")
    assert not dag.is_unchanged("add")


# --- running ------------------------------------------------------------------------------------------------


def test_a_failed_stage_says_its_name_and_last_lines(toy):
    (toy / "add.py").write_text("for line in range(100): print(f'line {line}.')\nraise SystemExit(3)\n")
    lines: list[str] = []
    with pytest.raises(dag.StageFailed, match=r"stage 'add' failed") as failure:
        dag.run_stage("add", lines.append)
    assert "line 0." in lines  # all of it was passed on, the end is repeated
    message = str(failure.value)
    assert "line 99." in message and "line 20." not in message
    assert len(message.splitlines()) == dag.TAIL_LINES + 1


def test_an_exception_in_the_main_thread_ends_the_stage_with_its_children(toy):
    (toy / "add.py").write_text(SLEEP)
    failures: list[BaseException] = []

    def stage() -> None:
        try:
            dag.run_stage("add", lambda line: None)
        except dag.StageFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=stage)
    with pytest.raises(KeyboardInterrupt), dag.ending_children():
        thread.start()
        wait_for((toy / "pids.txt").exists)
        wait_for(lambda: len((toy / "pids.txt").read_text().split()) == 2)
        raise KeyboardInterrupt
    thread.join(20)
    assert not thread.is_alive() and "cancelled" in str(failures[0])
    pids = [int(pid) for pid in (toy / "pids.txt").read_text().split()]
    wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    with pytest.raises(dag.StageFailed, match="cancelled"):  # nothing starts after a cancel
        dag.run_stage("lone", print)
    with dag.ending_children():  # until the next flow
        dag.run_stage("lone", print)


def test_after_kill_9_the_next_run_carries_on(toy):
    run("lone")
    (toy / "add.py").write_text(SLEEP)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    victim = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro"],
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for((toy / "pids.txt").exists)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    (toy / "add.py").write_text(ADD.replace("count + 1", "1"))
    result = dvc("repro")
    assert result.returncode == 0, result.stderr
    assert (toy / "total.txt").read_text() == "6\n"  # 1 (2 + 4)
    assert "Running stage 'lone'" not in result.stdout


# --- overrides ----------------------------------------------------------------------------------------------


def test_overrides_reach_params_yaml_and_keep_its_comments(toy):
    overrides = {
        "quantize_instances.bits": [3, 4, 8],
        "prepare_reference.source": "path",
        "prepare_reference.path.folder": 'it\'s a "folder", with = and [brackets]',
        "quantize_instances.symmetric": True,
        "prepare_requests.hub.id": None,
        "solve_routing.budget_value": 0.5,
        "evaluate_benchmarks.limit": {"mmlu_packaged": 7, "piqa": 3},
    }
    dag.apply_overrides(dag.override_strings(overrides))
    params = read_params()
    for name, value in overrides.items():
        place = params
        for key in name.split("."):
            place = place[key]
        assert place == value, name
    assert "# every number" in (toy / "params.yaml").read_text().lower()
    doubles = [node.name for node in dag.read_graph() if node.name.startswith("double")]
    assert doubles == ["double@3", "double@4", "double@8"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quantize_instances.bitz=[2]", "did you mean 'quantize_instances.bits'"),
        ("+quantize_instances.bitz=[2]", "did you mean 'bits'"),
        ("quantize_instances.bits=[5]", "quantize_instances.bits"),
        ("quantize_instances.bits=two", "quantize_instances.bits"),
        ("quantize_instances.bits=[2", "quantize_instances.bits"),
        ("calibrate_fwp.scorer=W8", "not in the pool"),
    ],
)
def test_a_wrong_override_changes_nothing(toy, override, message):
    before = sorted((path.name, path.read_bytes()) for path in toy.iterdir() if path.is_file())
    with pytest.raises(ParamsError, match="override") as failure:
        dag.apply_overrides([override])
    assert message in str(failure.value)
    assert sorted((path.name, path.read_bytes()) for path in toy.iterdir() if path.is_file()) == before


def test_no_overrides_leave_the_file_alone(toy):
    before = (toy / "params.yaml").stat()
    dag.apply_overrides([])
    assert (toy / "params.yaml").stat().st_mtime_ns == before.st_mtime_ns


# --- working copies ---------------------------------------------


@pytest.mark.parametrize("copy", [".", ".study", ".dvc/tmp/exps/tmp123", ".dvc/tmp/exps/standalone/tmp123"])
def test_a_working_copy_knows_the_project_it_was_made_from(tmp_path, monkeypatch, copy):
    """`make study`, `dvc exp run --queue` and `--temp`: mlruns/ and .downloads/ are the project's."""
    (tmp_path / copy).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / copy)
    assert project_root() == tmp_path
