"""Quality budgets tau and what they are relative to, estimated on fit requests, never on the routed ones.

The safest instance is the widest: widths are declared, mean damages are estimates that can swap by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.contracts import InputError

# Tokens per second of the paper's serving endpoint (arXiv 2609.12550).
PUBLISHED_ENDPOINT = {"W2": 3270.0, "W3": 2591.0, "W4": 2334.0}


@dataclass(frozen=True)
class Pool:
    """The instances of a window, each with its width and its reward per request served."""

    instances: tuple[str, ...]  # [I]
    bits: np.ndarray  # [I]
    reward: np.ndarray  # [I] served work per device second, in any unit

    @property
    def baseline(self) -> int:
        """The instance that multipliers compare with: W4, or the widest where the pool has no W4."""
        return self.instances.index("W4") if "W4" in self.instances else int(np.argmax(self.bits))

    @property
    def safest_first(self) -> np.ndarray:
        """[I] indices by falling width."""
        return np.argsort(-self.bits, kind="stable")

    @property
    def multiplier(self) -> np.ndarray:
        """[I] reward relative to the baseline."""
        return self.reward / self.reward[self.baseline]


def make_pool(instances: list[str] | tuple[str, ...], reward: Literal["bits", "published_endpoint"]) -> Pool:
    """Rewards of instances named `W<bits>`: 4 / bits, or the published endpoint speeds.

    Raises InputError for an empty pool, a name of another form, or an instance without a published speed.
    """
    if not instances:
        raise InputError("the pool is empty: a pool needs at least one instance")
    for name in instances:
        if not (name.startswith("W") and name[1:].isdecimal() and int(name[1:]) > 0):
            raise InputError(f"instance '{name}' is not in the pool's naming: expected W<bits>, such as W4")
        if reward == "published_endpoint" and name not in PUBLISHED_ENDPOINT:
            raise InputError(
                f"reward 'published_endpoint' knows speeds of {', '.join(PUBLISHED_ENDPOINT)}: not {name}; "
                "leave it out of quantize_instances.bits or set solve_routing.reward to 'bits'"
            )
    bits = np.array([int(name[1:]) for name in instances], dtype=np.float64)
    rewards = 4.0 / bits if reward == "bits" else np.array([PUBLISHED_ENDPOINT[name] for name in instances])
    return Pool(tuple(instances), bits, rewards)


def budget_tau(
    kind: Literal["relative", "paper", "absolute"], value: float, pool: Pool, means: np.ndarray
) -> np.ndarray:
    """tau [C] in nats from the fit means [C, I] of each budget class.

    relative: safest + value (second safest - safest), the two widest instances; W4 + value (W3 - W4) in
              W2/W3/W4. The paper's tau = W4 + 0.10 is value 0.758 there: (0.1513 - 0.0513) / (0.1832 -
              0.0513). A pool of one has no second instance, and its tau is its own mean.
    paper:    the baseline's mean (W4, or the widest) + value nats.
    absolute: value nats.
    """
    if kind == "absolute":
        return np.full(len(means), float(value))
    if kind == "paper":
        return means[:, pool.baseline] + value
    order = pool.safest_first
    safest, second = means[:, order[0]], means[:, order[min(1, len(order) - 1)]]
    return safest + value * (second - safest)
