"""What a policy really does to the requests that it routed: true damage, reward, budget kept or not."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tasks.routing.budget import Pool


def outcome(
    pool: Pool,
    x: np.ndarray,
    damages: dict[str, np.ndarray],
    classes: np.ndarray,
    class_names: tuple[str, ...],
    budgets: dict[str, np.ndarray],
    scope: Literal["overall", "class"],
    budgeted: str,
) -> dict[str, Any]:
    """The outcome of shares x [R, I] (whole or fractional) on true damages {"dnll": [R, I], "kl": [R, I]}.

    `classes` [R] index `class_names`. `budgets` holds tau in nats per damage kind, [1] over all requests or
    [C] by class, estimated beforehand; `budgeted` is the kind that the budget is about. The keys:

    multiplier             mean reward / reward of the baseline (W4, or the widest instance)
    multiplier_fixed_work  baseline seconds / seconds for the same requests, 1 / mean of (1 / reward): the
                           speed-up of one device that serves them in turn; never above the multiplier
    <kind>_mean            nats per scored token, over requests
    budget_kept            every budget of the scope kept by the budgeted kind
    budget_kept_dnll       the same in ΔNLL, under the budget made by the same rule from ΔNLL
    classes                {class: {requests, <kind>_mean, tau, kept}}; under scope overall tau is the one of
                           all requests, and budget_kept does not depend on the class's `kept`
    """
    speed = pool.multiplier
    requests = len(x)
    realised = {kind: (damage * x).sum(axis=1) for kind, damage in damages.items()}  # [R]
    kept = {kind: keeps(float(damage.mean()), float(budgets[kind][0])) for kind, damage in realised.items()}
    if scope == "class":
        kept = dict.fromkeys(realised, True)
    by_class: dict[str, dict[str, Any]] = {}
    for c, name in enumerate(class_names):
        rows = classes == c
        if not rows.any():
            continue
        means = {kind: float(damage[rows].mean()) for kind, damage in realised.items()}
        tau = {kind: float(values[c if scope == "class" else 0]) for kind, values in budgets.items()}
        if scope == "class":
            kept = {kind: kept[kind] and keeps(means[kind], tau[kind]) for kind in kept}
        by_class[name] = {f"{kind}_mean": mean for kind, mean in means.items()}
        by_class[name] |= {"requests": int(rows.sum()), "tau": tau[budgeted]}
        by_class[name]["kept"] = keeps(means[budgeted], tau[budgeted])
    return {
        "multiplier": float((x @ speed).sum() / requests),
        "multiplier_fixed_work": float(requests / (x @ (1.0 / speed)).sum()),
        "shares": dict(zip(pool.instances, (x.sum(axis=0) / requests).tolist(), strict=True)),
        **{f"{kind}_mean": float(damage.mean()) for kind, damage in realised.items()},
        "budget_kept": kept[budgeted],
        "budget_kept_dnll": kept["dnll"],
        "classes": by_class,
    }


def keeps(mean: float, tau: float) -> bool:
    """Whether a mean damage keeps tau, up to the rounding error of the mean."""
    return mean <= tau + 1e-9 * max(abs(tau), abs(mean))
