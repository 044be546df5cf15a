"""Whether a promised budget is kept: on a known law, drawn again and again, and on splits of real requests.

    python -m benchmarks.risk_control                       # after `make run`; a quarter of an hour on one core
    python -m benchmarks.risk_control --draws 0             # the real requests alone
    python -m benchmarks.risk_control --predictions none    # the known law alone

Out: benchmarks/risk_control.md and, so that a later run carries on, the draws in --file.

The law: heavy tail, three class sizes (tasks/risk/population.py), tau = W4 + 0.758 (W3 - W4) of the true means; each
draw has fit and fresh requests of its own. The real requests, with the signals of their prefill and their true damage,
are halved again and again (tasks/risk/splits.py), tau by the same rule from all of them, once.

Compliance: of the draws (or splits) in which some class is guaranteed, those in which every such class keeps its
budget. Draws are independent: exact (Clopper-Pearson) interval and the exact one-sided test that compliance is at least
1 - delta. Splits are not: bootstrap interval over requests. Gain: mean reward above all-W4, a class without guarantee
counting 0, beside the point estimate's. `agnostic` is request-agnostic mixing under the same guarantee by the same
code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from scipy.stats import binomtest

from tasks.console import run_step, track
from tasks.contracts import InputError, replacing_file
from tasks.risk.population import Population, play
from tasks.risk.splits import SplitRows, split_compliance, standard_features

SETTINGS = (
    ("class", "signal"),
    ("class", "class_mean"),
    ("overall", "signal"),
    ("overall", "class_mean"),
    ("overall", "agnostic"),
)
DELTAS = (0.1, 0.05)
VALUE, REPLICATES, LARGE = 0.758, 119, 200
SIGNALS = ("log_fwp", "log_ppl", "log_length")
RIDGE = 0.1  # penalty of the real rows' predictor per fit request
SPLIT_REPLICATES = 199
OUTPUT = Path("benchmarks/risk_control.md")


def played(file: Path, draws: int) -> list[dict[str, Any]]:
    """The draws 0 .. draws - 1 of every setting, after those that `file` lacks are played and added to it."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    have = {(row["scope"], row["predictor"], row["seed"]) for row in rows}
    todo = [
        (scope, name, seed)
        for seed in range(draws)
        for scope, name in SETTINGS
        if (scope, name, seed) not in have
    ]
    with file.open("a") as lines:
        for scope, name, seed in track(todo, "draws", len(todo)):
            trials = play(Population(), seed, DELTAS, VALUE, name, scope, REPLICATES)
            for delta, trial in trials.items():
                row = {"scope": scope, "predictor": name, "seed": seed, "delta": delta}
                row |= {key: np.asarray(values).tolist() for key, values in trial.__dict__.items()}
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    return [row for row in rows if row["seed"] < draws]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the draws of one setting and delta."""
    guaranteed, kept, point = (
        np.array([row[k] for row in rows]) for k in ("guaranteed", "kept", "kept_point")
    )
    gain, gain_point = (np.array([row[k] for row in rows]) for k in ("gain", "gain_point"))
    counted = guaranteed.any(axis=1)
    complied = (kept | ~guaranteed).all(axis=1)[counted]
    large = guaranteed & (np.array([row["requests"] for row in rows]) >= LARGE)
    figures: dict[str, Any] = {
        "draws": len(rows),
        "counted": int(counted.sum()),
        "point": float(point.all(axis=1).mean()),
        "guaranteed": guaranteed.mean(axis=0).tolist(),
        "gain": float(gain.mean()),
        "gain_point": float(gain_point.mean()),
    }
    if counted.any():
        found = binomtest(int(complied.sum()), len(complied), 1 - rows[0]["delta"], alternative="less")
        both = binomtest(int(complied.sum()), len(complied), 0.5).proportion_ci(0.95, "exact")
        figures |= {"compliance": float(complied.mean()), "p": found.pvalue}
        figures |= {"low": both.low, "high": both.high}
    if large.any():
        ratio = gain[large] / gain_point[large]
        figures |= {"kept_gain": float(ratio.mean()), "kept_gain_least": float(ratio.min())}
    return figures


def real_rows(file: Path, damage: str, scope: str, predictor: str) -> tuple[SplitRows, np.ndarray]:
    """The requests of a run, fit and holdout together, and tau [C] from all of them. Raises InputError for no file."""
    if not file.exists():
        raise InputError(f"{file}: no such file; run `make run` first, or give --predictions none")
    frame = pd.read_parquet(file)
    names = [column.removeprefix("predicted_") for column in frame if str(column).startswith("predicted_")]
    names.sort(key=lambda name: int(name[1:]))
    values = frame[[f"{damage}_{name}" for name in names]].to_numpy(dtype=np.float64)
    strata = np.unique(frame["class"].to_numpy(dtype=str), return_inverse=True)[1]
    groups = strata if scope == "class" else np.zeros_like(strata)
    means = np.stack([values[groups == c].mean(axis=0) for c in range(int(groups.max()) + 1)])
    tau = means[:, -1] + VALUE * (means[:, -2] - means[:, -1])
    if predictor == "agnostic":
        features, penalty = np.ones((len(frame), 1)), np.zeros(1)
    else:
        signals = frame[list(SIGNALS)].to_numpy(dtype=np.float64)
        signals = signals if predictor == "signal" else signals[:, :0]
        features, penalty = standard_features(signals, strata, RIDGE)
    reward = np.array([4 / int(name[1:]) for name in names])
    return SplitRows(values, groups, strata, features, penalty, reward, len(names) - 1), tau


def law_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The known law's lines of Markdown."""
    lines = [
        "| budget | predictor | 1 − δ | compliance | exact 95 % | p (≥ 1 − δ) | counted | point estimate keeps | "
        "guaranteed by class | gain | point's gain | kept gain, n ≥ 200: mean, least |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for scope, name in SETTINGS:
        for delta in DELTAS:
            own = [r for r in rows if (r["scope"], r["predictor"], r["delta"]) == (scope, name, delta)]
            if not own:
                continue
            f = summary(own)
            known = "compliance" in f
            lines.append("| " + " | ".join([
                scope, name.replace("_", " "), f"{1 - delta:g}", f"{f['compliance']:.3f}" if known else "–",
                f"{f['low']:.3f} to {f['high']:.3f}" if known else "–", f"{f['p']:.2f}" if known else "–",
                f"{f['counted']} of {f['draws']}", f"{f['point']:.3f}",
                " ".join(f"{share:.2f}" for share in f["guaranteed"]), f"{f['gain']:.3f}", f"{f['gain_point']:.3f}",
                f"{f['kept_gain']:.2f}, {f['kept_gain_least']:.3f}" if "kept_gain" in f else "–",
            ]) + " |")  # fmt: skip
    return lines


def real_table(file: Path, splits: int) -> list[str]:
    """The real requests' lines of Markdown, for both kinds of damage."""
    lines = [
        "| damage | budget | predictor | 1 − δ | compliance | 95 % over requests | counted | point estimate keeps | "
        "gain | point's gain | kept gain: mean, least |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    settings = [
        (damage, *setting, delta) for damage in ("kl", "dnll") for setting in SETTINGS for delta in DELTAS
    ]
    for damage, scope, name, delta in track(settings, "real requests", len(settings)):
        rows, tau = real_rows(file, damage, scope, name)
        f = split_compliance(rows, tau, delta, splits, SPLIT_REPLICATES)
        known = "compliance" in f
        lines.append("| " + " | ".join([
            {"kl": "KL", "dnll": "ΔNLL"}[damage], scope, name.replace("_", " "), f"{1 - delta:g}",
            f"{f['compliance']:.3f}" if known else "–",
            f"{f['compliance_low']:.3f} to {f['compliance_high']:.3f}" if known else "–",
            f"{f['counted']} of {f['splits']}", f"{f['point']:.3f}", f"{f['gain']:.3f}", f"{f['gain_point']:.3f}",
            f"{f['kept_gain']:.2f}, {f['kept_gain_least']:.2f}" if known else "–",
        ]) + " |")  # fmt: skip
    return lines


def report(law: list[str], real: dict[str, list[str]]) -> str:
    """The whole of benchmarks/risk_control.md."""
    parts = [
        "# Whether promised budgets are kept",
        "Written by `python -m benchmarks.risk_control`, whose header says what the columns mean.",
    ]
    if law:
        parts += ["## A population of known law, independent draws", "\n".join(law)]
    for name, lines in real.items():
        parts += [f"## Real requests, split again and again: {name}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def main(
    draws: Annotated[int, typer.Option(min=0, help="of the known law, per setting")] = 1000,
    file: Annotated[Path, typer.Option(help="the draws so far, JSON lines")] = Path(".risk_control.jsonl"),
    predictions: Annotated[
        str, typer.Option(help="NAME=FILE of runs' predictions.parquet, commas between; or none")
    ] = "packaged=artifacts/fwp/predictions.parquet",
    splits: Annotated[int, typer.Option(min=1, help="of the real requests, per setting")] = 200,
    output: Annotated[Path, typer.Option(help="the report")] = OUTPUT,
) -> None:
    """Play, print the tables, write the report."""
    files = {}
    for pair in [] if predictions == "none" else predictions.split(","):
        name, equals, path = pair.partition("=")
        if not equals:
            raise InputError(
                f"--predictions has '{pair}': expected NAME=FILE, such as packaged=predictions.parquet"
            )
        files[name] = Path(path)
        real_rows(files[name], "kl", "overall", "agnostic")  # a bad file is said before the draws are played
    law = law_table(played(file, draws)) if draws else []
    text = report(law, {name: real_table(path, splits) for name, path in files.items()})
    print(text)
    with replacing_file(output) as path:
        path.write_text(text)


if __name__ == "__main__":
    run_step(main)
