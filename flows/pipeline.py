"""The Prefect door, `python -m flows.pipeline`: a flow with one task per DVC stage, in topological order.

DVC alone decides what is stale, so Prefect's own result cache is off; an unchanged stage ends in `Cached`.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings
from prefect.states import Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows import dag
from tasks.contracts import InputError
from tasks.params import ParamsError, load_params


@task(persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_stage(name: str) -> State[None]:
    """Run DVC stage `name` unless DVC considers it unchanged; its output becomes the run's log."""
    started = time.monotonic()
    try:
        if dag.is_unchanged(name):
            return Completed(name="Cached", message="unchanged: DVC has its outputs")
        dag.run_stage(name, get_run_logger().info)
    except (dag.StageFailed, dag.DagError) as error:
        return Failed(message=str(error))  # raised, its text would come again in a traceback
    return Completed(message=f"ran in {time.monotonic() - started:.0f} s")


# One stage at a time: a stage uses every core (runtime.threads), and a timing wants the machine to itself.
ONE_AT_A_TIME: Any = ThreadPoolTaskRunner(max_workers=1)


@flow(name="pipeline", task_runner=ONE_AT_A_TIME, persist_result=False)
def pipeline(overrides: dict[str, Any] | None = None) -> State[None]:
    """Every stage of dvc.yaml.

    Args:
        overrides: parameters to write into params.yaml before the graph is read, by dotted name:
            {"quantize_instances.bits": [2, 4]}.
    """
    try:
        dag.apply_overrides(dag.override_strings(overrides or {}))
        load_params()
        nodes = dag.read_graph()
    except (InputError, ParamsError) as error:
        return Failed(message=str(error))
    futures: dict[str, PrefectFuture[Any]] = {}
    with dag.ending_children():
        for node in nodes:
            stage: Any = run_stage.with_options(name=node.name.split("@")[0], task_run_name=node.name)
            above = [futures[name] for name in node.upstream]
            futures[node.name] = stage.submit(node.name, wait_for=above)
        wait(list(futures.values()))
    failed = [name for name, future in futures.items() if future.state.is_failed()]
    if failed:
        waiting = sum(not future.state.is_completed() for future in futures.values()) - len(failed)
        return Failed(message=f"failed: {', '.join(failed)}; not started because of it: {waiting}")
    cached = sum(future.state.name == "Cached" for future in futures.values())
    return Completed(message=f"{len(futures) - cached} stages ran, {cached} unchanged")


def server_answers() -> bool:
    """Does the Prefect server of the settings answer?"""
    address = PREFECT_API_URL.value()
    if not address:
        return False
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def with_server() -> AbstractContextManager[Any]:
    """The server of the settings where it answers, else a temporary one."""
    if server_answers():
        return nullcontext()
    print(
        f"No Prefect server answers at {PREFECT_API_URL.value()}: starting a temporary one, about 30 s"
        " (`prefect server start --background` keeps one)",
        flush=True,
    )
    return temporary_settings(
        updates={PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
    )


def main(
    override: Annotated[
        list[str] | None,
        typer.Option("--set-param", "-S", metavar="NAME=VALUE", help="as in `dvc exp run -S`"),
    ] = None,
) -> None:
    """Run the pipeline as a Prefect flow; exit status 1 when a stage fails."""
    try:
        dag.apply_overrides(override or [])
        load_params()
    except (InputError, ParamsError) as error:
        print(f"pipeline: error: {error}")
        raise typer.Exit(1) from None
    with with_server():
        state = pipeline(return_state=True)
    print(f"pipeline: {state.message or state.name}")
    if not state.is_completed():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
