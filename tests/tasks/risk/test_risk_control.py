"""Margins by hand where the normal law gives them, and the promise itself on a population of known law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from tasks.contracts import InputError
from tasks.risk.control import FitSet, replay
from tasks.risk.population import Population, play
from tasks.risk.refit import fit_linear, linear_refit, refit_each

REWARD = np.array([4 / 3, 1.0])


def one_class(damage: np.ndarray, folds: int = 5, refit=None) -> FitSet:
    """Requests of one class on W3 and W4 under the class mean."""
    count = len(damage)
    ones, zero = np.ones((count, 1)), np.zeros(count, dtype=np.int64)
    refit = refit or linear_refit(ones, damage, np.zeros(1))
    return FitSet(damage, zero, zero, np.arange(count) % folds, REWARD, 1, refit)


def normal_damage(count: int, seed: int = 0) -> np.ndarray:
    """Mean 1 on W3 with standard deviation 0.5, as sampled; 0 on W4."""
    values = np.random.default_rng(seed).normal(size=count)
    values = (values - values.mean()) / values.std()
    return np.stack([1 + 0.5 * values, np.zeros(count)], axis=1)


def test_the_margin_of_a_mean_is_the_normal_one():
    """Tau 1.3: all on W3, so realised - predicted is the difference of two means, of n = 400 and m = 100 requests.

    Its standard deviation is 0.5 sqrt(1/400 + 1/100) = 0.0559; the margin at delta 0.1 is 1.2816 times that, 0.0716.
    """
    game = replay(one_class(normal_damage(400)), 1, np.array([100]), 1999, seed=0)
    found = game.margins(np.array([1.3]), 0.1)[0]
    assert found.guaranteed and found.fit == 400 and found.fresh == 100
    assert found.room == pytest.approx(1.3)
    assert found.margin == pytest.approx(0.0716, rel=0.07)
    assert found.error == pytest.approx(norm.ppf(0.9) * found.spread * (1 / 400 + 1 / 100) ** 0.5)
    assert found.margin >= found.error
    stricter = game.margins(np.array([1.3]), 0.02)[0]
    assert stricter.margin == pytest.approx(0.0716 / 1.2816 * 2.0537, rel=0.12)


def test_a_class_without_room_has_no_guarantee_and_no_margin():
    """20 fit, 2 fresh: s is 0.2 or more where a third is on W3, 1.28 x 0.2 x sqrt(0.55) passes half of 0.3."""
    game = replay(one_class(normal_damage(20)), 1, np.array([2]), 99, seed=0)
    found = game.margins(np.array([0.3]), 0.1)[0]
    assert found.status == "no guarantee" and found.margin == 0 and found.error > found.room / 2
    below = replay(one_class(normal_damage(20) + 1), 1, np.array([2]), 99, seed=0).margins(
        np.array([0.5]), 0.1
    )[0]
    assert below.status == "no guarantee" and below.room == pytest.approx(-0.5)


def test_a_class_that_nobody_asks_for_has_no_guarantee():
    fit = one_class(normal_damage(60))
    groups = np.repeat([0, 1], 30)
    game = replay(replace(fit, groups=groups, strata=groups), 2, np.array([500, 0]), 199, seed=0)
    found = game.margins(np.array([0.9, 0.9]), 0.1)
    assert [own.status for own in found] == ["guaranteed", "no guarantee"] and found[1].fresh == 0


def test_a_lucky_small_class_is_not_guaranteed_for_its_luck():
    """Ten requests that agree by chance, beside 300 of the same budget that do not."""
    rng = np.random.default_rng(0)
    damage = np.stack([rng.gamma(1.0, 1.0, 310), np.zeros(310)], axis=1)
    damage[300:, 0] = 1 + 0.01 * rng.normal(size=10)
    groups = np.repeat([0, 1], [300, 10])
    features = np.eye(2)[groups]
    fit = FitSet(
        damage, groups, groups, np.arange(310) % 5, REWARD, 1, linear_refit(features, damage, np.zeros(2))
    )
    large, small = replay(fit, 2, np.array([300, 10]), 199, seed=0).margins(np.array([0.8, 0.8]), 0.1)
    assert large.guaranteed and small.spread > 0.5 * large.spread and not small.guaranteed


def test_a_map_that_learns_its_fit_set_by_heart_gains_nothing():
    """It knows the truth of every request it was fitted on, and nothing of others: out of fold, only the mean."""
    damage = normal_damage(200)

    def by_heart(times: np.ndarray) -> np.ndarray:
        mean = (times @ damage) / times.sum(axis=1, keepdims=True)
        return np.where(times[..., None] > 0, damage, mean[:, None])

    tau, fresh = np.array([0.6]), np.array([200])
    honest = replay(one_class(damage), 1, fresh, 499, seed=1).margins(tau, 0.1)[0]
    guarded = replay(one_class(damage, refit=by_heart), 1, fresh, 499, seed=1).margins(tau, 0.1)[0]
    assert guarded.margin == pytest.approx(honest.margin, rel=0.01) and honest.margin > 0.02


def test_a_choice_of_what_looked_cheap_by_chance_costs_margin():
    """Forty features of pure noise: the LP picks what the fit set's noise calls cheap, and it is not."""
    rng = np.random.default_rng(3)
    damage, noise = normal_damage(200), rng.normal(size=(200, 40))
    features = np.hstack([np.ones((200, 1)), noise])
    cursed = one_class(damage, refit=linear_refit(features, damage, np.full(41, 1e-6)))
    tau, fresh = np.array([0.6]), np.array([200])
    plain = replay(one_class(damage), 1, fresh, 499, seed=1).margins(tau, 0.1)[0]
    found = replay(cursed, 1, fresh, 499, seed=1).margins(tau, 0.1)[0]
    assert found.margin > 1.5 * plain.margin


def test_refitting_one_by_one_is_the_product_for_all():
    rng = np.random.default_rng(0)
    features, damage, penalty = rng.normal(size=(30, 3)), rng.normal(size=(30, 2)), np.array([0.0, 0.1, 0.2])
    times = rng.integers(0, 3, (4, 30))

    def predict(train, rows):
        return features[rows] @ fit_linear(features[train], damage[train], penalty)

    one, many = refit_each(predict)(times), linear_refit(features, damage, penalty)(times)
    assert one == pytest.approx(many, abs=1e-10)


def test_the_same_seed_gives_the_same_margin():
    fit = one_class(normal_damage(80))
    first, again, other = (
        replay(fit, 1, np.array([80]), 99, seed).margins(np.array([0.9]), 0.1)[0] for seed in (0, 0, 1)
    )
    assert first == again and first.margin != other.margin


def test_too_few_replicates_or_requests_are_refused():
    game = replay(one_class(normal_damage(50)), 1, np.array([50]), 18, seed=0)
    with pytest.raises(
        InputError, match=r"18 replicates cannot give the 0.95 quantile.*at least 19 are needed"
    ):
        game.margins(np.array([0.9]), 0.05)
    with pytest.raises(InputError, match="has 0 fit requests, a margin needs at least 2"):
        replay(one_class(normal_damage(50)), 1, np.array([50, 5]), 19, seed=0)


LAW = Population(fit=(30, 50, 200), fresh=(30, 50, 200))
DRAWS = 200


@pytest.fixture(scope="module")
def trials():
    return [play(LAW, seed, (0.1, 0.05), 0.758, "signal", "class", 59) for seed in range(DRAWS)]


@pytest.mark.parametrize("delta", [0.1, 0.05])
def test_the_promise_is_kept_on_independent_draws(trials, delta):
    """Of the draws with a guaranteed class; the exact test refutes 1 - delta only where p < 0.05."""
    told = [trial[delta].complies for trial in trials]
    counted = [kept for kept in told if kept is not None]
    assert len(counted) >= DRAWS / 2
    assert binomtest(sum(counted), len(counted), 1 - delta, alternative="less").pvalue > 0.05
    point = sum(bool(trial[delta].kept_point.all()) for trial in trials)
    assert point < DRAWS / 4  # the game is not won by itself


@pytest.mark.parametrize("delta", [0.1, 0.05])
def test_the_promise_costs_at_most_half_of_the_gain(trials, delta):
    """Concavity, with 200 fit requests or more; the window's own mix may be off the fit set's by a little."""
    shares = [
        trial[delta].gain[c] / trial[delta].gain_point[c]
        for trial in trials
        for c in np.flatnonzero(trial[delta].guaranteed & (trial[delta].requests >= 200))
    ]
    assert len(shares) >= DRAWS / 4
    assert min(shares) >= 0.5 and np.mean(shares) > 0.6
