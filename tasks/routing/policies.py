"""Request-routing policies behind one interface: what may be known before a request is served -> its shares.

A policy sees the fit requests with their true damage, and of the requests to route only what the scorer's
prefill gave: signals and predictions. Only `true_loss` is handed the true damage, in place of the
predictions, as an oracle. All come from arXiv 2609.12550 and its baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog

from tasks.routing.budget import Pool
from tasks.routing.problem import InfeasibleBudget, WindowProblem
from tasks.routing.rounding import round_down
from tasks.routing.solve import Solution, solve_window

# Signals of the scorer's prefill that order requests, by the policy that does so.
ORDERS = {
    "order_length": "log_length",
    "order_routing_frequency": "routing_frequency",
    "order_ppl": "log_ppl",
    "order_fwp": "log_fwp",
}


@dataclass(frozen=True)
class Guard:
    """What keeps a budget with probability 1 - delta (`tasks/risk/control.py`), per budget class."""

    margin: np.ndarray  # [C] nats, taken off tau
    guaranteed: np.ndarray  # [C] bool; where False every request of the class goes to the safest instance


@dataclass(frozen=True)
class Evidence:
    """What a policy may see: F fit requests, R requests to route, I instances, C budget classes."""

    pool: Pool
    class_names: tuple[str, ...]  # [C] budget classes; one, "overall", where the budget is
    tau: np.ndarray  # [C] nats
    fit_classes: np.ndarray  # [F] int
    fit_damage: np.ndarray  # [F, I] true damage
    fit_signals: dict[str, np.ndarray]  # name -> [F]
    ids: tuple[str, ...]  # [R]
    classes: np.ndarray  # [R] int
    signals: dict[str, np.ndarray]  # name -> [R]
    predicted: np.ndarray  # [R, I] damage predicted from FWP
    class_mean: np.ndarray  # [R, I] the fit mean of the request's class
    outside: (
        np.ndarray
    )  # [R] bool, signals unlike any fit request's: what predicts goes to the safest instance
    guards: dict[str, Guard]  # by the policy that it guards

    @property
    def fit_means(self) -> np.ndarray:
        """[C, I] mean fit damage of each budget class."""
        return class_means(self.fit_damage, self.fit_classes, len(self.class_names))


@dataclass(frozen=True)
class Decision:
    """Shares of every request, and the rule that gave them in a form that JSON can carry."""

    x: np.ndarray  # [R, I] rows sum to 1
    rule: dict[str, Any] = field(default_factory=dict)
    solution: Solution | None = None  # of policies that solve the window LP


Policy = Callable[[Evidence], Decision]


def class_means(damage: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    """Means [C, I] of damage [F, I] within classes [F], 0 for a class without requests; C is `count`."""
    sums = np.stack([np.bincount(classes, weights=column, minlength=count) for column in damage.T], axis=1)
    return sums / np.maximum(np.bincount(classes, minlength=count), 1)[:, None]


def best_mix(reward: np.ndarray, means: np.ndarray, tau: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The share vector [I] of largest mean reward whose mean damage keeps every tau: means [C, I], tau [C].

    Raises InfeasibleBudget naming the class that misses its tau by most under its least damaging instance.
    """
    count = len(reward)
    scale = max(float(np.abs(means).max()), float(np.abs(tau).max())) or 1.0
    rows = (means - tau[:, None]) / scale
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    unit = np.abs(reward).max()
    equal = np.ones((1, count))
    result = linprog(
        -reward / unit, rows, np.zeros(len(tau)), equal, [1.0], (0, None), "highs-ds", options=options
    )
    if result.status == 2:
        worst = int(np.argmax(means.min(axis=1) - tau))
        least = float(means[worst].min())
        raise InfeasibleBudget(
            f"no one mix of instances keeps every budget: class '{names[worst]}' reaches a mean damage of "
            f"{least:.6g} at least on fit requests, tau is {tau[worst]:.6g}",
            [(names[worst], least, float(tau[worst]))],
        )
    if result.status != 0:
        raise ArithmeticError(f"HiGHS stopped with status {result.status}: {result.message}")
    shares = np.where(result.x > 1e-12, result.x, 0.0)
    return shares / shares.sum()


def static(instance: str) -> Policy:
    """Every request on one instance, budget or not."""

    def policy(evidence: Evidence) -> Decision:
        shares = np.array([1.0 if name == instance else 0.0 for name in evidence.pool.instances])
        return _shared(evidence, shares)

    return policy


def capacity_proportional(evidence: Evidence) -> Decision:
    """Shares proportional to speed, budget or not: what a load balancer blind to quality does."""
    return _shared(evidence, evidence.pool.reward / evidence.pool.reward.sum())


def request_agnostic(evidence: Evidence) -> Decision:
    """One share vector for all requests, the best that keeps tau on the fit means."""
    pool = evidence.pool
    return _shared(evidence, best_mix(pool.reward, evidence.fit_means, evidence.tau, evidence.class_names))


def class_mean(evidence: Evidence) -> Decision:
    """The window LP on the fit mean of each request's class: all requests of a class tie and share alike."""
    return _window(evidence, evidence.class_mean)


def lp_fwp(evidence: Evidence) -> Decision:
    """The window LP on the damage predicted from FWP: the method."""
    return _window(evidence, evidence.predicted, evidence.outside)


def controlled(name: str) -> Policy:
    """The window LP at tau - margin: the budget is kept with probability 1 - delta, not every other time.

    `name`: whose guard it is and so what it knows of a request: `lp_fwp` its prediction, `class_mean` its class,
    `request_agnostic` nothing, all requests of a budget then being alike.
    """

    def policy(evidence: Evidence) -> Decision:
        guard = evidence.guards[name]
        if name == "lp_fwp":
            damage, outside = evidence.predicted, evidence.outside
        else:
            known = evidence.class_mean if name == "class_mean" else evidence.fit_means[evidence.classes]
            damage, outside = known, np.zeros(len(known), dtype=bool)
        safe = np.eye(damage.shape[1])[evidence.pool.safest_first[0]]
        x = np.tile(safe, (len(damage), 1))
        tau = np.where(guard.guaranteed, evidence.tau - guard.margin, evidence.tau)
        least = class_means(damage.min(axis=1)[:, None], evidence.classes, len(tau))[:, 0]
        routed = guard.guaranteed & (least <= tau)  # a budget out of reach: as safe as can be
        served = np.flatnonzero(routed[evidence.classes])
        rule: dict[str, Any] = {
            "margin": dict(zip(evidence.class_names, guard.margin.tolist(), strict=True)),
            "routed": [name for name, yes in zip(evidence.class_names, routed, strict=True) if yes],
        }
        if not served.size:
            return Decision(x, rule)
        found = _window(replace(evidence, tau=tau), damage, outside, served)
        x[served] = found.x
        return Decision(x, rule | found.rule, found.solution)

    return policy


def true_loss(evidence: Evidence) -> Decision:
    """The oracle: the window LP on true damage, handed over as `predicted`.

    Its fractions are rounded down, so that whole requests keep the budget, at most a request or two per
    budget short of the best. It also picks the noise of each measurement: a bound, not a rival.
    """
    decision = _window(evidence, evidence.predicted)
    choice = round_down(decision.x, evidence.classes, evidence.predicted)
    return Decision(np.eye(decision.x.shape[1])[choice], decision.rule, decision.solution)


def ordered(signal: str) -> Policy:
    """Order requests by a signal; the longest prefix whose estimated damage keeps tau gets the lower width.

    Per budget class, from fit requests alone:
    - the two widths are those of the class's best mix of fit means (`best_mix`; one row, so two at most): W3
      and W4 in the paper. Where the budget lets all go to one instance, all go there;
    - the direction is the sign of the signal's rank correlation with the extra damage of the lower width, so
      that every signal starts with the requests that it calls safe (rising where there is no correlation);
    - the threshold lies half-way behind the longest prefix of the fit requests whose mean true damage, with
      the rest on the higher width, is at most tau; equal signals stay together.
    A request is then routed by its own signal and the threshold, as an online router would.
    """

    def policy(evidence: Evidence) -> Decision:
        pool, means = evidence.pool, evidence.fit_means
        x = np.zeros((len(evidence.ids), len(pool.instances)))
        rule = {}
        for c, name in enumerate(evidence.class_names):
            row = slice(c, c + 1)
            mix = best_mix(pool.reward, means[row], evidence.tau[row], (name,))
            pair = sorted(np.flatnonzero(mix), key=lambda i: -pool.reward[i])
            routed = np.flatnonzero(evidence.classes == c)
            if len(pair) == 1:
                x[routed, pair[0]] = 1.0
                rule[name] = {"all": pool.instances[pair[0]]}
                continue
            lower, higher = (int(i) for i in pair)
            fit = evidence.fit_classes == c
            damage, key = evidence.fit_damage[fit], evidence.fit_signals[signal][fit]
            sign = _direction(key, damage[:, lower] - damage[:, higher])
            threshold = _threshold(sign * key, damage[:, lower], damage[:, higher], float(evidence.tau[c]))
            low = sign * evidence.signals[signal][routed] < threshold
            x[routed, np.where(low, lower, higher)] = 1.0
            rule[name] = {"signal": signal, "direction": "rising" if sign > 0 else "falling",
                          "lower": pool.instances[lower], "higher": pool.instances[higher]}  # fmt: skip
            if np.isfinite(threshold):
                rule[name]["threshold"] = sign * threshold
            else:
                rule[name]["all"] = pool.instances[lower if threshold > 0 else higher]
        return Decision(x, {"order": rule})

    return policy


def policies(pool: Pool, guarded: Iterable[str] = ()) -> dict[str, Policy]:
    """Every policy by name, and those in `guarded` under their guarantee too. A pool of one instance leaves
    nothing to decide: static alone."""
    named: dict[str, Policy] = {f"static_{name}": static(name) for name in pool.instances}
    if len(pool.instances) == 1:
        return named
    named |= {"capacity_proportional": capacity_proportional, "request_agnostic": request_agnostic}
    named |= {"class_mean": class_mean}
    named |= {name: ordered(signal) for name, signal in ORDERS.items()}
    named |= {f"{name}_controlled": controlled(name) for name in guarded}
    return named | {"lp_fwp": lp_fwp, "true_loss": true_loss}


def _shared(evidence: Evidence, shares: np.ndarray) -> Decision:
    """The same shares for every request."""
    rule = {"shares": dict(zip(evidence.pool.instances, shares.tolist(), strict=True))}
    return Decision(np.tile(shares, (len(evidence.ids), 1)), rule)


def _window(
    evidence: Evidence,
    damage: np.ndarray,
    outside: np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> Decision:
    """The window LP of the requests `rows`, by default all; those `outside` [R] stay on the safest instance."""
    problem = window_problem(evidence, damage)
    if outside is not None and outside.any():
        safest = evidence.pool.safest_first[0]
        reward, damage = problem.reward.copy(), damage.copy()
        # one choice, offered I times: the budget counts it, and nothing is gained by another
        reward[outside], damage[outside] = reward[outside][:, [safest]], damage[outside][:, [safest]]
        problem = replace(problem, reward=reward, damage=damage)
    if rows is not None:
        problem = replace(
            problem,
            ids=tuple(problem.ids[row] for row in rows),
            **{name: getattr(problem, name)[rows] for name in ("classes", "reward", "damage", "q")},
        )
    solution = solve_window(problem)
    if outside is not None and outside.any():
        there = outside if rows is None else outside[rows]
        x = solution.x.copy()
        x[there] = np.eye(x.shape[1])[evidence.pool.safest_first[0]]
        solution = replace(solution, x=x)
    prices = dict(zip(evidence.class_names, solution.alpha.tolist(), strict=True))
    return Decision(solution.x, {"quality_prices": prices}, solution)


def window_problem(evidence: Evidence, damage: np.ndarray) -> WindowProblem:
    """The window LP of the requests to route under damage [R, I], rewards relative to the baseline."""
    return WindowProblem(
        ids=evidence.ids,
        instances=evidence.pool.instances,
        class_names=evidence.class_names,
        classes=evidence.classes,
        reward=np.tile(evidence.pool.multiplier, (len(evidence.ids), 1)),
        damage=damage,
        tau=evidence.tau,
        q=np.ones(len(evidence.ids)),
    )


def _direction(signal: np.ndarray, extra: np.ndarray) -> float:
    """+1 if the requests of low signal suffer less from the lower width (or nothing is known), else -1."""
    rank, extra_rank = (np.unique(values, return_inverse=True)[1] for values in (signal, extra))
    return -1.0 if float((rank - rank.mean()) @ extra_rank) < 0 else 1.0


def _threshold(key: np.ndarray, low: np.ndarray, high: np.ndarray, tau: float) -> float:
    """The key below which requests take the lower width; -inf for none, inf for all. All arrays [F]."""
    order = np.argsort(key, kind="stable")
    key, extra = key[order], (low - high)[order]
    mean = (high.sum() + np.concatenate([[0.0], np.cumsum(extra)])) / len(key)  # [F + 1], by prefix length
    edge = np.concatenate([[True], key[1:] > key[:-1], [True]])  # prefixes that part no equal keys
    kept = np.flatnonzero(edge & (mean <= tau + 1e-12 * (1 + abs(tau))))
    longest = int(kept.max()) if kept.size else 0
    if longest in (0, len(key)):
        return -np.inf if longest == 0 else np.inf
    return float((key[longest - 1] + key[longest]) / 2)
