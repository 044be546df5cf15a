"""Audit any checkpoint, this project's or another tool's: is what should be quantized quantized, and is all there?

In: a folder; with --reference, the unquantized model that it was made from. Out: a table on the terminal, --json a
file with every matrix; exit status 0 clean, 1 when something is not as it should be, 2 when it cannot be read.
Costs one pass over the scales and floating tensors, in little memory. A command for people, no stage of the pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tasks.console import run_step
from tasks.contracts import InputError, write_json
from tasks.moe.audit import Audit, Expect, Finding, audit
from tasks.moe.skeleton_keys import EXPERT, KINDS

VERSION = 1


def run(
    path: str | Path,
    reference: str | Path | None = None,
    json_file: str | Path | None = None,
    expect: Expect = "experts",
) -> Audit:
    """Audit the folder `path` and write `json_file` if it is given; raises InputError as `audit` does."""
    result = audit(Path(path), Path(reference) if reference else None, expect)
    if json_file:
        write_json(json_file, result.as_json() | {"version": VERSION}, digits=10)
    return result


def table(result: Audit) -> Table:
    """One row for all tensors of a kind that are stored alike."""
    shown = Table(title=f"{result.folder}: {result.model_type}, {result.declared}", title_justify="left")
    for column in ("what", "layers", "matrices", "stored as", "bits", "group", "MiB", "of expected", "state"):
        shown.add_column(
            column, justify="right" if column in ("matrices", "bits", "MiB", "of expected") else "left"
        )
    rows: dict[tuple, list[Finding]] = {}
    for found in result.findings:
        stored = found.storage
        key = (KINDS.index(found.kind), stored.format, stored.bits or 0, str(stored.group_size), state(found))
        rows.setdefault(key, []).append(found)
    for (kind, form, bits, _, text), group in sorted(rows.items()):
        size = sum(found.storage.stored_bytes for found in group)
        expected = sum(found.storage.expected_bytes for found in group)
        group_size = group[0].storage.group_size
        shown.add_row(
            KINDS[kind],
            layer_ranges(found.layer for found in group),
            str(sum(found.matrices for found in group)),
            form,
            str(bits or "?"),
            "–" if group_size is None else "row" if group_size == 0 else str(group_size),
            f"{size / 2**20:.2f}",
            f"{size / expected:.3f}" if expected else "–",
            text,
            style="red" if text.startswith("!") else None,
        )
    return shown


def state(found: Finding) -> str:
    """A finding in a few words; what is wrong starts with an exclamation mark."""
    if found.fault:
        return f"! {found.fault.split(':')[0]}"
    if found.wanted and not found.storage.quantized:
        return "! not quantized"
    if found.stays and found.storage.quantized:
        return "! quantized, should be kept"
    if found.not_finite:
        return "! NaN or infinity"
    if found.same is not None:
        return (
            f"{'protected, ' * found.protected}as in the reference"
            if found.same
            else f"{'! ' * found.stays}not as in the reference"
        )
    if found.protected:
        return "protected"
    return "quantized" if found.storage.quantized else "kept"


def layer_ranges(layers: Iterable[str]) -> str:
    """Layer names such as "model.layers.3" in short: their stack where there are several, numbers as ranges."""
    stacks: dict[str, set[int]] = {}
    for layer in layers:
        stack, _, number = layer.rpartition(".")
        if number.isdigit():
            stacks.setdefault(stack, set()).add(int(number))
    texts = []
    for stack, numbers in sorted(stacks.items()):
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        texts.append(text if stack == "model.layers" else f"{stack.split('.')[0]} {text}")
    return "; ".join(texts) or "–"


def next_step(result: Audit, path: str) -> str:
    """What to do about the verdict."""
    skipped = [found for found in result.unquantized if found.kind == EXPERT]
    if skipped and any(found.storage.quantized for found in result.findings):
        return (
            "the tool that wrote this passed over the experts; quantize the unquantized model with this project "
            "(prepare_reference.source: path in params.yaml, then make run), or defuse its experts before that tool"
        )
    if skipped:
        return "nothing here is quantized: quantize it (prepare_reference.source: path in params.yaml, then make run)"
    if result.problems():
        return f"make the checkpoint again, or get it again, then: python -m tasks.audit_checkpoint {path}"
    return "nothing"


def report(result: Audit, path: str, console: Console) -> None:
    """Print table, notes, problems, verdict and what to do next."""
    console.print(table(result))
    lines = [f"note: {note}" for note in result.notes]
    lines += [f"problem: {problem}" for problem in result.problems()]
    lines += [f"verdict: {result.verdict}", f"next: {next_step(result, path)}"]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(
    path: str,
    reference: Annotated[str | None, typer.Option(help="The unquantized model it was made from.")] = None,
    json: Annotated[str | None, typer.Option(help="Write every matrix to this file.")] = None,
    expect: Annotated[str, typer.Option(help="What should be quantized: experts or all.")] = "experts",
) -> None:
    """Audit the checkpoint in PATH."""
    if expect not in ("experts", "all"):
        raise typer.BadParameter(f"--expect is '{expect}': expected 'experts' or 'all'")
    try:
        result = run(path, reference, json, "all" if expect == "all" else "experts")
    except InputError as error:
        print(f"audit_checkpoint: cannot be read: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    report(result, path, Console(width=None if sys.stdout.isatty() else 150))
    raise typer.Exit(result.exit_status)


if __name__ == "__main__":
    run_step(main)
