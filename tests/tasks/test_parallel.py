"""One function over many items: the same results from this process, processes, Dask and Ray."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tasks import parallel
from tasks.contracts import InputError, ResumableError
from tasks.moe.checkpoint import skeleton
from tasks.moe.quantizing import CalibratedWalk, write_calibrated_shards, write_shards
from tasks.moe.shards import EXPERTS_PER_UNIT, Settings, Shards
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.parallel import IN_FLIGHT, IN_PROCESS, Spread, pmap, workers
from tasks.params import Runtime
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tests import parallel_work
from tests.seeded_models import seeded_checkpoint

ROOT = Path(__file__).parents[2]


def runtime(engine: str, **changes: Any) -> Runtime:
    return Runtime(**{**IN_PROCESS.model_dump(), "workers": 2, "engine": engine, **changes})


@pytest.fixture(scope="module", params=["processes", "dask", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, Spread]]:
    """Each engine with two local workers, started once."""
    with workers(runtime(request.param)) as spread:
        yield request.param, spread


def test_results_come_in_order_with_few_in_flight(engine: tuple[str, Spread]) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(12):
            taken.append(number)
            yield number

    results, most = [], 0
    for result in engine[1](parallel_work.square, items()):
        results.append(result)
        most = max(most, len(taken) - len(results) + 1)  # one was in flight until just now
    assert [value for value, _ in results] == [number**2 for number in range(12)]
    assert most == 2 * IN_FLIGHT
    assert os.getpid() not in {process for _, process in results}


def test_an_input_error_arrives_as_it_was_raised(engine: tuple[str, Spread]) -> None:
    with pytest.raises(InputError) as caught:
        list(engine[1](parallel_work.refuse_three, range(9)))
    assert type(caught.value) is InputError
    assert str(caught.value) == "three cannot be used: expected any other number"
    for _ in range(10):  # the workers are still there, whatever they were doing when the error came
        with pytest.raises(InputError):
            list(engine[1](parallel_work.refuse_three, range(9)))
        abandoned = engine[1](parallel_work.square, range(1, 9))
        next(abandoned)
        abandoned.close()
        assert list(engine[1](parallel_work.refuse_three, [5, 4])) == [5, 4]


def test_a_worker_has_one_thread(engine: tuple[str, Spread]) -> None:
    assert list(engine[1](parallel_work.threads, range(4))) == [1, 1, 1, 1]


def test_no_one_else_can_reach_the_workers(engine: tuple[str, Spread]) -> None:
    here = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in [here, *here.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [ip for ip in listening if not re.fullmatch(r"(::ffff:)?127\.0\.0\.1|::1", ip)] == []
    assert listening or engine[0] == "processes"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 20 experts: two units each, of unequal size."""
    folder = tmp_path_factory.mktemp("parallel") / "reference"
    return seeded_checkpoint(folder, num_hidden_layers=2, num_experts=20)


def shards(folder: Path, reference: Path, method: str, spread: Spread) -> dict[str, bytes]:
    """Every file that quantizing writes, with its bytes."""
    folder.mkdir()
    settings = Settings(method, Grid(3, 16, False), Gptq())
    layers = stored_layers(skeleton(reference), CheckpointTensors(reference))
    written = Shards(folder, layers, settings.grid)
    if method == "gptq":
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(0, 350, (40,), generator=generator).tolist() for _ in range(4)]
        walk = CalibratedWalk(sequences, 64, "quantized", 0.5)
        write_calibrated_shards(written, reference, settings, spread, walk)
    else:
        write_shards(written, reference, settings, spread)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Shards as this process writes them by itself."""
    folder = tmp_path_factory.mktemp("in_process")
    assert EXPERTS_PER_UNIT < 20 < 2 * EXPERTS_PER_UNIT
    return {method: shards(folder / method, reference, method, map) for method in ("hqq", "gptq")}


@pytest.mark.parametrize("method", ["hqq", "gptq"])
def test_every_engine_makes_the_same_bytes(
    engine: tuple[str, Spread], reference: Path, tmp_path: Path,
    expected: dict[str, dict[str, bytes]], method: str,
) -> None:  # fmt: skip
    found = shards(tmp_path / method, reference, method, engine[1])
    assert found.keys() == expected[method].keys() and len(found) == 4  # two shards, two sidecars
    for name, content in found.items():
        assert content == expected[method][name], name


def test_a_killed_worker_is_a_clear_error(engine: tuple[str, Spread]) -> None:
    """The last test of each engine: processes do not come back."""
    message = r"a worker ended before its work was done \(\w+\): .* lower runtime\.workers"
    with pytest.raises(ResumableError, match=message):
        list(engine[1](parallel_work.die_at_three, range(9)))


# --- without the shared engines -----------------------------------------------------------------------------------


def test_one_worker_is_this_process() -> None:
    ours = os.getpid()
    assert list(pmap(parallel_work.square, range(3), IN_PROCESS)) == [(0, ours), (1, ours), (4, ours)]


def test_no_process_is_left_when_results_are_not_wanted_any_more() -> None:
    before = multiprocessing.active_children()
    results = pmap(parallel_work.slow, range(9), runtime("processes"))
    assert next(results) == 0
    results.close()
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(("name", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"runtime.engine is '{name}'.*pip install 'expertpool\[{name}\]'"):
        list(pmap(parallel_work.square, range(3), runtime(name)))


def test_a_dask_scheduler_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        there = runtime("dask", address=cluster.scheduler_address)
        if cluster.scheduler_address.startswith("tcp"):
            assert [value for value, _ in pmap(parallel_work.square, range(4), there)] == [0, 1, 4, 9]
    monkeypatch.setattr(parallel, "CONNECT_SECONDS", 1)
    with pytest.raises(InputError, match=r"runtime.address is 'tcp://127.0.0.1:9', where no Dask scheduler"):
        list(pmap(parallel_work.square, range(4), runtime("dask", address="tcp://127.0.0.1:9")))


def test_ctrl_c_ends_in_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(
        textwrap.dedent("""
            import signal

            from tasks.console import run_step
            from tasks.parallel import IN_PROCESS, pmap
            from tests.parallel_work import slow

            # A shell's background job ignores it, and so would what it starts.
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def main():
                runtime = IN_PROCESS.model_copy(update={"workers": 2})
                for number in pmap(slow, range(9), runtime):
                    print(number, flush=True)

            if __name__ == "__main__":
                run_step(main)
        """)
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout and process.stderr
    assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    assert process.stderr.read() == (
        "step: interrupted; nothing that existed was replaced: run again to carry on\n"
    )  # the pipe ends when the last process that could write to it has ended
    assert process.wait() == 130
