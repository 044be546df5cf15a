"""`python -m flows.results`: the result tables in the terminal, and where to go on from there.

Light on purpose: `make run` ends with it, also when nothing changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tasks.params import load_params
from tasks.reporting import tables

NEXT = """\
Report        artifacts/report/report.html
Comparison    make ui                      (MLflow: every instance, variant and policy side by side)
Change        edit params.yaml, then make run; or
              .venv/bin/dvc exp run -S 'quantize_instances.bits=[2,4]'
              make plan first says what would run and for how long"""


def main() -> None:
    """Print the tables of metrics/; exit status 1 where there are none."""
    metrics = tables.read_metrics("metrics", models=load_params().model_names)
    if not metrics:
        sys.exit("results: error: metrics/ is empty; run the pipeline first: make run")
    # Off a terminal (a log, a pipe) rich would fold everything to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    for title, rows in [
        ("Instances", tables.instance_rows(metrics)),
        ("Variants", tables.variant_rows(metrics)),
        ("Request-routing policies, on true holdout damage", tables.policy_rows(metrics)),
    ]:
        console.print(_table(title, rows) if rows else f"[bold]{title}[/bold]: –")
        console.print()
    if execution := metrics.get("throughput", {}).get("execution"):
        console.print(f"Speed         {execution}", soft_wrap=True)
    report = Path("artifacts/report/report.html")
    console.print(NEXT if report.exists() else NEXT.replace(str(report), "not written yet"), soft_wrap=True)


def _table(title: str, rows: list[tables.Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(tables.cell(column, value) for column, value in row.items()))
    return table


if __name__ == "__main__":
    main()
