"""What FWP costs: a prefill that yields every prompt loss, the same with FWP, and one with the last logits alone.

    python -m benchmarks.fwp_overhead [--artifacts artifacts] [--tokens 512 1024] [--pairs 30] [--threads 1]

One prompt a pass, the scorer in float32, all ways in every round, their order reversed from round to round. Rounds are
added to --file, those that it holds are not run again; the table is of all in it. A ratio is of two passes of
one round; its median over rounds comes with a 95 % interval by order statistics (sign test). CPU seconds of
the process are the main figure: on a shared machine they move less than the clock. `inside` is the share of a pass's
own CPU time that is spent in the hooks and in the arithmetic after the losses, by timers around these.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from scipy.stats import binom

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import head_logits, prefill
from tasks.moe.record import LayerHooks
from tasks.moe.registry import moe_layers
from tasks.moe.strength import PickSums
from tasks.params import load_params
from tasks.risk import online
from tasks.risk.online import Signals, batch_signals, pick_values, prompt_losses

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks/fwp_overhead.jsonl"
REPORT = ROOT / "benchmarks/fwp_overhead.md"
GOAL, PAPER = 0.01, {512: 0.031, 1024: 0.049}
WAYS = ("losses", "fwp", "everything", "last")
COLUMNS = (
    "tokens", "what", "rounds", "threads", "losses: CPU s", "overhead, CPU", "overhead, wall", "inside", "paper",
    "at most 1 %", "over last logits, CPU",
)  # fmt: skip
INTRODUCTION = """
A prefill of one prompt by the scorer that already yields every prompt loss, against the same with signals read from
the routing on the way: median over paired rounds of the ratio less 1, 95 % interval by order statistics in brackets.
CPU seconds of the process are the main figure, wall time stands beside them. `inside`: the share of the pass's CPU
time that is spent in the hooks and in the arithmetic after the losses, timed directly. The last column
compares with a prefill that yields the last position's logits alone, as plain generation does; `no signal` is what all
prompt losses cost by themselves.
"""
NAMES = {
    "fwp": "FWP (gate_prob)",
    "everything": "every signal of every instance",
}


def passes(model: Any, prompt: list[int], signals: dict[str, Signals]) -> dict[str, Callable[[], None]]:
    """The ways to prefill `prompt`, by name."""
    first, length = np.array([2]), np.array([len(prompt)])

    def losses() -> None:
        (batch,) = prefill(model, [prompt], len(prompt), "losses", progress=False)
        prompt_losses(model, batch, first, length)

    def with_signals(own: Signals) -> None:
        values = pick_values(model, own)
        (batch,) = prefill(model, [prompt], len(prompt), "fwp", progress=False, values=values)
        nll, _ = prompt_losses(model, batch, first, length)
        batch_signals(batch, values, own, nll, first, length)

    def last() -> None:
        (batch,) = prefill(model, [prompt], len(prompt), "last", progress=False)
        head_logits(model, batch.hidden[0, -1:])

    return {
        "losses": losses,
        "fwp": lambda: with_signals(signals["fwp"]),
        "everything": lambda: with_signals(signals["everything"]),
        "last": last,
    }


@contextmanager
def inside() -> Iterator[list[float]]:
    """CPU seconds spent in the hooks of every layer and in the arithmetic after the losses, added to [0]."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.process_time()
            result = function(*args)
            spent[0] += time.process_time() - started
            return result

        return run

    with (
        patch.object(LayerHooks, "at_router", timed(LayerHooks.at_router)),
        patch.object(LayerHooks, "at_experts", timed(LayerHooks.at_experts)),
        patch.object(PickSums, "pop", timed(PickSums.pop)),
        patch("tasks.moe.prefill.moe_layers", timed(moe_layers)),
        patch(f"{__name__}.batch_signals", timed(online.batch_signals)),
        patch(f"{__name__}.pick_values", timed(online.pick_values)),
    ):
        yield spent


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Wall and CPU seconds of one pass, and of its part for the signals."""
    with inside() as spent:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "inside": spent[0],
        }


def wanted_signals(model: Any, align: str, instances: list[str]) -> dict[str, Signals]:
    """FWP by the dearest strength alone, and everything that a predictor may read. The cost does not depend on
    the tables' values, so they are random here."""
    shape = (len(moe_layers(model)), moe_layers(model)[0].num_experts)
    generator = np.random.default_rng(0)
    fragility = {name: generator.uniform(0, 1, shape) for name in instances}
    load = generator.uniform(1, 2, shape)
    return {
        "fwp": Signals(align, ("gate_prob",)),
        "everything": Signals(align, fragility=fragility, load=load),
    }


def long_prompt(artifacts: Path, tokens: int) -> list[int]:
    """The first `tokens` calibration tokens, one sequence after the other."""
    ids = pd.read_parquet(artifacts / "requests/calibration.parquet")["ids"]
    joined = [int(token) for sequence in ids for token in sequence]
    if len(joined) < tokens:
        raise InputError(
            f"{artifacts}/requests/calibration.parquet holds {len(joined)} tokens, fewer than {tokens}"
        )
    return joined[:tokens]


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Median of `values` [n] and its 95 % interval by order statistics: the k-th from either end, where a
    Binomial(n, 1/2) is below k with probability 2.5 % at most. Infinite below 6 values."""
    ordered = np.sort(values)
    k = int(binom.ppf(0.025, len(values), 0.5))
    while k > 0 and binom.cdf(k - 1, len(values), 0.5) > 0.025:
        k -= 1
    low, high = (ordered[k - 1], ordered[-k]) if k > 0 else (-np.inf, np.inf)
    return float(np.median(values)), float(low), float(high)


def report(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown, a row for each prompt length and way."""
    lines = [
        "# What FWP costs",
        "",
        " ".join(INTRODUCTION.split()),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        own = [row for row in rows if row["tokens"] == tokens]
        threads = ", ".join(map(str, sorted({row["threads"] for row in own})))

        def ratio(way: str, base: str, clock: str, rounds: list[dict[str, Any]] = own) -> np.ndarray:
            return np.array([row[way][clock] / row[base][clock] - 1 for row in rounds])

        plain = float(np.median([row["losses"]["cpu"] for row in own]))
        for way in ("fwp", "everything"):
            share = np.array([row[way]["inside"] / row[way]["cpu"] for row in own])
            cpu = median_interval(ratio(way, "losses", "cpu"))
            cells = [
                str(tokens), NAMES[way], str(len(own)), threads, f"{plain:.2f}", _percent(*cpu),
                _percent(*median_interval(ratio(way, "losses", "wall"))), _percent(*median_interval(share)),
                f"{100 * PAPER[tokens]:.1f} %" if way == "fwp" and tokens in PAPER else "", _verdict(cpu),
                _percent(*median_interval(ratio(way, "last", "cpu"))),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        cells = [str(tokens), "no signal", str(len(own)), threads, f"{plain:.2f}", *[""] * 5]
        cells.append(_percent(*median_interval(ratio("losses", "last", "cpu"))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(median: float, low: float, high: float) -> str:
    inner = f"{100 * low:.2f}, {100 * high:.2f}" if np.isfinite(low) else "too few rounds"
    return f"{100 * median:.2f} % [{inner}]"


def _verdict(interval: tuple[float, float, float]) -> str:
    _, low, high = interval
    return "yes" if high <= GOAL else "no" if low > GOAL else "cannot tell"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--artifacts", type=Path, default=ROOT / "artifacts")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    params = load_params(ROOT / "params.yaml")
    torch.set_num_threads(options.threads)
    rows = (
        [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    )
    have = {(row["tokens"], row["round"]) for row in rows}
    todo = [(n, tokens) for n in range(options.pairs) for tokens in options.tokens if (tokens, n) not in have]
    if todo:
        model = load_model(options.artifacts / "instances" / params.calibrate_fwp.scorer)
        signals = wanted_signals(model, params.calibrate_fwp.align, params.quantize_instances.names)
        ways = {n: passes(model, long_prompt(options.artifacts, n), signals) for n in options.tokens}
        for tokens in options.tokens:
            for run in ways[tokens].values():
                run()  # first calls are slower
        with options.file.open("a") as lines:
            for number, tokens in track(todo, "rounds", len(todo)):
                order = WAYS if number % 2 == 0 else WAYS[::-1]
                row: dict[str, Any] = {"tokens": tokens, "round": number, "threads": options.threads}
                row |= {way: measured(ways[tokens][way]) for way in order}
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    options.report.write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    main()
