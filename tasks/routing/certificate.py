"""Proof that an allocation is optimal, recomputed from (x, alpha, beta) alone; no solver is trusted.

Weak duality gives, for any alpha, beta >= 0, an upper bound on every allocation's reward:

    s[r, i] = reward[r, i] - alpha[c] q[r] (damage[r, i] - tau[c]) - beta[i] seconds[r, i]
    dual    = sum_r max_i s[r, i] + sum_i beta[i] window_s replicas[i]        (max with 0 in mode throughput)

A feasible x whose reward equals the bound is optimal. Rows are scaled to a largest coefficient of 1, and
rewards to a largest magnitude of 1, so that the tolerance means the same at any unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.routing.problem import FEASIBILITY, WindowProblem

RELATIVE_GAP = 1e-9


@dataclass(frozen=True)
class Certificate:
    """The errors of a claimed optimum; `primal` and `dual` in units of reward, the rest relative to scaled
    rows.
    """

    primal: float  # the allocation's reward
    dual: float  # the bound on every allocation's reward
    relative_gap: float  # |dual - primal| / max(1, |primal|), rewards scaled to a largest magnitude of 1
    primal_violation: float  # worst of: -x, |sum_i x - 1|, quality and capacity rows
    dual_violation: float  # worst of: -alpha, -beta, scaled as the rows
    slackness: float  # sum of price x slack, and of x below the best reduced reward, relative as the gap

    @property
    def holds(self) -> bool:
        errors = (self.relative_gap, self.slackness)
        violations = (self.primal_violation, self.dual_violation)
        return bool(max(errors) <= RELATIVE_GAP and max(violations) <= FEASIBILITY)

    def as_json(self) -> dict[str, float | bool]:
        return {**self.__dict__, "holds": self.holds}


def reduced_reward(problem: WindowProblem, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """[R, I] the signed reward after prices; each request takes the instance of its largest."""
    reduced = problem.reward - alpha[problem.classes][:, None] * problem.quality
    if problem.seconds is not None:
        reduced = reduced - beta[None, :] * problem.seconds
    return reduced


def certify(problem: WindowProblem, x: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> Certificate:
    """Check x [R, I] against the prices alpha [C], beta [I]; beta is zero where there are no capacity
    rows.
    """
    x, alpha, beta = (np.asarray(values, dtype=np.float64) for values in (x, alpha, beta))
    unit = float(np.abs(problem.reward).max()) or 1.0
    scale = problem.quality_scale()
    served = x.sum(axis=1)
    quality_use = problem.class_sums((problem.quality * x).sum(axis=1))
    violations = [float((-x).max()), float((quality_use / scale).max())]
    row_error = np.abs(served - 1.0) if problem.mode == "serve_all" else served - 1.0
    violations.append(float(row_error.max()))
    slack_cost = float(np.abs(alpha * quality_use).sum())
    dual_signs = [float((-alpha * scale).max()) / unit, 0.0]

    reduced = reduced_reward(problem, alpha, beta)
    best = reduced.max(axis=1)
    if problem.mode == "throughput":
        best = np.maximum(best, 0.0)
    dual = float(best.sum())
    capacity = problem.capacity
    if problem.seconds is not None and capacity is not None:
        second = problem.seconds.max(axis=0)
        second = np.where(second > 0, second, 1.0)
        over = (problem.seconds * x).sum(axis=0) - capacity
        violations.append(float((over / second).max()))
        slack_cost += float(np.abs(beta * over).sum())
        dual_signs.append(float((-beta * second).max()) / unit)
        dual += float(beta @ capacity)

    primal = float((problem.reward * x).sum())
    regret = float(np.abs(best - (reduced * x).sum(axis=1)).sum())
    size = max(1.0, abs(primal) / unit)
    return Certificate(
        primal=primal,
        dual=dual,
        relative_gap=abs(dual - primal) / unit / size,
        primal_violation=max(0.0, *violations),
        dual_violation=max(0.0, *dual_signs),
        slackness=(slack_cost + regret) / unit / size,
    )
