"""The holdout figures of every predictor as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

# Shown with their intervals; the intervals of the others are in metrics/fwp.json.
INTERVALS = ("spearman", "spearman_within")


def show(metrics: dict[str, Any]) -> None:
    """Print the holdout table: 95 % intervals in brackets, the ceiling above each instance's predictors."""
    figures = ("spearman", "spearman_within", "auroc", "r2", "slope")
    title = f"holdout: predicted against true {metrics['damage']}, scorer {metrics['scorer']}"
    table = Table(title=title, title_justify="left")
    for column in ("instance", "predictor", *figures):
        table.add_column(column.replace("_", " "), no_wrap=True)
    for instance, result in metrics["holdout"].items():
        top, inside = result["ceiling"], result["ceiling"]["within"]
        limit = [
            f"{part['correlation']:.2f}" if part["measurable"] else "not measurable" for part in (top, inside)
        ]
        table.add_row(
            instance, "ceiling", *limit, "", f"{top['rho_star']:.2f}" if top["measurable"] else "", ""
        )
        for name, row in result["predictors"].items():
            table.add_row("", name, *(_cell(row, figure) for figure in figures))
        table.add_section()
    Console(width=None if Console().is_terminal else 110).print(table)


def _cell(row: dict[str, float], figure: str) -> str:
    if figure not in row:
        return "-"
    if figure not in INTERVALS or f"{figure}_low" not in row:
        return f"{row[figure]:.2f}"
    return f"{row[figure]:.2f} [{row[f'{figure}_low']:.2f}, {row[f'{figure}_high']:.2f}]"
