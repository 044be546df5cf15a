"""The window LP against brute force, its prices against the optimality conditions, and its errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.routing.certificate import certify
from tasks.routing.problem import InfeasibleBudget, WindowProblem
from tasks.routing.solve import solve_window


def window(reward, damage, tau, classes=None, q=None, **capacities) -> WindowProblem:
    reward, damage = np.asarray(reward, dtype=float), np.asarray(damage, dtype=float)
    requests, instances = damage.shape
    tau = np.atleast_1d(np.asarray(tau, dtype=float))
    return WindowProblem(
        ids=tuple(f"r{number}" for number in range(requests)),
        instances=tuple(f"W{number + 2}" for number in range(instances)),
        class_names=tuple(f"c{number}" for number in range(len(tau))),
        classes=np.zeros(requests, dtype=int) if classes is None else np.asarray(classes),
        reward=np.tile(reward, (requests, 1)) if reward.ndim == 1 else reward,
        damage=damage,
        tau=tau,
        q=np.ones(requests) if q is None else np.asarray(q, dtype=float),
        **capacities,
    )


def brute_force(problem: WindowProblem) -> float:
    """The LP optimum of one quality row by enumeration, -inf if infeasible.

    With one coupling row a vertex has at most one fractional request, split between two instances so that the
    row is tight: try every whole assignment, and every pair of whole assignments that differ in one request.
    """
    coefficients = problem.quality
    requests, instances = coefficients.shape
    rows = np.arange(requests)
    found = {}
    for choice in itertools.product(range(instances), repeat=requests):
        found[choice] = (problem.reward[rows, choice].sum(), coefficients[rows, choice].sum())
    best = max((value for value, use in found.values() if use <= 1e-12), default=-np.inf)
    for choice, (value, use) in found.items():
        for request, instance in itertools.product(range(requests), range(instances)):
            other = (*choice[:request], instance, *choice[request + 1 :])
            other_value, other_use = found[other]
            if use < 0 < other_use:
                share = use / (use - other_use)
                best = max(best, value + share * (other_value - value))
    return best


numbers = st.integers(-4, 8).map(lambda n: n / 8)
units = st.sampled_from([1e-8, 1e-3, 1.0, 1e3, 1e8])


@st.composite
def windows(draw):
    """Small windows with many ties and degenerate rows: all values are eighths, times any unit."""
    requests, instances = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    table = st.lists(numbers, min_size=instances, max_size=instances)
    rows = st.lists(table, min_size=requests, max_size=requests)
    damage, reward = np.array(draw(rows)), np.array(draw(rows))
    if draw(st.booleans()):  # all tied, as under class means
        damage, reward = np.tile(damage[0], (requests, 1)), np.tile(reward[0], (requests, 1))
    unit, worth = draw(units), draw(units)
    q = [draw(st.integers(1, 3)) for _ in range(requests)]
    return window(reward * worth, damage * unit, draw(numbers) * unit, q=q)


@settings(max_examples=150, deadline=None)
@given(windows())
def test_optimum_is_that_of_brute_force(problem):
    expected = brute_force(problem)
    if expected == -np.inf:
        with pytest.raises(InfeasibleBudget):
            solve_window(problem)
        return
    solution = solve_window(problem)
    size = np.abs(problem.reward).max() or 1.0
    assert solution.certificate.primal / size == pytest.approx(expected / size, abs=1e-9)
    assert solution.certificate.holds
    assert (solution.alpha >= 0).all() and (solution.beta == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_optimality_conditions_hold_with_classes_and_capacities(
    seed, requests, instances, classes, capacities, drops
):
    """Karush-Kuhn-Tucker, written out here apart from the certificate: feasible, prices >= 0, price x slack =
    0, and every served share at the largest reduced reward."""
    rng = np.random.default_rng(seed)
    damage = rng.normal(0.2, 0.5, (requests, instances))
    reward = rng.uniform(0.5, 2, (requests, instances))
    group = rng.integers(0, classes, requests)
    seconds = rng.uniform(0.1, 1, (requests, instances))
    limits = {
        "seconds": seconds,
        "window_s": seconds.mean() * requests,
        "replicas": rng.uniform(0, 1, instances),
    }
    mode = "throughput" if drops else "serve_all"
    problem = window(
        reward, damage, np.full(classes, 0.2), group, **(limits if capacities else {}), mode=mode
    )
    try:
        solution = solve_window(problem)
    except InfeasibleBudget:
        assert mode == "serve_all"  # serving nothing is always allowed
        return
    x, alpha, beta = solution.x, solution.alpha, solution.beta
    served = x.sum(axis=1)
    assert (x >= 0).all() and (served <= 1 + 1e-12).all()
    if mode == "serve_all":
        np.testing.assert_allclose(served, 1, atol=1e-12)
    use = np.array([((damage - 0.2) * x)[group == c].sum() for c in range(classes)])
    assert (use <= 1e-9).all() and (alpha >= 0).all()
    np.testing.assert_allclose(alpha * use, 0, atol=1e-8)
    reduced = reward - alpha[group][:, None] * (damage - 0.2)
    if capacities:
        load = (seconds * x).sum(axis=0)
        capacity = limits["window_s"] * limits["replicas"]
        assert (load <= capacity + 1e-9).all() and (beta >= 0).all()
        np.testing.assert_allclose(beta * (load - capacity), 0, atol=1e-8)
        reduced = reduced - beta * seconds
    best = reduced.max(axis=1, keepdims=True)
    assert (reduced >= best - 1e-8)[x > 1e-9].all()
    if mode == "throughput":
        assert (best[served < 1 - 1e-9] <= 1e-8).all()


def test_price_is_the_reward_gained_per_nat_of_budget():
    """Two requests, W4 (damage 0, reward 1) or W2 (damage 1, reward 2), tau 0.25: the row allows 2 x 0.25
    nats, so half a request in all goes to W2. Reward 2.5; a nat more of the row gains 1, and alpha is 1."""
    solution = solve_window(window([2, 1], [[1, 0], [1, 0]], 0.25))
    np.testing.assert_allclose(solution.x, [[0.25, 0.75], [0.25, 0.75]])  # alike requests share alike
    assert solution.alpha == pytest.approx([1.0])
    assert solution.certificate.primal == pytest.approx(2.5)


def test_safe_assignments_pay_for_risky_ones_through_negative_damage():
    """Damage -0.5 on W4 earns what the second request spends on W2: 0.5 - 0.5 = 0 <= 0 at tau = 0."""
    solution = solve_window(window([2, 1], [[5, -0.5], [0.5, 0.0]], 0.0))
    np.testing.assert_allclose(solution.x, [[0, 1], [1, 0]], atol=1e-12)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_perturbed_price_fails_the_certificate(factor):
    rng = np.random.default_rng(3)
    problem = window([2, 4 / 3, 1], np.sort(rng.uniform(0, 1, (30, 3)))[:, ::-1], 0.3)
    solution = solve_window(problem)
    assert solution.certificate.holds
    assert not certify(problem, solution.x, solution.alpha * factor, solution.beta).holds


def test_a_shifted_share_and_a_negative_price_fail_the_certificate():
    problem = window([2, 1], [[1, 0], [1, 0]], 0.25)
    solution = solve_window(problem)
    over = solution.x + np.array([[1e-6, -1e-6], [0, 0]])
    assert certify(problem, over, solution.alpha, solution.beta).primal_violation > 1e-9
    assert not certify(problem, over, solution.alpha, solution.beta).holds
    assert not certify(problem, solution.x, -solution.alpha, solution.beta).holds


def test_infeasible_budget_names_class_least_value_and_tau():
    """Class c1: least damages 0.5 and 0.7, weights 1 and 3: (0.5 + 3 x 0.7) / 4 = 0.65 > 0.6."""
    problem = window([2, 1], [[0.9, 0.1], [0.9, 0.5], [0.8, 0.7]], [0.6, 0.6], classes=[0, 1, 1], q=[1, 1, 3])
    with pytest.raises(InfeasibleBudget, match=r"class 'c1'.*0\.65, tau is 0\.6") as caught:
        solve_window(problem)
    assert caught.value.rows == [("c1", pytest.approx(0.65), 0.6)]


def test_capacity_shortage_is_blamed_on_its_rows():
    """Three requests of 1 s each, 2 s in all: 1 s short, wherever it is put."""
    limits = {"seconds": np.ones((3, 2)), "window_s": 1.0, "replicas": np.array([1.0, 1.0])}
    with pytest.raises(InfeasibleBudget, match="capacity of instance") as caught:
        solve_window(window([2, 1], np.zeros((3, 2)), 0.5, **limits))
    assert sum(least - allowed for _, least, allowed in caught.value.rows) == pytest.approx(1.0)


def test_zero_capacity_closes_an_instance():
    limits = {"seconds": np.ones((3, 2)), "window_s": 9.0, "replicas": np.array([0.0, 1.0])}
    solution = solve_window(window([2, 1], np.zeros((3, 2)), 0.5, **limits))
    np.testing.assert_allclose(solution.x, [[0, 1]] * 3, atol=1e-12)
    assert solution.beta == pytest.approx([1.0, 0.0])  # a second of W2 would gain 2 - 1


def test_a_damage_equal_to_tau_is_feasible_at_any_scale():
    tau = 0.1 + 0.2
    assert solve_window(window([1], [[0.3], [tau]], tau)).certificate.holds
    assert solve_window(window([1], [[0.3e-9], [tau * 1e-9]], 0.3e-9)).certificate.holds


def test_large_windows_take_the_interior_point_and_are_as_exact():
    rng = np.random.default_rng(0)
    damage = np.sort(rng.gamma(2, 0.2, (4000, 3)))[:, ::-1]
    solution = solve_window(window([2, 4 / 3, 1], damage, np.full(8, 0.4), rng.integers(0, 8, 4000)))
    assert solution.certificate.relative_gap < 1e-12
    assert (
        (solution.x.max(axis=1) < 1 - 1e-9).sum()
    ) <= 8  # a vertex: one fractional request per coupling row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": ("a", "a")}, "request id 'a' occurs twice"),
        ({"instances": ("W2", "W2")}, "instance 'W2' occurs twice"),
        (
            {"damage": np.array([[0, np.nan], [0, 0]])},
            "damage of request 'r0' on instance 'W3' is not a finite",
        ),
        (
            {"reward": np.array([[0, 0], [np.inf, 0]])},
            "reward of request 'r1' on instance 'W2' is not a finite",
        ),
        ({"tau": np.array([np.nan])}, "tau of 'c0' is not a finite"),
        ({"q": np.array([1.0, 0.0])}, "q of request 'r1' is not positive"),
        ({"damage": np.zeros((2, 3))}, r"damage has shape \[2, 3\], expected \[2, 2\]"),
        ({"classes": np.array([0, 1])}, "classes has an index outside 0..0"),
        ({"seconds": np.ones((2, 2))}, "need both seconds"),
    ],
)
def test_unusable_windows_are_refused(change, message):
    good = window([2, 1], [[1, 0], [1, 0]], 0.25)
    with pytest.raises(InputError, match=message):
        replace(good, **change)
