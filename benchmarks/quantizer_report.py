"""The arithmetic of the quantizer benchmark: errors, claims and tables. Runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

OURS = "expertpool"
THREADS = 1.1  # CPU over wall time above this shows more than one thread at work


def output_energy(weights: torch.Tensor, inputs: Sequence[torch.Tensor]) -> float:
    """Sum over experts of |X W^T|²; weights [E, out, in], inputs [E] of [n, in], the tokens that reach each expert."""
    pairs = zip(weights, inputs, strict=True)
    return sum(
        float((tokens @ weight.float().T).square_().sum(dtype=torch.float64)) for weight, tokens in pairs
    )


def output_error(
    weights: torch.Tensor, quantized: torch.Tensor, inputs: Sequence[torch.Tensor], energy: float
) -> float:
    """Relative output error of a stack: sum over experts of |X (W − Ŵ)^T|² over `energy`, the weights' own."""
    return output_energy(weights.float() - quantized.float(), inputs) / energy


def weight_error(weights: torch.Tensor, quantized: torch.Tensor) -> float:
    """Relative weight error of a stack [E, out, in]: |W − Ŵ|² over |W|²."""
    error = total = 0.0
    for weight, back in zip(weights, quantized, strict=True):
        original = weight.float()
        error += float((original - back.float()).square_().sum(dtype=torch.float64))
        total += float(original.square().sum(dtype=torch.float64))
    return error / total


@dataclass(frozen=True)
class Row:
    """One library at one setting on one data set, its matrices averaged (errors) and summed (time, parameters)."""

    data: str
    tool: str
    setting: str
    num_bits: int
    symmetric: bool
    output_error: float
    weight_error: float
    parameters: int
    cpu_s: float
    wall_s: float
    options: str = ""  # JSON: what a tuned setting changed

    @property
    def speed(self) -> float:
        """Millions of parameters per CPU second."""
        return self.parameters / self.cpu_s / 1e6

    @property
    def form(self) -> str:
        return "sym" if self.symmetric else "asym"

    @property
    def form_of_data(self) -> tuple[str, int, bool]:
        """What rows have in common that may be compared."""
        return self.data, self.num_bits, self.symmetric


@dataclass(frozen=True)
class Claim:
    """`value` is to be at most `limit`, or at least where `at_least`."""

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def cells(self) -> list[str]:
        """Verdict, text, value, limit."""
        sign = "≥" if self.at_least else "≤"
        return ["PASS" if self.holds else "FAIL", self.text, f"{self.value:.3f}", f"{sign} {self.limit:g}"]

    def line(self) -> str:
        verdict, text, value, limit = self.cells()
        return f"{verdict}  {text}: {value} ({limit})"


def claims(rows: Sequence[Row], timings: Sequence[Row]) -> list[Claim]:
    """What the project says of its quantizers, as far as both sides were measured."""
    found: list[Claim] = []

    def pick(source: Sequence[Row], tool: str, setting: str, row: Row) -> Row | None:
        for other in source:
            if (other.tool, other.setting) == (tool, setting) and other.form_of_data == row.form_of_data:
                return other
        return None

    def ratio(text: str, mine: Row, rival: Row | None, limit: float, measure: str) -> None:
        if rival:
            where = f"{mine.data}, W{mine.num_bits} {mine.form}"
            value = getattr(mine, measure) / getattr(rival, measure)
            found.append(
                Claim(f"{where}: {measure.replace('_', ' ')} of {mine.setting} over {text}", value, limit)
            )

    for mine in rows:
        if mine.tool != OURS:
            continue
        hqq = pick(rows, "hqq", "default", mine)
        if mine.setting == "gptq":
            peers = [row for row in rows if row.tool != OURS and row.form_of_data == mine.form_of_data]
            if peers:
                rival = min(peers, key=lambda row: row.output_error)
                ratio(f"the best peer's ({rival.tool} {rival.setting})", mine, rival, 1, "output_error")
            if mine.num_bits == 2:
                plain = pick(rows, "llmcompressor", "default", mine)
                ratio("llmcompressor's at min-max", mine, plain, 0.75, "output_error")
                ratio("the hqq library's", mine, hqq, 0.45, "output_error")
        elif mine.setting == "hqq":
            equal = pick(rows, "hqq", "16-bit scales", mine)
            ratio("the hqq library's with 16-bit scales", mine, equal, 1.01, "weight_error")
        elif mine.setting == "clip_search" and mine.num_bits in (2, 3):
            ratio("the hqq library's", mine, hqq, 1, "weight_error")
    for mine in timings:
        for setting, rival_setting, tool, limit in (
            ("gptq", "min-max", "llmcompressor", 1.3),
            ("hqq", "default", "hqq", 5),
        ):
            rival = pick(timings, tool, rival_setting, mine)
            if rival and (mine.tool, mine.setting) == (OURS, setting):
                text = f"W{mine.num_bits} {mine.form}: speed of {setting} over {tool}'s ({rival_setting})"
                found.append(Claim(text, mine.speed / rival.speed, limit, at_least=True))
    return found


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def error_table(rows: Sequence[Row], measure: str) -> str:
    """`measure` of one data set and form by library (lines) and width (columns), the least of a column in bold."""
    widths = sorted({row.num_bits for row in rows})
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row.tool, row.setting), {})[row.num_bits] = getattr(row, measure)
    least = {bits: min(by_bits.get(bits, math.inf) for by_bits in found.values()) for bits in widths}

    def cell(value: float | None, bits: int) -> str:
        if value is None:
            return ""
        return f"**{value:.3g}**" if value == least[bits] else f"{value:.3g}"

    lines = [
        [f"{tool} {setting}", *(cell(by_bits.get(bits), bits) for bits in widths)]
        for (tool, setting), by_bits in found.items()
    ]
    return table(["", *(f"W{bits}" for bits in widths)], lines)


def speed_table(rows: Sequence[Row]) -> str:
    """Speed, time and errors of the speed runs, fastest first within a width."""
    lines = []
    for row in sorted(rows, key=lambda row: (row.num_bits, -row.speed)):
        threads = "" if row.cpu_s <= THREADS * row.wall_s else " (more than one thread)"
        lines.append(
            [
                f"W{row.num_bits} {row.form}, {row.tool} {row.setting}{threads}",
                f"{row.speed:.2f}", f"{row.cpu_s:.2f}", f"{row.wall_s:.2f}",
                f"{row.output_error:.3g}", f"{row.weight_error:.3g}",
            ]
        )  # fmt: skip
    return table(["", "Mp per CPU-s", "CPU s", "wall s", "output error", "weight error"], lines)


def report(
    rows: Sequence[Row],
    timings: Sequence[Row],
    checked: Sequence[Claim],
    versions: Mapping[str, Mapping[str, str]],
    machine: str,
    group_size: int,
) -> str:
    """The whole of benchmarks/quantizers.md."""
    held = sum(claim.holds for claim in checked)
    libraries = "; ".join(
        ", ".join(f"{package} {version}" for package, version in of.items())
        for tool, of in versions.items()
        if tool != OURS
    )
    parts = [
        "# Quantizers against llmcompressor, gptqmodel and hqq",
        "Written by `python -m benchmarks.quantizers`, whose header says how everyone is measured. "
        f"Group size {group_size}; {machine}. Peers: {libraries or 'none'}.",
        f"## Claims: {held} of {len(checked)} hold",
        table(["", "claim", "ratio", "limit"], [claim.cells() for claim in checked]),
        "## Held-out output error",
        "|X (W − Ŵ)ᵀ|² over |X Wᵀ|² on tokens that calibrated nothing, mean over the matrices. `tuned`: the best of a "
        "peer's search, chosen on this very error; the settings stand below. The least of a column is bold.",
    ]
    pairs = [(row.data, row.symmetric) for row in rows]
    for data, symmetric in dict.fromkeys(pairs):
        chosen = [row for row, pair in zip(rows, pairs, strict=True) if pair == (data, symmetric)]
        parts += [f"### {data}, {chosen[0].form}", error_table(chosen, "output_error")]
    parts += ["## Weight error, asymmetric", "|W − Ŵ|² over |W|², of the methods that look at weights alone."]
    for data in dict.fromkeys(row.data for row in rows):
        alone = [row for row in rows if row.data == data and not row.symmetric and _weights_alone(row)]
        parts += [f"### {data}", error_table(alone, "weight_error")]
    parts += [
        "## Speed",
        "The repeat of the least CPU time; libraries take turns. llmcompressor factors a Hessian for gate and one "
        "for up, which are the same; `gate and up joined` is what it would take if it shared them, as ours does.",
        speed_table(timings),
    ]
    tuned = [row for row in rows if row.options]
    if tuned:
        lines = []
        for row in tuned:
            changed = json.loads(row.options).items()
            text = ", ".join(f"{name}: {value}" for name, value in changed) or "nothing: the default is best"
            lines.append([f"{row.data}, W{row.num_bits} {row.form}, {row.tool}", text])
        parts += ["## What tuning changed", table(["", "changed"], lines)]
    return "\n\n".join(parts) + "\n"


def _weights_alone(row: Row) -> bool:
    return row.tool == "hqq" or (row.tool == OURS and row.setting != "gptq")
