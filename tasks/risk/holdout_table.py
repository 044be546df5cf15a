"""The holdout figures of every predictor as a table in the terminal, and what many splits say of them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

# Shown with their intervals; the intervals of the others are in metrics/fwp.json.
INTERVALS = ("spearman", "spearman_within", "within_gain", "r2_gain")
ONCE = ("spearman", "spearman_within", "auroc", "r2", "slope")
# within_gain is spearman_within, 0 in a split where the predictor orders nothing inside a class
AGAIN = ("spearman", "within_gain", "r2", "r2_gain")


def show(metrics: dict[str, Any]) -> None:
    """Print the holdout table, the table over splits, and a sentence an instance: what beats the class mean there."""
    console = Console(width=None if Console().is_terminal else 130)
    of = f"predicted against true {metrics['damage']}, scorer {metrics['scorer']}"
    console.print(_table(f"holdout: {of}", metrics["holdout"], ONCE))
    splits = metrics["splits"]
    target = f"{metrics['damage']}_{metrics['scored']}"
    title = f"{splits['count']} halvings of all requests: {of}; mean, and 95 % of the splits"
    console.print(_table(title, splits["targets"][target], AGAIN))
    for name, sentence in split_verdicts(metrics).items():
        console.print(f"{name}: {sentence}")
    drift = metrics["drift"]["holdout"]
    share = f"{drift['outside']} of {drift['requests']} holdout requests are unlike the fit requests"
    console.print(f"drift: {share}; chance alone flags at most {metrics['drift']['chance_at_most']:.0%}")


def split_verdicts(metrics: dict[str, Any]) -> dict[str, str]:
    """instance -> what was chosen, and whether anything beats the class mean within classes over the splits."""
    beats = metrics["splits"]["beats"][f"{metrics['damage']}_{metrics['scored']}"]
    verdicts = {}
    for name, names in beats.items():
        chosen = metrics["chosen"][name]["name"]
        found = (
            f"beats the class mean within classes: {', '.join(names)}"
            if names
            else f"nothing beats the class mean within classes on {name}"
        )
        verdicts[name] = f"{found}; in use: {chosen}"
    return verdicts


def _table(title: str, results: dict[str, Any], figures: tuple[str, ...]) -> Table:
    """95 % intervals in brackets, the ceiling above each instance's predictors."""
    table = Table(title=title, title_justify="left")
    for column in ("instance", "predictor", *figures):
        table.add_column(column.replace("_", " "), no_wrap=True)
    for instance, result in results.items():
        table.add_row(instance, "ceiling", *(_limit(result["ceiling"], figure) for figure in figures))
        for name, row in result["predictors"].items():
            table.add_row("", name, *(_cell(row, figure) for figure in figures))
        table.add_section()
    return table


def _limit(ceiling: dict[str, Any], figure: str) -> str:
    """The best that any predictor could reach (tasks/risk/damage.py)."""
    if figure not in ("spearman", "spearman_within", "within_gain", "r2"):
        return ""
    own = ceiling["within"] if "within" in figure else ceiling
    if not own["measurable"]:
        return "not measurable"
    return f"{own['rho_star' if figure == 'r2' else 'correlation']:.2f}"


def _cell(row: dict[str, float], figure: str) -> str:
    if figure not in row:
        return "-"
    if figure not in INTERVALS or f"{figure}_low" not in row:
        return f"{row[figure]:.2f}"
    return f"{row[figure]:.2f} [{row[f'{figure}_low']:.2f}, {row[f'{figure}_high']:.2f}]"
