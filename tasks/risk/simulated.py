"""Made requests with a known rank correlation between a signal and damage inside classes, to test what is said about
real ones: the law is found where it is, and nothing is found where there is none.
"""

from __future__ import annotations

import numpy as np

from tasks.risk.maps import Rows

CLASSES = 7  # equal classes
SPREAD = 0.5  # of class levels, relative to the spread inside a class
NAMES = np.array([f"class_{number}" for number in range(CLASSES)])


def simulated_requests(
    requests: int, within: float, seed: int, skewed: bool = True
) -> tuple[Rows, np.ndarray]:
    """Rows and damage [R] whose rank correlation with log_fwp inside a class is `within` on average.

    Two normal variables have Spearman's correlation 6 / pi asin(rho / 2), so rho = 2 sin(pi within / 6); ranks do
    not change when the damage is made positive with a long tail (`skewed`: lognormal), as divergences are. log_ppl
    follows log_fwp closely (0.95), separable half as well (0.5); log_length and routing_frequency say nothing.
    """
    generator = np.random.default_rng(seed)
    rho = 2 * np.sin(np.pi * within / 6)
    place = np.arange(requests) % CLASSES
    signal, *noise = generator.normal(size=(5, requests))
    damage = rho * signal + np.sqrt(1 - rho**2) * noise[0]
    signals = {
        "log_fwp": signal,
        "separable": 0.5 * signal + np.sqrt(0.75) * noise[1],
        "log_ppl": 0.95 * signal + np.sqrt(1 - 0.95**2) * noise[2],
        "log_length": noise[3],
        "routing_frequency": generator.normal(size=requests),
    }
    damage = damage + SPREAD * generator.normal(size=CLASSES)[place]
    return Rows(NAMES[place], np.full(requests, 100), signals), np.exp(0.5 * damage) if skewed else damage


def permuted(rows: Rows, damage: np.ndarray, seed: int) -> np.ndarray:
    """`damage` [R] shuffled inside each class: class levels stay, what signals say about requests goes."""
    generator = np.random.default_rng(seed)
    shuffled = damage.copy()
    for name in np.unique(rows.classes):
        own = np.flatnonzero(rows.classes == name)
        shuffled[own] = damage[generator.permutation(own)]
    return shuffled
