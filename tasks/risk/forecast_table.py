"""What score_prompts prints: the first prompts, a summary per instance, and what the numbers mean."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks.risk.forecast import Forecaster
from tasks.risk.predictor import CLASS_MEANS

SHOWN = 10  # prompts that are printed

MEANINGS = {
    "kl": "KL(reference || instance): how far the instance's next-token distribution is from the reference's",
    "dnll": "ΔNLL: the instance's loss less the reference's; below 0 the instance is better by chance",
}


@dataclass
class Totals:
    """Running figures over all prompts; nothing per prompt is kept but the first `SHOWN` rows."""

    instances: list[str]
    first: pd.DataFrame | None = None
    prompts: int = 0
    tokens: int = 0
    outside: int = 0
    short: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    added: dict[str, float] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, frame: pd.DataFrame, short: np.ndarray) -> None:
        """Add a window's rows."""
        if self.first is None:
            self.first = frame.head(SHOWN)
        self.prompts += len(frame)
        self.tokens += int(frame["prompt_tokens"].to_numpy().sum())
        self.outside += int(frame["outside"].to_numpy().sum())
        self.short += int(short.sum())
        for reasons in frame.loc[frame["outside"], "outside_reason"]:
            self.reasons.update(reasons.split("; "))
        for name in self.instances:
            values = frame[f"predicted_{name}"].to_numpy(dtype=np.float64)
            self.added[name] = self.added.get(name, 0.0) + float(values.sum())
            self.least[name] = min(self.least.get(name, np.inf), float(values.min()))
            self.largest[name] = max(self.largest.get(name, -np.inf), float(values.max()))


def show(totals: Totals, forecaster: Forecaster, notes: list[str], console: Console) -> None:
    """Print tables, counts and `notes`."""
    assert totals.first is not None
    of = f"first {len(totals.first)} of {totals.prompts} prompts" if totals.prompts > SHOWN else "prompts"
    table = Table(title=f"{of}: predicted damage [90 % interval]", title_justify="left")
    table.add_column("id", overflow="ellipsis", max_width=28, no_wrap=True)
    table.add_column("class", overflow="ellipsis", max_width=16, no_wrap=True)
    for column in ("tokens", "log FWP", *totals.instances):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unlike the fit requests")
    for row in totals.first.to_dict("records"):
        cells = [
            f"{row[f'predicted_{i}']:.3f} [{row[f'low_{i}']:.3f}, {row[f'high_{i}']:.3f}]"
            for i in totals.instances
        ]
        known = [
            escape(str(row["id"])),
            escape(row["class"]) or "–",
            str(row["prompt_tokens"]),
            f"{row['log_fwp']:.2f}",
        ]
        table.add_row(*known, *cells, escape(in_short(row["outside_reason"])))
    console.print(table)
    if totals.prompts > 1:
        summary = Table(title=f"all {totals.prompts} prompts", title_justify="left")
        for column in ("instance", "mean predicted", "least", "largest", "predictor"):
            summary.add_column(column, justify="left" if column == "predictor" else "right")
        for name in totals.instances:
            figures = totals.added[name] / totals.prompts, totals.least[name], totals.largest[name]
            predictor = forecaster.predictors[name].name.replace("_", " ")
            summary.add_row(name, *(f"{value:.3f}" for value in figures), predictor)
        console.print(summary)
    for line in [*meaning(totals, forecaster), *notes]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def in_short(reasons: str) -> str:
    """The first of several reasons, and how many more there are."""
    first, *others = reasons.split("; ")
    return f"{first}, {len(others)} more" if others else first


def meaning(totals: Totals, forecaster: Forecaster) -> list[str]:
    """What the numbers are, and what does not hold for all of them."""
    part = "a response to the prompt" if forecaster.scored == "response" else "the prompt itself"
    lines = [
        f"damage: nats per token over {part}, against the unquantized reference; {MEANINGS[forecaster.damage]}.",
        f"read off one prefill by {forecaster.scorer}; log FWP under the strength {forecaster.strength}. In brackets: "
        "where 90 % of the true values lay, out of fold, on the fit requests.",
    ]
    if all(predictor.name in CLASS_MEANS for predictor in forecaster.predictors.values()):
        lines.append(
            "predictor: class means, so prompts of one class have one prediction; metrics/fwp.json has what the other "
            "predictors are worth on holdout requests."
        )
    if totals.outside:
        reasons = ", ".join(f"{reason} {count}" for reason, count in totals.reasons.most_common(5))
        lines.append(
            f"{totals.outside} of {totals.prompts} prompts are unlike the fit requests, so their intervals do not hold "
            f"({reasons}): send them to the safest instance."
        )
    if totals.short:
        lines.append(
            f"{totals.short} of {totals.prompts} prompts have fewer than {forecaster.min_tokens} tokens, too few to "
            "say much: they have the mean of their class."
        )
    return lines
