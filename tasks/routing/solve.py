"""The plain solver of the window LP: HiGHS through scipy, prices with the right sign, always certified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.optimize import OptimizeResult, linprog

from tasks.routing.certificate import Certificate, certify
from tasks.routing.problem import FEASIBILITY, InfeasibleBudget, WindowProblem

# HiGHS' default of 1e-7 is not enough for a relative gap of 1e-9; 1e-10 is the smallest that it accepts.
_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
_SIMPLEX_UP_TO = 2000  # requests; above, interior point with crossover is faster by an order of magnitude


@dataclass(frozen=True)
class Solution:
    """An optimal allocation. Requests that are alike in every coefficient get equal shares."""

    x: np.ndarray  # [R, I] shares
    alpha: np.ndarray  # [C] reward gained per unit of quality budget, >= 0
    beta: np.ndarray  # [I] reward gained per device second, >= 0; zero without capacity rows
    certificate: Certificate


def solve_window(problem: WindowProblem) -> Solution:
    """Solve the window LP exactly.

    Raises InfeasibleBudget naming the classes (or, with capacities, the rows) that no allocation can keep,
    and ArithmeticError if the result cannot be certified, which would be a bug.
    """
    problem.require_reachable()
    rows, limits, row_scale = _coupling_rows(problem)
    unit = float(np.abs(problem.reward).max()) or 1.0
    result = _linprog(problem, -(problem.reward / unit).ravel(), rows, limits)
    if result.status == 2:
        raise _blame(problem, rows, limits, row_scale)
    if result.status != 0:
        raise ArithmeticError(f"HiGHS stopped with status {result.status}: {result.message}")

    # The one place where signs flip: scipy minimises, so the marginals of its <= rows are <= 0.
    price = np.maximum(-result.ineqlin.marginals[: len(limits)], 0.0) * unit / row_scale
    alpha = price[: len(problem.class_names)]
    beta = price[len(alpha) :] if problem.seconds is not None else np.zeros(len(problem.instances))
    x = _split_ties(problem, _clean(problem, result.x.reshape(problem.reward.shape)))
    certificate = certify(problem, x, alpha, beta)
    if not certificate.holds:
        raise ArithmeticError(f"the allocation cannot be certified as optimal: {certificate}")
    return Solution(x, alpha, beta, certificate)


def _coupling_rows(problem: WindowProblem) -> tuple[sp.csr_array, np.ndarray, np.ndarray]:
    """Quality rows, then capacity rows: matrix [K, R I], limits [K], and what each was divided by [K]."""
    requests, instances = problem.reward.shape
    column = np.arange(requests * instances)
    scale = problem.quality_scale()
    row = np.repeat(problem.classes, instances)
    shape = (len(problem.class_names), requests * instances)
    matrix = sp.csr_array((problem.quality.ravel() / scale[row], (row, column)), shape=shape)
    limits = np.zeros(len(scale))
    capacity = problem.capacity
    if problem.seconds is None or capacity is None:
        return matrix, limits, scale
    second = problem.seconds.max(axis=0)
    second = np.where(second > 0, second, 1.0)
    row = np.tile(np.arange(instances), requests)
    data = (problem.seconds / second).ravel()
    seconds = sp.csr_array((data, (row, column)), shape=(instances, requests * instances))
    matrix = sp.csr_array(sp.vstack([matrix, seconds]))
    return matrix, np.concatenate([limits, capacity / second]), np.concatenate([scale, second])


def _linprog(
    problem: WindowProblem, cost: np.ndarray, rows: sp.csr_array, limits: np.ndarray
) -> OptimizeResult:
    """Minimise `cost` under the coupling rows and one convexity row per request; extra columns follow the R
    I.
    """
    requests, instances = problem.reward.shape
    extra = len(cost) - requests * instances
    convexity = sp.kron(sp.eye_array(requests), np.ones((1, instances)), format="csr")
    convexity = sp.hstack([convexity, sp.csr_array((requests, extra))], format="csr") if extra else convexity
    simplex = requests <= _SIMPLEX_UP_TO
    options = _TOLERANCES if simplex else {**_TOLERANCES, "ipm_optimality_tolerance": 1e-12}
    method = "highs-ds" if simplex else "highs-ipm"
    ones = np.ones(requests)
    if problem.mode == "serve_all":
        return linprog(cost, rows, limits, convexity, ones, (0, None), method, options=options)
    both = sp.vstack([rows, convexity], format="csr")
    return linprog(cost, both, np.concatenate([limits, ones]), None, None, (0, None), method, options=options)


def _clean(problem: WindowProblem, x: np.ndarray) -> np.ndarray:
    """Remove the solver's tolerance: no shares below 1e-12, and those of a request sum to exactly 1."""
    x = np.where(x > 1e-12, x, 0.0)
    served = x.sum(axis=1, keepdims=True)
    return x / served if problem.mode == "serve_all" else x / np.maximum(served, 1.0)


def _split_ties(problem: WindowProblem, x: np.ndarray) -> np.ndarray:
    """Give requests that are alike in every coefficient their mean share: as feasible and as good.

    The result no longer depends on the order in which the solver met them. Under class means whole classes
    are alike.
    """
    parts = [problem.classes[:, None], problem.q[:, None], problem.reward, problem.damage]
    if problem.seconds is not None:
        parts.append(problem.seconds)
    _, alike = np.unique(np.hstack(parts), axis=0, return_inverse=True)
    count = np.bincount(alike)
    means = np.stack([np.bincount(alike, weights=column) / count for column in x.T], axis=1)
    return np.where((count > 1)[alike][:, None], means[alike], x)


def _blame(
    problem: WindowProblem, rows: sp.csr_array, limits: np.ndarray, row_scale: np.ndarray
) -> InfeasibleBudget:
    """Phase 1: the least total slack that makes the coupling rows feasible, and the rows that need it."""
    count = len(limits)
    cost = np.concatenate([np.zeros(problem.reward.size), np.ones(count)])
    relaxed = sp.csr_array(sp.hstack([rows, -sp.eye_array(count)]))
    slack = _linprog(problem, cost, relaxed, limits).x[-count:]
    names = [(f"quality of class '{name}'", "nats") for name in problem.class_names]
    names += [(f"capacity of instance '{name}'", "s") for name in problem.instances]
    needed, told = [], []
    for k in np.argsort(-slack, kind="stable"):
        if slack[k] <= FEASIBILITY:
            break
        allowed, least = float(limits[k] * row_scale[k]), float((limits[k] + slack[k]) * row_scale[k])
        needed.append((names[k][0], least, allowed))
        told.append(f"{names[k][0]} needs {least:.6g} {names[k][1]}, allowed is {allowed:.6g}")
    return InfeasibleBudget(
        f"budgets and capacities cannot be kept together: {'; '.join(told)}: "
        "raise the budget, the window or the replicas",
        needed,
    )
