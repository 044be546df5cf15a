"""Could calibrate_fwp find a signal if there were one, and does it find one where there is none?

    python -m benchmarks.prediction_power                 # some ten minutes on one core
    python -m benchmarks.prediction_power --draws 50

Out: benchmarks/prediction_power.md and, so that a later run carries on, the draws in --file.

Each draw makes requests of seven equal classes whose damage has a long tail and a given mean rank correlation with
log FWP inside a class (tasks/risk/simulated.py); `permuted` shuffles the damage inside classes. Then the code of the
stage: the predictor is chosen by nested cross-validation, and judged on 50 halvings of all requests.

found    the choice reads signals, and beats the class mean within classes: the interval over halvings is above 0
chosen   the choice reads signals
ridge    ridge on all signals, not chosen, beats the class mean within classes
Rates with exact (Clopper-Pearson) 95 % intervals. At most 5 % of permuted draws may be found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from scipy.stats import binomtest

from tasks.console import run_step, track
from tasks.contracts import InputError, replacing_file
from tasks.risk.candidates import AUTO, choose
from tasks.risk.predictor import CLASS_MEANS, stratified_folds
from tasks.risk.resplit import split_table, stratified_halves
from tasks.risk.simulated import permuted, simulated_requests

LAWS = ("0.5", "0.3", "0.2", "permuted")  # rank correlation inside a class; permuted: 0.5, then shuffled
FOLDS, SPLITS, MIN_TOKENS = 5, 50, 32
OUTPUT = Path("benchmarks/prediction_power.md")
FIGURES = ("found", "chosen", "ridge")


def judged(law: str, requests: int, seed: int) -> dict[str, Any]:
    """What the stage's code says of one draw."""
    rows, damage = simulated_requests(requests, 0.5 if law == "permuted" else float(law), seed)
    if law == "permuted":
        damage = permuted(rows, damage, seed)
    fold = stratified_folds(rows.classes, FOLDS, seed)
    name = choose(AUTO, rows, damage, fold, MIN_TOKENS).predictor.name
    chosen = name not in CLASS_MEANS
    halves = stratified_halves(rows.classes, SPLITS, seed)
    names = list(dict.fromkeys([*[name] * chosen, "ridge"]))
    table = split_table(rows, damage, halves, MIN_TOKENS, names)["predictors"]
    beats = {own: bool(figures["beats_class_mean"]) for own, figures in table.items()}
    found = {"found": chosen and beats[name], "chosen": chosen, "ridge": beats["ridge"]}
    return {"law": law, "requests": requests, "seed": seed, "name": name, **found}


def draw(file: Path, draws: int, requests: int, laws: Sequence[str] = LAWS) -> list[dict[str, Any]]:
    """The draws 0 .. draws - 1 of each of `laws`, after those that `file` lacks are made and added to it."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    have = {(row["law"], row["requests"], row["seed"]) for row in rows}
    todo = [(law, seed) for seed in range(draws) for law in laws if (law, requests, seed) not in have]
    with file.open("a") as lines:
        for law, seed in track(todo, "draws", len(todo)):
            rows.append(judged(law, requests, seed))
            lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()
    return [row for row in rows if row["seed"] < draws and row["requests"] == requests]


def report(rows: Sequence[dict[str, Any]], requests: int) -> str:
    """The table in Markdown."""
    lines = [
        "# Would a signal be found?",
        "",
        f"{requests} requests of seven classes, {SPLITS} halvings; `python -m benchmarks.prediction_power`. Rates with "
        "exact 95 % intervals.",
        "",
        "| rank correlation inside classes | draws | found | choice reads signals | ridge beats the class mean |",
        "| --- | --: | --: | --: | --: |",
    ]
    for law in LAWS:
        own = [row for row in rows if row["law"] == law]
        if own:
            cells = [_rate(sum(row[figure] for row in own), len(own)) for figure in FIGURES]
            lines.append(f"| {law} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rate(count: int, draws: int) -> str:
    interval = binomtest(count, draws).proportion_ci(0.95, "exact")
    return f"{count / draws:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def main(
    draws: Annotated[int, typer.Option(help="draws of every law", min=1)] = 200,
    requests: Annotated[int, typer.Option(help="requests of a draw", min=28)] = 168,
    laws: Annotated[str, typer.Option(help="commas between")] = ",".join(LAWS),
    file: Annotated[Path, typer.Option(help="the draws so far, JSON lines")] = Path(
        ".prediction_power.jsonl"
    ),
    output: Annotated[Path, typer.Option(help="the report")] = OUTPUT,
) -> None:
    """Draw, print the table, write the report."""
    wanted = laws.split(",")
    if unknown := sorted({*wanted} - {*LAWS}):
        raise InputError(f"--laws has '{unknown[0]}': expected some of {', '.join(LAWS)}")
    text = report(draw(file, draws, requests, wanted), requests)
    with replacing_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_step(main)
