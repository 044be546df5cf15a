"""One function over many items: in this process, in processes beside it, or over a Dask or Ray cluster.

Results come in the order of the items and are the same bytes whoever computed them: an item is a piece of fixed
size, and a worker computes it on one thread. Workers of a cluster need this project installed in the same version
and see the same folders under the same paths: names travel, not weights.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Protocol, TypeVar

from tasks.contracts import InputError, ResumableError
from tasks.params import Runtime

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_PROCESS = Runtime(threads=1, batch_tokens=2048, workers=1, engine="processes", address=None)
IN_FLIGHT = 2  # items per worker that are being computed or wait to be taken: what bounds memory
CONNECT_SECONDS = 30


class Spread(Protocol):
    def __call__(
        self, work: Callable[[Item], Result], items: Iterable[Item]
    ) -> Generator[Result, None, None]: ...


def pmap(
    work: Callable[[Item], Result], items: Iterable[Item], runtime: Runtime = IN_PROCESS
) -> Iterator[Result]:
    """Yield `work(item)` of every item, in order; `work`, items and results must be picklable.

    `items` may be a generator: at most IN_FLIGHT times `runtime.workers` items have been taken from it and not
    yet been yielded. Raises the InputError that an item raised, ResumableError when a worker was killed, InputError
    when the engine is not installed; then, and on Ctrl-C, no worker is left.
    """
    with workers(runtime) as spread, closing(spread(work, items)) as results:
        yield from results


@contextmanager
def workers(runtime: Runtime) -> Iterator[Spread]:
    """Start the workers once, for several rounds of `pmap`: yields `spread(work, items)`."""
    if runtime.workers == 1:
        yield _here
        return
    with _ENGINES[runtime.engine](runtime) as engine:
        yield partial(_in_order, engine, IN_FLIGHT * runtime.workers)


def _here(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    yield from map(work, items)


class Engine(Protocol):
    """What the engines have in common."""

    killed: tuple[type[BaseException], ...]  # raised for a worker that ended without a result

    def submit(self, work: Callable[[Any], Any], item: Any) -> Any: ...
    def result(self, submitted: Any) -> Any: ...
    def cancel(self, submitted: Any) -> None: ...


def _in_order(
    engine: Engine, limit: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Generator[Result, None, None]:
    waiting: deque[Any] = deque()

    def oldest() -> Result:
        answer = engine.result(waiting.popleft())
        if isinstance(answer, InputError):
            raise answer
        return answer

    try:
        for item in items:
            waiting.append(engine.submit(partial(_attempt, work), item))
            if len(waiting) == limit:
                yield oldest()
        while waiting:
            yield oldest()
    except engine.killed as error:
        raise ResumableError(
            f"a worker ended before its work was done ({type(error).__name__}): most often the machine's memory "
            "ran out; nothing was replaced: lower runtime.workers, or free memory, and run again"
        ) from error
    finally:
        for submitted in waiting:
            engine.cancel(submitted)


def _attempt(work: Callable[[Item], Result], item: Item) -> Result | InputError:
    """Runs in the worker. An InputError travels as a value: engines wrap what is raised, each in its own way."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch where `work` imports it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        return work(item)
    except InputError as error:
        return error


# --- processes of this machine ------------------------------------------------------------------------------------


class _Processes:
    killed: tuple[type[BaseException], ...] = (BrokenProcessPool,)

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def submit(self, work: Callable[[Any], Any], item: Any) -> Any:
        with _deaf_to_interrupts():  # it starts processes on demand
            return self._executor.submit(work, item)

    def result(self, submitted: Any) -> Any:
        return submitted.result()

    def cancel(self, submitted: Any) -> None:
        submitted.cancel()


@contextmanager
def _processes(runtime: Runtime) -> Iterator[Engine]:
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        runtime.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
    )
    try:
        yield _Processes(executor)
    except BaseException:  # an error, Ctrl-C, results that nobody wants any more
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """A worker ends when its parent does, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes and threads started in here never see Ctrl-C; the driver does, and ends them."""
    resource_tracker.ensure_running()  # its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- clusters -----------------------------------------------------------------------------------------------------


def _installed(module: str, engine: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"runtime.engine is '{engine}', but it cannot be imported ({error}): install the extra with "
            f"`pip install 'expertpool[{engine}]'`, or set runtime.engine to 'processes'"
        ) from None


class _Dask:
    def __init__(self, client: Any, killed: tuple[type[BaseException], ...]) -> None:
        self._client, self.killed = client, killed

    def submit(self, work: Callable[[Any], Any], item: Any) -> Any:
        return self._client.submit(work, item, pure=False, retries=0)

    def result(self, submitted: Any) -> Any:
        return submitted.result()

    def cancel(self, submitted: Any) -> None:
        submitted.cancel()


@contextmanager
def _dask(runtime: Runtime) -> Iterator[Engine]:
    distributed, dask = _installed("distributed", "dask"), _installed("dask", "dask")
    killed = (distributed.KilledWorker, distributed.comm.CommClosedError)
    if runtime.address is not None:
        try:
            client = distributed.Client(runtime.address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InputError(
                f"runtime.address is '{runtime.address}', where no Dask scheduler answers ({error}): "
                "expected an address such as tcp://127.0.0.1:8786"
            ) from None
        with client:
            yield _Dask(client, killed)
        return
    with (
        tempfile.TemporaryDirectory(prefix="expertpool-dask-") as scratch,
        dask.config.set({"distributed.scheduler.allowed-failures": 0, "temporary-directory": scratch}),
    ):
        with _deaf_to_interrupts():
            cluster = distributed.LocalCluster(
                n_workers=runtime.workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=None,
                memory_limit=None,  # memory is bounded by what is in flight: nothing to spill, no one to pause
                silence_logs=logging.CRITICAL,
            )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            yield _Dask(client, killed)


class _Ray:
    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_call)
        self.killed = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError,
                       ray.exceptions.OutOfMemoryError)  # fmt: skip

    def submit(self, work: Callable[[Any], Any], item: Any) -> Any:
        return self._remote.remote(work, item)

    def result(self, submitted: Any) -> Any:
        return self._ray.get(submitted)

    def cancel(self, submitted: Any) -> None:
        """Few are in flight: they end by themselves. Ray 2.60's cancel can abort the whole driver when it meets a
        task that ends at that moment; forced, it kills workers that the next round gets."""


def _call(work: Callable[[Item], Result], item: Item) -> Result:
    return work(item)


@contextmanager
def _ray(runtime: Runtime) -> Iterator[Engine]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if (
        runtime.address is None
    ):  # read when Ray is imported; on any system it makes the servers listen on loopback
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = _installed("ray", "ray")
    if ray.is_initialized():  # the caller's own connection: it also ends it
        yield _Ray(ray)
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if runtime.address is not None:
            try:
                ray.init(runtime.address, **quiet)
            except (ConnectionError, ValueError) as error:
                raise InputError(
                    f"runtime.address is '{runtime.address}', where no Ray cluster answers ({error}): "
                    "expected an address such as 127.0.0.1:6379"
                ) from None
            yield _Ray(ray)
            return
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
            try:
                ray.init(
                    "local", num_cpus=runtime.workers, include_dashboard=False, _temp_dir=scratch, **quiet
                )
                yield _Ray(ray)
            finally:
                ray.shutdown()
    finally:
        ray.shutdown()


_ENGINES: dict[str, Callable[[Runtime], Any]] = {"processes": _processes, "dask": _dask, "ray": _ray}
