"""One sort against the solver: the window LP of one budget, by hand and on random problems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.risk.frontier import frontier
from tasks.routing.problem import WindowProblem
from tasks.routing.solve import solve_window

REWARD = np.array([2.0, 4 / 3, 1.0])


def test_two_requests_by_hand():
    """W4 costs nothing, W3 0.1 and 0.2, W2 1.0 and 1.1. W3 gains 1/3 for 0.1 (0.3 per unit) or 0.2 (0.6), W2 another
    2/3 for 0.9 (1.35) each. A mean of 0.1 is 0.2 in all: the first step, and half of the second.
    """
    predicted = np.array([[[1.0, 0.1, 0.0], [1.1, 0.2, 0.0]]])
    true = predicted + np.array([0.0, 0.01, 0.001])
    path = frontier(predicted, true, REWARD)
    assert path.predicted[0].tolist() == pytest.approx([0.0, 0.1, 0.3, 1.2, 2.1])
    down, up = path.at(0.1, np.array([0.6])), path.at(0.1, np.array([0.4]))
    assert down.predicted[0] == up.predicted[0] == pytest.approx(0.1)
    assert down.reward[0] == pytest.approx((4 / 3 + 1) / 2) and up.reward[0] == pytest.approx(4 / 3)
    assert down.true[0] == pytest.approx((0.11 + 0.001) / 2) and up.true[0] == pytest.approx(
        (0.11 + 0.21) / 2
    )
    assert path.served(0.1, np.array([0.4]))[0].tolist() == pytest.approx([0.11, 0.21])
    assert path.errors(0.1)[0].tolist() == pytest.approx([0.01, 0.001])
    richest = path.at(9.0, np.array([0.0]))
    assert richest.reward[0] == 2 and richest.predicted[0] == pytest.approx(1.05)


def test_a_budget_below_the_least_is_infeasible_and_served_safest():
    predicted = np.array([[[1.0, 0.2, 0.1]]])
    found = frontier(predicted, predicted, REWARD).at(0.05, np.array([0.0]))
    assert not found.feasible[0] and found.reward[0] == 1 and found.true[0] == pytest.approx(0.1)
    assert frontier(predicted, predicted, REWARD).at(0.1, np.array([0.0])).feasible[0]


def test_a_lower_width_that_damages_less_is_where_a_request_starts():
    predicted = np.array([[[0.3, 0.0, 0.1]]])
    path = frontier(predicted, predicted, REWARD)
    assert path.reward[0, 0] == pytest.approx(4 / 3) and path.at(0.0, np.array([0.5])).feasible[0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), requests=st.integers(1, 12), share=st.floats(0, 1), ties=st.booleans())
def test_the_optimum_is_the_solvers(seed, requests, share, ties):
    rng = np.random.default_rng(seed)
    damage = rng.normal(0.1, 0.3, (requests, 3))
    damage = np.tile(damage[:1], (requests, 1)) if ties else damage
    low, high = damage.min(axis=1).mean(), damage[:, 0].mean()
    tau = low + share * (high - low) + 1e-9
    window = WindowProblem(
        ids=tuple(map(str, range(requests))), instances=("W2", "W3", "W4"), class_names=("all",),
        classes=np.zeros(requests, dtype=np.int64), reward=np.tile(REWARD, (requests, 1)), damage=damage,
        tau=np.array([tau]), q=np.ones(requests),
    )  # fmt: skip
    best = solve_window(window).certificate.primal / requests
    path = frontier(damage[None], damage[None], REWARD)
    down, up = path.at(tau, np.array([1.0])), path.at(tau, np.array([0.0]))
    assert (
        down.reward[0] - 1e-7 <= best <= up.reward[0] + 1e-7
    )  # rounded down, and up where a step is in part
    size = up.reward[0] - down.reward[0]
    part = (down.predicted[0] - down.true[0]) / (up.true[0] - down.true[0]) if size else 0.0
    assert down.reward[0] + part * size == pytest.approx(best, abs=1e-7)
    assert down.true[0] <= tau + 1e-9 and down.predicted[0] <= tau + 1e-9
