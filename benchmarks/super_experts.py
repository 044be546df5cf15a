"""What it is worth to protect the most fragile experts: damage and bytes of the embedded model with 0 ... 10 kept.

    python -m benchmarks.super_experts            # from the project's root, after `make run`; some minutes on two cores

In: artifacts/reference (source smollm2-moe), artifacts/requests. Out: benchmarks/super_experts.jsonl, one line a
ranking and a setting, and the table benchmarks/super_experts.md. A run that was stopped carries on where it was.

Experts are ranked on the calibration tokens as `quantize_instances.protect` does (tasks/moe/fragile.py), by the sum
with position 0 and by the sum without it; the baseline protects as many experts drawn at random, the same order for
every width. Scored are the response tokens of holdout requests, as in benchmarks/embedded_quantizers.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks import embedded_quantizers as embedded
from tasks.console import run_step, timed, track
from tasks.contracts import InputError, replacing_file
from tasks.moe.checkpoint import load_model
from tasks.moe.fragile import OutputErrors, output_errors
from tasks.moe.quantizing import CalibratedWalk
from tasks.moe.shards import Settings
from tasks.moe.stored_experts import StoredLayer, stored_layers
from tasks.moe.tensors import CheckpointTensors, read_config
from tasks.params import Params, load_params
from tasks.quant.formats import file_sha256, packed_entries
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid, scale_dtype
from tasks.replication.calibration import read_calibration
from tasks.risk.scoring import read_requests

VERSION = 1
BITS = (4, 2, 3)
COUNTS = (1, 3, 10)
WITH, WITHOUT, RANDOM = "output error", "output error without position 0", "random"
RANKINGS = (WITH, WITHOUT, RANDOM)
TOP = 8  # experts listed


@dataclass(frozen=True)
class Setting:
    bits: int
    protect: int  # experts
    ranking: str  # "" where none is protected


@dataclass(frozen=True)
class Result(Setting):
    """Per-request means over response tokens, nats."""

    experts: list[tuple[int, int]]  # layer as MoELayer counts, expert
    size_bytes: int  # of all routed experts
    dnll: list[float]  # [R]
    kl: list[float]  # [R]

    @property
    def setting(self) -> Setting:
        return Setting(self.bits, self.protect, self.ranking)


@dataclass(frozen=True)
class Ranking:
    """The sums of all experts [L][E] at one width."""

    bits: int
    layers: list[int]
    every: list[list[float]]
    without_first: list[list[float]]

    def order(self, ranking: str, seed: int) -> list[tuple[int, int]]:
        """(place, expert) of all experts, the first to be protected first."""
        scores = {WITH: self.every, WITHOUT: self.without_first}.get(ranking)
        shape = np.shape(self.every)
        if scores is None:
            order = np.random.default_rng(seed).permutation(int(np.prod(shape)))
        else:
            order = np.argsort(-np.array(scores), axis=None, kind="stable")
        return [
            (int(place), int(expert)) for place, expert in zip(*np.unravel_index(order, shape), strict=True)
        ]


def settings_of(bits: Iterable[int]) -> list[Setting]:
    return [
        setting
        for width in bits
        for setting in (
            Setting(width, 0, ""),
            *(Setting(width, count, ranking) for ranking in RANKINGS for count in COUNTS),
        )
    ]


def run(bits: Sequence[int], count: int, seed: int, artifacts: Path, out: Path, params: Params) -> None:
    """Measure the settings that `out` lacks, on `count` holdout requests, and append them."""
    section, folder = params.quantize_instances, artifacts / "reference"
    gptq = Gptq(damping=section.gptq.damping, shrinkage=section.gptq.shrinkage)
    model = load_model(folder)
    everything = read_requests(artifacts / "requests" / "requests.parquet", model.config.vocab_size)
    requests, calibration = embedded.chosen(everything, count), read_calibration(artifacts / "requests")
    embedded.begin(out, {
        "version": VERSION,
        "requests": embedded.digest(requests.sequences),
        "calibration": embedded.digest(calibration),
        "reference": [file_sha256(path) for path in sorted(folder.glob("*.safetensors"))],
        "method": [section.method, section.group_size, section.symmetric],
        "seed": seed,
    })  # fmt: skip
    rankings, done = read(out)
    left = [setting for setting in settings_of(bits) if setting not in {result.setting for result in done}]
    layers = stored_layers(model, CheckpointTensors(folder))
    for width in sorted({setting.bits for setting in left} - rankings.keys()):
        settings = Settings(section.method, Grid(width, section.group_size, section.symmetric), gptq)
        walk = CalibratedWalk(calibration, params.runtime.batch_tokens, "reference", 1.0)
        with tempfile.TemporaryDirectory() as scratch:
            errors = output_errors(folder, layers, settings, walk, map, Path(scratch))
        rankings[width] = ranking_of(width, layers, errors)
        append(out, rankings[width])
    if not left:
        return
    if section.method == "gptq":
        raise InputError(
            "quantize_instances.method is gptq: this comparison quantizes without Hessians; set another"
        )
    with timed(f"reference: {count} requests"):
        reference = embedded.losses(model, requests, params.runtime.batch_tokens, "prefill", None)
    experts, written = embedded.Experts(model, read_config(folder).dtype, None), 0
    for setting in track(left, "settings", len(left)):
        grid = Grid(setting.bits, section.group_size, section.symmetric)
        own = embedded.Setting(section.method, section.group_size, section.symmetric, setting.bits)
        if written != setting.bits:
            experts.quantize(own, gptq)
            written = setting.bits
        kept = rankings[setting.bits].order(setting.ranking, seed)[: setting.protect]
        with experts.restored(kept):
            losses = embedded.losses(model, requests, params.runtime.batch_tokens, own.name, reference)
        means = embedded.request_means(requests, reference, losses)
        names = [(layers[place].layer, expert) for place, expert in kept]
        damage = {name: values.tolist() for name, values in means.items()}
        append(
            out, Result(**asdict(setting), experts=names, size_bytes=bytes_of(layers, kept, grid), **damage)
        )


def ranking_of(bits: int, layers: Sequence[StoredLayer], errors: OutputErrors) -> Ranking:
    return Ranking(
        bits, [layer.layer for layer in layers], errors.every.tolist(), errors.without_first.tolist()
    )


def bytes_of(layers: Sequence[StoredLayer], kept: Iterable[tuple[int, int]], grid: Grid) -> int:
    """Bytes of all routed experts as an instance stores them."""
    chosen, total = set(kept), 0
    for place, layer in enumerate(layers):
        for matrix in layer.matrices:
            shape = matrix.shape[1:]
            entries = packed_entries(["one"], shape, grid, scale_dtype(matrix.dtype)).values()
            packed = sum(dtype.itemsize * torch.Size(own).numel() for dtype, own in entries)
            plain = matrix.dtype.itemsize * torch.Size(shape).numel()
            for expert in range(layer.experts):
                total += plain if (place, expert) in chosen else packed
    return total


def append(path: Path, row: Ranking | Result) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> tuple[dict[int, Ranking], list[Result]]:
    """Bits -> ranking, and the results."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    rankings = {row["bits"]: Ranking(**row) for row in rows if "every" in row}
    results = [Result(**row) for row in rows if "every" not in row]
    return rankings, results


def table(rankings: dict[int, Ranking], results: Sequence[Result], method: str) -> str:
    """Damage and bytes of every setting, and the most fragile experts."""
    count = len(results[0].kl)
    lines = [
        f"Protected experts on the embedded model ({method}): the n most fragile of all layers stay in 16",
        f"bits. Nats per response token, mean of {count} holdout requests ± its standard error; KL is",
        "KL(reference || instance). `change` is against protect 0 on the same requests, with the standard error of the",
        "paired difference.",
        "",
        "| bits | protect | chosen by | expert MiB | ΔNLL | change | KL | change |",
        "|---" * 8 + "|",
    ]
    for bits in sorted({result.bits for result in results}, reverse=True):
        own = [result for result in results if result.bits == bits]
        base = next((result for result in own if result.protect == 0), None)
        key = {(result.ranking, result.protect): result for result in own}
        for ranking, protect in [("", 0), *((name, n) for name in RANKINGS for n in COUNTS)]:
            result = key.get((ranking, protect))
            if result is not None:
                cells = []
                for damage in ("dnll", "kl"):
                    values = np.array(getattr(result, damage))
                    cells.append(mean_text(values))
                    change = base is not None and protect
                    cells.append(mean_text(values - np.array(getattr(base, damage)), "+") if change else "")
                size = f"{result.size_bytes / 2**20:.2f}"
                lines.append(f"| W{bits} | {protect} | {ranking or '–'} | {size} | {' | '.join(cells)} |")
    for bits in sorted(rankings, reverse=True):
        lines += ["", *top_experts(rankings[bits])]
    return "\n".join(lines) + "\n"


def mean_text(values: np.ndarray, sign: str = "") -> str:
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():{sign}.4f} ± {error:.4f}"


def top_experts(ranking: Ranking) -> list[str]:
    every, without = np.array(ranking.every), np.array(ranking.without_first)
    places = {pair: rank + 1 for rank, pair in enumerate(ranking.order(WITHOUT, 0))}
    lines = [
        f"W{ranking.bits}: the sum over calibration tokens of routing weight x norm of the output's error; all "
        f"{every.size} experts together {every.sum():.1f}, without position 0 {without.sum():.1f}.",
        "",
        "| rank | layer | expert | sum | share | without position 0 | rank without |",
        "|---" * 7 + "|",
    ]
    for rank, (place, expert) in enumerate(ranking.order(WITH, 0)[:TOP]):
        score, later = every[place, expert], without[place, expert]
        lines.append(
            f"| {rank + 1} | {ranking.layers[place]} | {expert} | {score:.1f} | {score / every.sum():.1%} | "
            f"{later:.1f} | {places[place, expert]} |"
        )
    return lines


def main(
    requests: Annotated[int, typer.Option(help="holdout requests, a multiple of the classes")] = 14,
    bits: Annotated[list[int] | None, typer.Option(help="only these widths")] = None,
    seed: Annotated[int, typer.Option(help="of the experts drawn at random")] = 0,
    artifacts: Annotated[Path, typer.Option(help="of a run with source smollm2-moe")] = Path("artifacts"),
    out: Annotated[Path, typer.Option(help="results")] = Path("benchmarks/super_experts.jsonl"),
) -> None:
    """Measure every setting that the results lack, and print the table."""
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    run(bits or BITS, requests, seed, artifacts, out, params)
    section = params.quantize_instances
    form = "symmetric" if section.symmetric else "asymmetric"
    text = table(*read(out), f"{section.method}, group {section.group_size or 'row'}, {form}")
    with replacing_file(out.with_suffix(".md")) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_step(main)
