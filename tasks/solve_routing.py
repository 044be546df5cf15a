"""Route the holdout requests over the pool under a quality budget, by every policy, and judge on true damage.

In: artifacts/fwp/predictions.parquet (signals, predictions, true damage) and predictor.json. Out: artifacts/routing/
allocations.parquet (policy, id, instance: one whole instance per request) and routing.json (each policy's
rule, prices, certificate), and metrics/routing.json. Budgets, shares, thresholds and prices come from fit
requests and predictions; the true damage of holdout requests only judges, but for the oracle `true_loss`.
Policies named `_controlled` promise the budget with probability 1 - delta: their margins replay the whole game on
the fit requests (tasks/risk/control.py).
Cost: seconds; half a minute with many replicates.

The figures of a policy are those of its whole-request allocation, so allocations.parquet reproduces them;
`expected` holds the mean over the seeded rounding. If no allocation keeps the budget on the predicted damage,
the step fails: the method itself (`lp_fwp`) has no answer. Any other policy that cannot keep it is listed
under `infeasible` and has no figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from tasks.console import run_step
from tasks.contracts import InputError, read_json, replacing_folder, write_json
from tasks.params import SolveRouting, load_params
from tasks.reporting.tables import cell, filled_columns, policy_rows
from tasks.risk.control import ClassMargin
from tasks.risk.margins import FitDamage, margins, margins_json, refit_predictor
from tasks.routing.budget import make_pool
from tasks.routing.comparison import METHOD, Comparison, compare
from tasks.routing.policies import Guard
from tasks.routing.predictions import Window, make_window, read_predictions
from tasks.routing.problem import InfeasibleBudget
from tasks.routing.published import published_table

VERSION = 2


def run(
    predictions_file: Path,
    predictor_file: Path,
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
    found = _margins(window, frame, predictor_file, params)
    window = replace(window, evidence=replace(window.evidence, guards=_guards(found)))
    try:
        comparison = compare(window, damage, params.budget_scope, params.seed)
    except InfeasibleBudget as error:
        setting = f"solve_routing.budget is '{params.budget}' {params.budget_value:g} in {damage}"
        raise InputError(f"{error} ({setting})") from None
    metrics = _metrics(window, comparison, damage, params)
    if found:
        promised = margins_json(found, window.evidence.class_names)
        metrics["risk"] = {"delta": params.delta, "replicates": params.replicates, "policies": promised}
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


def _margins(
    window: Window, frame: pd.DataFrame, predictor_file: Path, params: SolveRouting
) -> dict[str, list[ClassMargin]]:
    """The margins of every policy that promises a budget; none where one instance leaves nothing to decide."""
    evidence = window.evidence
    pool = evidence.pool
    if len(pool.instances) == 1:
        return {}
    fit = frame.loc[frame["split"] == "fit"]
    known = FitDamage(
        damage=evidence.fit_damage,
        classes=np.searchsorted(window.class_names, fit["class"].to_numpy(dtype=str)),
        groups=evidence.fit_classes,
        fresh=np.bincount(window.classes, minlength=len(window.class_names)),
        tau=evidence.tau,
        reward=pool.multiplier,
        safest=int(pool.safest_first[0]),
    )
    refits = {
        "request_agnostic": known.agnostic_refit(),
        "class_mean": known.class_refit(),
        "lp_fwp": refit_predictor(read_json(predictor_file), fit, pool.instances, evidence.fit_damage),
    }
    return margins(known, refits, params.delta, params.replicates, params.folds, params.seed)


def _guards(found: dict[str, list[ClassMargin]]) -> dict[str, Guard]:
    return {
        name: Guard(np.array([own.margin for own in classes]), np.array([own.guaranteed for own in classes]))
        for name, classes in found.items()
    }


def _metrics(window: Window, comparison: Comparison, damage: str, params: SolveRouting) -> dict[str, Any]:
    evidence = window.evidence
    pool = evidence.pool
    tau = {kind: dict(zip(evidence.class_names, t.tolist(), strict=True)) for kind, t in window.tau.items()}
    metrics = {
        "mode": "serve_all",
        "reward": params.reward,
        "damage": damage,
        "baseline": pool.instances[pool.baseline],  # multipliers are relative to this instance
        "requests": {
            "fit": len(evidence.fit_classes),
            "holdout": len(evidence.ids),
            "outside": int(
                evidence.outside.sum()
            ),  # of holdout: unlike any fit request, on the safest instance
        },
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
        Path("artifacts/fwp/predictor.json"),
        params.quantize_instances.names,
        params.calibrate_fwp.damage,
        params.solve_routing,
        Path("artifacts/routing"),
        Path("metrics/routing.json"),
    )
    show(metrics)


if __name__ == "__main__":
    run_step(main)
