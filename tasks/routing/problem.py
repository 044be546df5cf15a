"""The window LP: which instance serves each request of a window (arXiv 2609.12550).

Variables x [R, I] >= 0, the share of request r that instance i serves:

    maximise    sum_ri reward[r, i] x[r, i]
    subject to  sum_i x[r, i] = 1                                           (<= 1 in mode throughput)
                sum_{r in c, i} q[r] (damage[r, i] - tau[c]) x[r, i] <= 0   per class c, price alpha[c] >= 0
                sum_r seconds[r, i] x[r, i] <= window_s replicas[i]         per instance i, price beta[i] >= 0

The quality rows are signed: an assignment below tau pays for one above it. A budget over all requests is the
case of one class that holds them all. The capacity rows are optional.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.contracts import InputError

FEASIBILITY = 1e-9  # on rows scaled to a largest coefficient of 1


class InfeasibleBudget(InputError):
    """No allocation keeps the budgets. `rows` holds (row, least reachable value, allowed value), worst
    first.
    """

    def __init__(self, message: str, rows: list[tuple[str, float, float]]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class WindowProblem:
    """One window of requests. Arrays are float64; R requests, I instances, C classes.

    Raises InputError for shapes that do not match, values that are not finite, duplicate ids, names or
    instances, negative seconds or capacities, and q <= 0.
    """

    ids: tuple[str, ...]  # [R]
    instances: tuple[str, ...]  # [I]
    class_names: tuple[str, ...]  # [C]
    classes: np.ndarray  # [R] int, index into class_names
    reward: np.ndarray  # [R, I] what the objective earns when i serves all of r
    damage: np.ndarray  # [R, I] nats per scored token; may be negative
    tau: np.ndarray  # [C] nats per scored token
    q: np.ndarray  # [R] weight of a request in its quality row: 1, or its scored tokens
    seconds: np.ndarray | None = None  # [R, I] device seconds; None: no capacity rows
    window_s: float = 0.0
    replicas: np.ndarray | None = None  # [I]
    mode: Literal["serve_all", "throughput"] = "serve_all"

    def __post_init__(self) -> None:
        requests, instances, classes = len(self.ids), len(self.instances), len(self.class_names)
        if not requests or not instances or not classes:
            raise InputError(
                f"a window needs requests, instances and classes, got {requests}, {instances}, {classes}"
            )
        for what, names in (
            ("request id", self.ids),
            ("instance", self.instances),
            ("class", self.class_names),
        ):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise InputError(
                    f"{what} '{twice[0]}' occurs twice ({len(twice)} such): each must occur once"
                )
        if (self.seconds is None) != (self.replicas is None):
            raise InputError("capacity rows need both seconds [R, I] and replicas [I], got one of them")
        shapes = {
            "classes": (requests,),
            "reward": (requests, instances),
            "damage": (requests, instances),
            "tau": (classes,),
            "q": (requests,),
            "seconds": (requests, instances),
            "replicas": (instances,),
        }
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is None:
                continue
            if array.shape != shape:
                raise InputError(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
            if not np.isfinite(array).all():
                raise InputError(f"{name} {self._first_bad(~np.isfinite(array))} is not a finite number")
        if ((self.classes < 0) | (self.classes >= classes)).any():
            raise InputError(f"classes has an index outside 0..{classes - 1}")
        if (self.q <= 0).any():
            raise InputError(f"q {self._first_bad(self.q <= 0)} is not positive")
        if self.seconds is not None and self.replicas is not None:
            if (self.seconds < 0).any():
                raise InputError(f"seconds {self._first_bad(self.seconds < 0)} is negative")
            if (self.replicas < 0).any() or not np.isfinite(self.window_s) or self.window_s < 0:
                raise InputError(f"window_s ({self.window_s}) and replicas must be finite and not negative")

    def _first_bad(self, bad: np.ndarray) -> str:
        place = np.argwhere(bad)[0]
        if bad.shape[0] == len(self.ids):
            instance = f" on instance '{self.instances[place[1]]}'" if bad.ndim == 2 else ""
            return f"of request '{self.ids[place[0]]}'{instance}"
        names = self.class_names if bad.shape[0] == len(self.class_names) else self.instances
        return f"of '{names[place[0]]}'"

    @property
    def quality(self) -> np.ndarray:
        """[R, I] coefficients q (damage - tau) of each request in its class's quality row.

        A difference within the rounding error of its terms is 0: a damage equal to tau must not look
        infeasible.
        """
        tau = self.tau[self.classes][:, None]
        excess = self.damage - tau
        noise = 1e-13 * (np.abs(self.damage) + np.abs(tau))
        return self.q[:, None] * np.where(np.abs(excess) <= noise, 0.0, excess)

    @property
    def capacity(self) -> np.ndarray | None:
        """[I] device seconds that each instance has in the window; None without capacity rows."""
        return None if self.replicas is None else self.window_s * self.replicas

    def class_sums(self, per_request: np.ndarray) -> np.ndarray:
        """[R] -> [C], summed within classes."""
        return np.bincount(self.classes, weights=per_request, minlength=len(self.class_names))

    def quality_scale(self) -> np.ndarray:
        """[C] the largest |coefficient| of each quality row, 1 for an empty or all-zero row."""
        scale = np.zeros(len(self.class_names))
        np.maximum.at(scale, self.classes, np.abs(self.quality).max(axis=1))
        return np.where(scale > 0, scale, 1.0)

    def require_reachable(self) -> None:
        """Raise InfeasibleBudget if even the least damaging instance of every request misses a class's tau.

        The least reachable mean of class c is sum_r q min_i damage / sum_r q.
        """
        if self.mode == "throughput":
            return  # serving nothing keeps every budget
        excess = self.class_sums(self.quality.min(axis=1))
        size = self.class_sums(self.q * (np.abs(self.damage).max(axis=1) + np.abs(self.tau[self.classes])))
        missed = np.flatnonzero(excess > 1e-12 * size)
        if not missed.size:
            return
        weight = self.class_sums(self.q)
        least = self.class_sums(self.q * self.damage.min(axis=1)) / np.maximum(weight, np.finfo(float).tiny)
        rows = [(self.class_names[c], float(least[c]), float(self.tau[c])) for c in missed]
        rows.sort(key=lambda row: row[2] - row[1])
        listed = "; ".join(
            f"class '{name}': the least reachable mean damage is {low:.6g}, tau is {tau:.6g}"
            for name, low, tau in rows
        )
        raise InfeasibleBudget(
            f"the budget cannot be kept: {listed}: raise the budget or add a safer instance", rows
        )
