"""`python -m flows.plan`: what a run would do and cost, before any work; `--model` for another model."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flows import dag
from flows.study import FOLDER as STUDY
from flows.study import prepare as prepare_study
from tasks.contracts import GIB, InputError, project_root, read_json
from tasks.cost import PUBLISHED, ModelShape, StageCost, reference_shape, shape_from_config, stage_cost
from tasks.params import Params, ParamsError, load_params

SPEED_SECONDS = 0.2


def matrix_gflops(threads: int) -> float:
    """Speed of a float32 matrix product here, now, with `threads` threads: 10^9 operations a second."""
    torch.set_num_threads(threads)
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    torch.mm(left, right)
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < SPEED_SECONDS:
        torch.mm(left, right)
        products += 1
    return products * 2 * 1024**3 / (time.perf_counter() - started) / 1e9


def other_model(params: Params, model: str) -> tuple[Params, ModelShape]:
    """Parameters and shape for a published id, or a folder that holds a config.json. Raises InputError."""
    config = project_root() / model / "config.json"
    if config.exists():
        shape = shape_from_config(read_json(config), str(config))
    elif model in PUBLISHED:
        shape = PUBLISHED[model]
    else:
        raise InputError(
            f"'{model}' is neither a folder with a config.json nor a model whose configuration is built in:"
            f" {', '.join(PUBLISHED)}"
        )
    hub = params.prepare_reference.hub.model_copy(update={"id": model})
    reference = params.prepare_reference.model_copy(update={"source": "hub", "hub": hub})
    return params.model_copy(update={"prepare_reference": reference}), shape


def own_model(params: Params) -> ModelShape:
    """The shape of the reference that the parameters name, read from a local folder. Raises InputError."""
    source = params.prepare_reference
    if source.source == "path" and source.path.folder:
        config = project_root() / source.path.folder / "config.json"
        if not config.exists():
            raise InputError(
                f"{config}: no such file; prepare_reference.path.folder must be a checkpoint's folder"
            )
        return shape_from_config(read_json(config), str(config))
    return reference_shape(source)


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdicts(costs: dict[str, StageCost], memory_bytes: float, free_bytes: float) -> list[str]:
    """What does not fit, in words; one line that says so when everything does."""
    peak = max(costs, key=lambda name: costs[name].memory_bytes)
    needed, disk = costs[peak].memory_bytes, sum(cost.disk_bytes for cost in costs.values())
    found = []
    if needed > memory_bytes:
        found.append(
            f"Does not fit: {peak} needs about {needed / GIB:.1f} GiB of memory,"
            f" this machine has {memory_bytes / GIB:.0f} GiB."
        )
    if disk > free_bytes:
        found.append(
            f"Does not fit: the outputs take about {disk / GIB:.1f} GiB of disk,"
            f" {free_bytes / GIB:.1f} GiB are free."
        )
    return found or ["Fits this machine."]


def main(
    model: Annotated[str | None, typer.Option(help="a published id, or a folder with a config.json")] = None,
    study: Annotated[bool, typer.Option("--study", help="the larger profile of `make study`")] = False,
) -> None:
    """Print the stages to run with tokens, minutes, peak memory and disk; does no work."""
    try:
        if study:
            prepare_study()
            os.chdir(STUDY)
        params = load_params()
        if model:
            params, shape = other_model(params, model)
            names = [node.name for node in dag.read_graph()]
        else:
            shape = own_model(params)
            names = [node.name for node in dag.stages_to_run()]
        print_plan(names, params, shape, model or params.prepare_reference.source)
    except (InputError, ParamsError) as error:
        print(f"plan: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def print_plan(names: list[str], params: Params, shape: ModelShape, model: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    widths = [*params.quantize_instances.bits, 16]
    group = params.quantize_instances.group_size
    sizes = ", ".join(f"{bits} bits {shape.size_bytes(bits, group) / GIB:.2f}" for bits in widths)
    console.print(
        f"Model {model}: {shape.parameters / 1e9:.3g} billion parameters, {shape.moe_layers} MoE layers of"
        f" {shape.experts} experts; GiB at {sizes}."
    )
    if not names:
        console.print("Nothing to run: every stage is unchanged.")
        return
    gflops = matrix_gflops(params.runtime.threads)
    costs = {name: stage_cost(name, params, shape, gflops) for name in names}
    table = Table()
    table.add_column("stage to run")
    for column in ("forward tokens", "minutes", "peak memory (GiB)", "disk (GiB)"):
        table.add_column(column, justify="right")
    for name, cost in costs.items():
        table.add_row(name, *_cells(cost.tokens, cost.seconds, cost.memory_bytes, cost.disk_bytes))
    table.add_section()
    table.add_row(
        "together",
        *_cells(
            sum(cost.tokens for cost in costs.values()),
            sum(cost.seconds for cost in costs.values()),
            max(cost.memory_bytes for cost in costs.values()),
            sum(cost.disk_bytes for cost in costs.values()),
        ),
    )
    console.print(table)
    free, memory = shutil.disk_usage(Path.cwd()).free, machine_memory()
    console.print(
        f"This machine: {params.runtime.threads} threads at {gflops:.0f} GFLOP/s, {memory / GIB:.0f} GiB of"
        f" memory, {free / GIB:.0f} GiB of disk free. Minutes are estimates; a stage whose inputs come out as"
        " before is skipped."
    )
    for line in verdicts(costs, memory, free):
        console.print(line)


def _cells(tokens: int, seconds: float, memory_bytes: float, disk_bytes: float) -> list[str]:
    return [
        f"{tokens:,}" if tokens else "–",
        f"{seconds / 60:.1f}",
        f"{memory_bytes / GIB:.1f}",
        f"{disk_bytes / GIB:.2f}",
    ]


if __name__ == "__main__":
    typer.run(main)
