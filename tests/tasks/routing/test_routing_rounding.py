"""Rounding: counts within one of the shares, the seed decides which, whole requests stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.routing.rounding import round_allocation, round_down

shares = st.lists(st.integers(0, 10), min_size=2, max_size=4).filter(sum).map(lambda n: np.array(n) / sum(n))


@given(shares, st.integers(1, 60), st.integers(0, 1000))
def test_counts_are_the_shares_rounded_down_or_up(share, requests, seed):
    choice = round_allocation(np.tile(share, (requests, 1)), np.zeros(requests, dtype=int), seed)
    counts = np.bincount(choice, minlength=len(share))
    assert (np.abs(counts - requests * share) < 1).all()
    assert (counts[share == 0] == 0).all()


def test_a_request_gets_each_instance_as_often_as_its_share():
    """Over 4,000 seeds a share of 0.3 shows within four standard errors: 4 sqrt(0.3 x 0.7 / 4000) = 0.029."""
    x = np.tile([0.3, 0.7], (5, 1))
    choices = np.array([round_allocation(x, np.zeros(5, dtype=int), seed) for seed in range(4000)])
    np.testing.assert_allclose((choices == 0).mean(axis=0), 0.3, atol=0.029)


def test_groups_are_rounded_apart_and_whole_requests_stay():
    x = np.array([[1, 0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0, 1]])
    for seed in range(20):
        choice = round_allocation(x, np.array([0, 0, 0, 1, 1, 1]), seed)
        assert choice[0] == 0 and choice[5] == 1
        assert choice[1:3].sum() == 1 and choice[3:5].sum() == 1


def test_the_seed_decides():
    x = np.tile([0.5, 0.5], (40, 1))
    group = np.zeros(40, dtype=int)
    np.testing.assert_array_equal(round_allocation(x, group, 1), round_allocation(x, group, 1))
    assert (round_allocation(x, group, 1) != round_allocation(x, group, 2)).any()


def test_rounding_down_keeps_the_budget():
    """Three alike requests, half of each on the risky instance: one of them, not two, goes there."""
    x, damage = np.tile([0.5, 0.5], (3, 1)), np.tile([1.0, 0.0], (3, 1))
    choice = round_down(x, np.zeros(3, dtype=int), damage)
    assert (choice == 0).sum() == 1
    assert damage[np.arange(3), choice].sum() <= (damage * x).sum()


@pytest.mark.parametrize(
    "rounding", [lambda x, g: round_allocation(x, g, 0), lambda x, g: round_down(x, g, x)]
)
def test_nothing_to_round(rounding):
    np.testing.assert_array_equal(rounding(np.eye(3), np.zeros(3, dtype=int)), [0, 1, 2])
