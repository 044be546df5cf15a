"""The window LP of one budget, solved at every budget at once, for many windows side by side.

With one coupling row the LP is a fractional multiple-choice knapsack (Sinha and Zoltners 1979): every request
starts on its least damaging instance and climbs the upper hull of its (damage, reward) points; all steps of all
requests are taken in the order of damage per reward until the budget is spent. One sort gives the optimum of every
budget, which is what a margin is searched over. Equal to `tasks.routing.solve` without capacity rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Allocation:
    """What the optimum of each of B windows comes to, means over its requests, whole requests."""

    predicted: (
        np.ndarray
    )  # [B] nats, of the shares before rounding: at most the budget, where that is feasible
    true: np.ndarray  # [B] nats
    reward: np.ndarray  # [B]
    feasible: np.ndarray  # [B] bool; where False every request is on its least damaging instance


@dataclass(frozen=True)
class Frontier:
    """B windows of n requests: where each request starts, its steps, and the order of all S = n (I - 1) steps.

    Damages are [B, n] at the start and [B, n, I - 1] by step, predicted (never falling) and true; rewards too.
    """

    start: tuple[np.ndarray, np.ndarray, np.ndarray]  # predicted, true, reward
    step: tuple[np.ndarray, np.ndarray, np.ndarray]
    order: np.ndarray  # [B, S] into the flat steps of a window

    @property
    def requests(self) -> int:
        return self.start[0].shape[1]

    @cached_property
    def predicted(self) -> np.ndarray:
        """Sums [B, S + 1] over the requests after each step."""
        return self._running(0)

    @cached_property
    def true(self) -> np.ndarray:
        return self._running(1)

    @cached_property
    def reward(self) -> np.ndarray:
        return self._running(2)

    def _running(self, which: int) -> np.ndarray:
        windows, steps = self.order.shape
        total = np.empty((windows, steps + 1))
        total[:, 0] = self.start[which].sum(axis=1)
        total[:, 1:] = self.step[which].reshape(-1)[self.order + np.arange(windows)[:, None] * steps]
        return np.cumsum(total, axis=1, out=total)

    def steps(self, budget: np.ndarray | float) -> np.ndarray:
        """How many whole steps a mean damage of `budget` (one, or [B]) pays for [B]; -1: infeasible."""
        limit = np.broadcast_to(np.asarray(budget, dtype=np.float64), len(self.order)) * self.requests
        limit = limit + 1e-12 * (np.abs(limit) + np.abs(self.predicted[:, 0]))
        return (self.predicted <= limit[:, None]).sum(axis=1) - 1

    def at(self, budget: np.ndarray | float, uniform: np.ndarray) -> Allocation:
        """The optimum at a mean damage of `budget` (one, or [B]) nats.

        One step at most is taken in part; it is rounded up with its share as probability, by `uniform` [B].
        """
        window = np.arange(len(self.order))
        whole, spent, feasible = self._whole(budget, uniform)
        return Allocation(
            predicted=spent / self.requests,
            true=self.true[window, whole] / self.requests,
            reward=self.reward[window, whole] / self.requests,
            feasible=feasible,
        )

    def _whole(
        self, budget: np.ndarray | float, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps taken after rounding, predicted damage spent before it, feasible: all [B]."""
        window = np.arange(len(self.order))
        taken = self.steps(budget)
        feasible, taken = taken >= 0, np.maximum(taken, 0)
        limit = np.asarray(budget, dtype=np.float64) * self.requests
        following = np.minimum(taken + 1, self.order.shape[1])
        spent = self.predicted[window, taken]
        size = self.predicted[window, following] - spent
        left = np.where(feasible, np.clip(limit - spent, 0.0, size), 0.0)
        return np.where(uniform * size < left, following, taken), spent + left, feasible

    def errors(self, budget: np.ndarray | float) -> np.ndarray:
        """True minus predicted damage of every request at the optimum [B, n], a step in part left out."""
        taken = self.steps(budget)
        return self._served(1, taken) - self._served(0, taken)

    def served(self, budget: np.ndarray | float, uniform: np.ndarray) -> np.ndarray:
        """True damage of every request [B, n], whole requests: those whose mean is `true` of `at`."""
        return self._served(1, self._whole(budget, uniform)[0])

    def _served(self, which: int, taken: np.ndarray) -> np.ndarray:
        chosen = np.zeros(self.order.shape, dtype=bool)
        np.put_along_axis(chosen, self.order, np.arange(self.order.shape[1]) < taken[:, None], axis=1)
        return self.start[which] + (self.step[which] * chosen.reshape(self.step[which].shape)).sum(axis=2)


def frontier(predicted: np.ndarray, true: np.ndarray, reward: np.ndarray) -> Frontier:
    """Of B windows of n requests: predicted and true damage [B, n, I], reward [I] of a request served.

    Requests whose steps tie are taken in the order given: give them in random order.
    """
    windows, requests, instances = predicted.shape
    reward = np.asarray(reward, dtype=np.float64)
    row = np.arange(windows * requests).reshape(windows, requests) * instances

    def pick(values: np.ndarray, place: np.ndarray) -> np.ndarray:
        return values.reshape(-1)[row + place]

    def here(place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return pick(predicted, place), pick(true, place), reward[place]

    least = predicted.min(axis=2, keepdims=True)
    place = np.argmax(np.where(predicted == least, reward, -np.inf), axis=2)
    start = now = here(place)
    price = np.empty((windows, requests, instances - 1))
    step = np.empty_like(price), np.empty_like(price), np.empty_like(price)
    for number in range(instances - 1):
        gain = reward - now[2][..., None]  # [B, n, I]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(gain > 0, (predicted - now[0][..., None]) / gain, np.inf)
        following = np.argmin(ratio, axis=2)
        price[..., number] = pick(ratio, following)
        place = np.where(np.isfinite(price[..., number]), following, place)
        before, now = now, here(place)
        for change, old, new in zip(step, before, now, strict=True):
            change[..., number] = new - old
    order = np.argsort(price.reshape(windows, -1), axis=1, kind="stable")
    return Frontier(start, step, order)
