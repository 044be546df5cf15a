"""Route the holdout requests over the pool under a quality budget, by every policy, and judge on true damage.

In: artifacts/fwp/predictions.parquet (signals, predictions, true damage). Out: artifacts/routing/
allocations.parquet (policy, id, instance: one whole instance per request) and routing.json (each policy's
rule, prices, certificate), and metrics/routing.json. Budgets, shares, thresholds and prices come from fit
requests and predictions; the true damage of holdout requests only judges, but for the oracle `true_loss`.
Cost: seconds.

The figures of a policy are those of its whole-request allocation, so allocations.parquet reproduces them;
`expected` holds the mean over the seeded rounding. If no allocation keeps the budget on the predicted damage,
the step fails: the method itself (`lp_fwp`) has no answer. Any other policy that cannot keep it is listed
under `infeasible` and has no figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from tasks.console import run_step
from tasks.contracts import InputError, replacing_folder, write_json
from tasks.params import SolveRouting, load_params
from tasks.reporting.tables import cell, filled_columns, policy_rows
from tasks.routing.budget import make_pool
from tasks.routing.comparison import METHOD, Comparison, compare
from tasks.routing.predictions import Window, make_window, read_predictions
from tasks.routing.problem import InfeasibleBudget
from tasks.routing.published import published_table

VERSION = 1


def run(
    predictions_file: Path,
    instances: list[str],
    damage: Literal["kl", "dnll"],
    params: SolveRouting,
    output_folder: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Run every policy; write the allocations, rules and metrics, and return the metrics.

    Raises InputError for unusable predictions or pool, and for a budget that the predicted damage cannot
    keep.
    """
    pool = make_pool(instances, params.reward)
    frame = read_predictions(predictions_file, instances)
    window = make_window(frame, pool, damage, params.budget, params.budget_value, params.budget_scope)
    try:
        comparison = compare(window, damage, params.budget_scope, params.seed)
    except InfeasibleBudget as error:
        setting = f"solve_routing.budget is '{params.budget}' {params.budget_value:g} in {damage}"
        raise InputError(f"{error} ({setting})") from None
    metrics = _metrics(window, comparison, damage, params)
    names = np.array(pool.instances, dtype=object)
    allocations = [
        pd.DataFrame({"policy": name, "id": window.evidence.ids, "instance": names[choice]})
        for name, choice in comparison.choices.items()
    ]
    with replacing_folder(output_folder) as folder:
        pd.concat(allocations, ignore_index=True).to_parquet(folder / "allocations.parquet", index=False)
        rules = {"policies": _rules(comparison), "version": VERSION}
        write_json(folder / "routing.json", rules, digits=17)
    write_json(metrics_file, metrics)
    return metrics


def _metrics(window: Window, comparison: Comparison, damage: str, params: SolveRouting) -> dict[str, Any]:
    evidence = window.evidence
    pool = evidence.pool
    tau = {kind: dict(zip(evidence.class_names, t.tolist(), strict=True)) for kind, t in window.tau.items()}
    metrics = {
        "mode": "serve_all",
        "reward": params.reward,
        "damage": damage,
        "baseline": pool.instances[pool.baseline],  # multipliers are relative to this instance
        "requests": {"fit": len(evidence.fit_classes), "holdout": len(evidence.ids)},
        "budget": {
            "kind": params.budget,
            "value": params.budget_value,
            "scope": params.budget_scope,
            "tau": tau[damage],
            "tau_dnll": tau["dnll"],
        },
        "policies": comparison.outcomes,
        "infeasible": comparison.infeasible,
        "published": published_table(comparison.outcomes, pool.instances, params.reward),
        "version": VERSION,
    }
    method = comparison.decisions.get(METHOD)
    if method is not None and method.solution is not None:
        metrics["prices"] = method.rule["quality_prices"]
        metrics["certificate"] = method.solution.certificate.as_json()
    return metrics


def _rules(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Each policy's rule, and the certificate of those that solved the window LP."""
    return {
        name: {"rule": d.rule} | ({"certificate": d.solution.certificate.as_json()} if d.solution else {})
        for name, d in comparison.decisions.items()
    }


def show(metrics: dict[str, Any]) -> None:
    """Print the policies on true holdout damage, from the slowest to the fastest."""
    budget = metrics["budget"]
    tau = ", ".join(f"{name} {value:.4f}" for name, value in budget["tau"].items())
    setting = f"budget {budget['kind']} {budget['value']:g}, tau in {metrics['damage']}"
    title = f"request routing, holdout; {setting}: {tau}"
    table = Table(title=title, title_justify="left")
    rows = policy_rows({"routing": metrics})
    columns = filled_columns(rows)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*(cell(column, row.get(column)) for column in columns))
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    console.print(f"multipliers are relative to {metrics['baseline']}; arithmetic, not measured speed")
    for name, why in metrics["infeasible"].items():
        least = f"reaches {why['least_reachable']:.4f} at least, tau is {why['tau']:.4f}"
        console.print(f"{name} is infeasible: class '{why['class']}' {least}")


def main() -> None:
    params = load_params()
    metrics = run(
        Path("artifacts/fwp/predictions.parquet"),
        params.quantize_instances.names,
        params.calibrate_fwp.damage,
        params.solve_routing,
        Path("artifacts/routing"),
        Path("metrics/routing.json"),
    )
    show(metrics)


if __name__ == "__main__":
    run_step(main)
