"""The quantizers against llmcompressor, gptqmodel and hqq: held-out output error, weight error, speed on one thread.

    python -m benchmarks.quantizers                 # from the project's root; about 10 minutes on two cores
    python -m benchmarks.quantizers --peers none    # ours alone, no other environment needed

Out: benchmarks/quantizers.md. Printed: every claim with its ratio, PASS or FAIL; the exit status is 0 either way.

The peers need other versions of the same packages than the project and than each other, so each lives in an environment
of its own, which git ignores; made once, from the project's root:

    python3.11 -m venv .venv-peers
    .venv-peers/bin/pip install -r benchmarks/requirements-peers.txt          # llmcompressor 0.14.0.1, hqq 0.2.8.post1
    python3.11 -m venv .venv-gptqmodel
    .venv-gptqmodel/bin/pip install -r benchmarks/requirements-gptqmodel.txt  # gptqmodel 7.6.0

torch's default build brings CUDA; its CPU build serves as well and is what was measured. Every library runs in a
process of its own (benchmarks/peers/), on one thread, on the same files: the same bfloat16 weights, the same
calibration statistics (of an expert's own tokens or of all tokens, whichever suits a peer) and the same held-out
tokens. Errors are measured side by side; for the speed they take turns, alone, so that a busy neighbour slows all
alike. Results of all are rounded to bfloat16. The hqq library stores scales and zero points in 32 bits, 9 bits a
weight at W8 to our 8.5; it is compared as it is and, in the claim of equal weight error, with these rounded to 16.

Ours runs at its default settings. A peer runs at its default ones and at its best ones, found by coordinate search
along `axes` for every width and data set on the held-out error itself, which favours the peers.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.peers.process import ROOT, Peer, write_problem
from benchmarks.quantizer_data import QUALITY, QUICK, REFERENCE, SPEED, Problem, embedded, synthetic
from benchmarks.quantizer_report import OURS, Row, claims, output_energy, output_error, report, weight_error
from tasks.console import run_step, timed
from tasks.contracts import InputError, replacing_file

VERSION = 1
OUTPUT = Path("benchmarks/quantizers.md")
GROUP_SIZE = 64
WIDTHS = (2, 3, 4, 8)
SPEED_WIDTHS = (3,)
REPEATS = 3
EMBEDDED_LAYERS = (2, 7)  # by their place among the MoE layers
EMBEDDED_TOKENS = (4096, 2048)  # calibration, held-out
OUR_METHODS = ("gptq", "clip_search", "hqq", "rtn")

Options = dict[str, Any]
Axis = Sequence[Options]


@dataclass(frozen=True)
class Tool:
    """A library: its module in benchmarks/peers, its environment, and what may be tuned."""

    module: str
    environment: str
    method: str
    default: Options = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()  # of the coordinate search, one after the other
    forms: tuple[bool, ...] = (True, False)  # symmetric or not
    others: Mapping[str, Options] = field(default_factory=dict)  # further settings by name, not tuned


PEERS: dict[str, Tool] = {
    "llmcompressor": Tool(
        "llmcompressor_gptq", ".venv-peers", "gptq",
        {"observer": "memoryless_minmax", "observer_kwargs": {}, "actorder": "static", "damping": 0.01,
         "block_size": 128, "hessians": "everyone", "gate_up": "joined"},  # joined: same result, less time
        (
            ({"observer": "memoryless_mse"},
             {"observer": "imatrix_mse"},
             {"observer": "imatrix_mse", "observer_kwargs": {"norm": 2.0}}),
            ({"hessians": "own"},),
            ({"damping": 0.1},),
            ({"actorder": None},),
        ),
    ),
    "gptqmodel": Tool(
        "gptqmodel_gptq", ".venv-gptqmodel", "gptq",
        {"hessians": "own", "block_size": 128, "fallback": True},
        (
            ({"desc_act": True}, {"desc_act": True, "static_groups": True}),
            ({"damp_percent": 0.01},),
            ({"hessians": "everyone"},),
            ({"mse": 2.4},),  # ten times as slow: last, so that it runs once
        ),
    ),
    "hqq": Tool("hqq_library", ".venv-peers", "hqq", {"scales": "float32"}, forms=(False,),
                others={"16-bit scales": {"scales": "float16"}}),
}  # fmt: skip
OURSELVES = Tool("expertpool", ".venv", "")
_LLMC = PEERS["llmcompressor"].default
# (tool, method, setting, symmetric, options) of the speed runs; `separate`: as the library treats experts
SPEED_RUNS: tuple[tuple[str, str, str, bool, Options], ...] = (
    (OURS, "gptq", "gptq", True, {}),
    ("llmcompressor", "gptq", "min-max", True, {**_LLMC, "gate_up": "separate"}),
    ("llmcompressor", "gptq", "min-max, gate and up joined", True, _LLMC),
    (
        "llmcompressor",
        "gptq",
        "imatrix_mse",
        True,
        {**_LLMC, "gate_up": "separate", "observer": "imatrix_mse"},
    ),
    ("gptqmodel", "gptq", "default", True, PEERS["gptqmodel"].default),
    (OURS, "hqq", "hqq", False, {}),
    ("hqq", "hqq", "default", False, PEERS["hqq"].default),
    (OURS, "clip_search", "clip_search", False, {}),
    (OURS, "rtn", "rtn", False, {}),
)


class Bench:
    """The running libraries, and problems on disk for them."""

    def __init__(self, libraries: Mapping[str, Peer], folder: Path) -> None:
        self.libraries = libraries
        self._folder = folder
        self._measured: dict[str, Row] = {}
        self._energies: dict[str, float] = {}

    def add(self, problems: Sequence[Problem]) -> None:
        """Write the problems of a data set, before the first of them is run."""
        for problem in problems:
            write_problem(problem, self._path(problem))
            self._energies[problem.name] = output_energy(problem.weights, problem.held_out)

    def _path(self, problem: Problem) -> Path:
        return self._folder / f"{problem.name.replace(' ', '-')}.safetensors"

    def run(
        self,
        problems: Sequence[Problem],
        tool: str,
        method: str,
        bits: int,
        symmetric: bool,
        options: Options,
    ) -> Row:
        """One setting on every problem of a data set, timed."""
        outputs, weights, cpu, wall = [], [], 0.0, 0.0
        for problem in problems:
            path = self._path(problem)
            found = self.libraries[tool].quantize(path, method, bits, GROUP_SIZE, symmetric, options)
            energy = self._energies[problem.name]
            outputs.append(output_error(problem.weights, found.weights, problem.held_out, energy))
            weights.append(weight_error(problem.weights, found.weights))
            cpu, wall = cpu + found.cpu_s, wall + found.wall_s
        parameters = sum(problem.weights.numel() for problem in problems)
        error, of_weights = statistics.mean(outputs), statistics.mean(weights)
        return Row(problems[0].data, tool, "", bits, symmetric, error, of_weights, parameters, cpu, wall)

    def once(
        self,
        problems: Sequence[Problem],
        tool: str,
        method: str,
        bits: int,
        symmetric: bool,
        options: Options,
    ) -> Row:
        """As `run`, but a setting that was run before is not run again."""
        key = json.dumps([problems[0].data, tool, method, bits, symmetric, options], sort_keys=True)
        if key not in self._measured:
            self._measured[key] = self.run(problems, tool, method, bits, symmetric, options)
        return self._measured[key]

    def tuned(
        self,
        problems: Sequence[Problem],
        name: str,
        bits: int,
        symmetric: bool,
        start: Options,
        axes: Sequence[Axis],
    ) -> tuple[Row, Options]:
        """Coordinate search from `start`: along each axis, keep the options of the smallest held-out error."""
        options, tool = start, PEERS[name]
        row = self.once(problems, name, tool.method, bits, symmetric, options)
        for axis in axes:
            for tried in [{**options, **change} for change in axis]:
                other = self.once(problems, name, tool.method, bits, symmetric, tried)
                if other.output_error < row.output_error:
                    row, options = other, tried
        return row, options


def quality(bench: Bench, problems: Sequence[Problem], widths: Sequence[int], quick: bool) -> list[Row]:
    """Every library's errors on one data set, side by side, since nothing here is timed. Peers are tuned on the
    symmetric form (at W8, where there is little to win, along the first axis alone); their asymmetric form takes the
    options over."""
    bench.add(problems)

    def ours() -> list[Row]:
        return [
            replace(bench.once(problems, OURS, method, bits, symmetric, {}), setting=method)
            for symmetric, bits, method in product((True, False), widths, OUR_METHODS)
        ]

    def peer(name: str) -> list[Row]:
        tool, rows = PEERS[name], []
        ends: dict[int, Options] = {}
        for symmetric, bits in product(tool.forms, widths):
            row = bench.once(problems, name, tool.method, bits, symmetric, tool.default)
            rows.append(replace(row, setting="default"))
            for setting, options in tool.others.items():
                row = bench.once(problems, name, tool.method, bits, symmetric, options)
                rows.append(replace(row, setting=setting))
            if tool.axes:
                axes = tool.axes[:1] if quick or bits == 8 else tool.axes
                start = ends.get(bits, tool.default)
                row, ends[bits] = bench.tuned(
                    problems, name, bits, symmetric, start, axes if symmetric else ()
                )
                changed = {key: value for key, value in ends[bits].items() if value != tool.default.get(key)}
                rows.append(replace(row, setting="tuned", options=json.dumps(changed)))
        return rows

    def all_of(name: str) -> list[Row]:
        with timed(f"errors, {problems[0].data}, {name}"):
            return ours() if name == OURS else peer(name)

    with ThreadPoolExecutor(len(bench.libraries)) as pool:
        rows = [row for found in pool.map(all_of, bench.libraries) for row in found]
    places = {pair: place for place, pair in enumerate(product((True, False), widths))}
    return sorted(rows, key=lambda row: places[row.symmetric, row.num_bits])


def speed(bench: Bench, problems: Sequence[Problem], repeats: int) -> list[Row]:
    """The speed runs, taking turns; of each the repeat of the least CPU time."""
    bench.add(problems)
    least: dict[tuple[int, int], Row] = {}
    for _, bits, place in product(range(repeats), SPEED_WIDTHS, range(len(SPEED_RUNS))):
        tool, method, setting, symmetric, options = SPEED_RUNS[place]
        if tool in bench.libraries:
            row = replace(bench.run(problems, tool, method, bits, symmetric, options), setting=setting)
            kept = least.get((bits, place))
            least[bits, place] = row if kept is None or row.cpu_s < kept.cpu_s else kept
    return list(least.values())


def chosen_peers(names: str) -> list[str]:
    """The peers named by the option --peers. Raises InputError for an unknown one and one without environment."""
    wanted = [] if names == "none" else list(PEERS) if names == "all" else names.split(",")
    for name in wanted:
        if name not in PEERS:
            raise InputError(f"--peers names '{name}': expected all, none or some of {','.join(PEERS)}")
        environment = PEERS[name].environment
        if not (ROOT / environment / "bin/python").exists():
            short = environment.removeprefix(".venv-")
            raise InputError(
                f"{name} needs the environment {environment}, which does not exist: python3.11 -m venv {environment} "
                f"&& {environment}/bin/pip install -r benchmarks/requirements-{short}.txt; or give --peers none"
            )
    return wanted


def machine() -> str:
    """The machine in words that fit any of its kind."""
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread of {os.cpu_count()} cores"


def main(
    peers: Annotated[str, typer.Option(help="all, none, or names with commas between")] = "all",
    quick: Annotated[bool, typer.Option(help="a tiny layer, W2 and W3: shows that everything runs")] = False,
    output: Annotated[Path, typer.Option(help="the report")] = OUTPUT,
) -> None:
    """Measure, print the claims, write the report."""
    names = chosen_peers(peers)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = Path(scratch)
        tools = {OURS: OURSELVES, **{name: PEERS[name] for name in names}}
        libraries = {}
        for name, tool in tools.items():
            python = Path(sys.executable) if name == OURS else ROOT / tool.environment / "bin/python"
            libraries[name] = running.enter_context(Peer(tool.module, python, folder))
        with timed("libraries"):
            versions = {name: library.ready() for name, library in libraries.items()}
        bench = Bench(libraries, folder)
        with timed("data"):
            sets = [synthetic("synthetic", QUICK if quick else QUALITY)]
            if not quick and REFERENCE.is_dir():
                sets.append(embedded(REFERENCE, EMBEDDED_LAYERS, *EMBEDDED_TOKENS))
        rows: list[Row] = []
        for problems in sets:
            rows += quality(bench, problems, WIDTHS[:2] if quick else WIDTHS, quick)
        with timed("speed"):
            timings = speed(
                bench, synthetic("speed", QUICK if quick else SPEED, seed=1), 1 if quick else REPEATS
            )
    checked = claims(rows, timings)
    for claim in checked:
        print(claim.line())
    with replacing_file(output) as path:
        path.write_text(report(rows, timings, checked, versions, machine(), GROUP_SIZE))


if __name__ == "__main__":
    run_step(main)
