"""Every policy on one window: allocated, rounded, and judged on true damage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tasks.routing.outcome import outcome
from tasks.routing.policies import Decision, policies
from tasks.routing.predictions import Window
from tasks.routing.problem import InfeasibleBudget
from tasks.routing.rounding import round_allocation

METHOD = "lp_fwp"
ORACLE = "true_loss"
PREDICTING = ("class_mean", "order_", METHOD)  # policies that tell requests apart before they are served


@dataclass(frozen=True)
class Comparison:
    """By policy name; a policy that cannot keep the budget on what it knows is in `infeasible` alone."""

    decisions: dict[str, Decision]
    choices: dict[str, np.ndarray]  # [R] int, index into the pool
    outcomes: dict[str, dict[str, Any]]  # of the choices; `expected` holds the mean over the rounding
    infeasible: dict[str, dict[str, Any]]  # class, least_reachable, tau


def compare(window: Window, damage: str, scope: Literal["overall", "class"], seed: int) -> Comparison:
    """Run every policy of the window's pool.

    Raises InfeasibleBudget if the method itself (`lp_fwp`) finds no allocation on the predicted damage; the
    baselines and the oracle are only listed.
    """
    evidence = window.evidence
    result = Comparison({}, {}, {}, {})

    def judged(x: np.ndarray) -> dict[str, Any]:
        return outcome(
            evidence.pool,
            x,
            window.true_damage,
            window.classes,
            window.class_names,
            window.tau,
            scope,
            damage,
        )

    for name, policy in policies(evidence.pool, evidence.guards).items():
        seen = replace(evidence, predicted=window.true_damage[damage]) if name == ORACLE else evidence
        try:
            decision = policy(seen)
        except InfeasibleBudget as error:
            if name == METHOD:
                raise
            row, least, tau = error.rows[0]
            result.infeasible[name] = {"class": row, "least_reachable": least, "tau": tau}
            continue
        choice = round_allocation(decision.x, evidence.classes, seed)
        expected = judged(decision.x)
        kept = ("multiplier", "multiplier_fixed_work", "dnll_mean", "kl_mean")
        result.decisions[name], result.choices[name] = decision, choice
        result.outcomes[name] = judged(np.eye(len(evidence.pool.instances))[choice])
        result.outcomes[name]["expected"] = {key: expected[key] for key in kept}
        result.outcomes[name]["predicted"] = name.startswith(PREDICTING)
        if name.endswith("_controlled"):
            guard = evidence.guards[name.removesuffix("_controlled")]
            result.outcomes[name]["guaranteed"] = float(guard.guaranteed[evidence.classes].mean())
    return result
