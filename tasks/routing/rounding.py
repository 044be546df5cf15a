"""Fractions become whole requests: seeded systematic rounding, and rounding down to the safest instance."""

from __future__ import annotations

import numpy as np


def round_allocation(x: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Choose one instance per request, [R] int, with probability x [R, I] each (rows sum to 1).

    The n requests of a group (groups [R]: the coupling row they belong to) with equal shares p are rounded
    together: instance i gets floor(n cumsum(p)_i + u) - floor(n cumsum(p)_(i-1) + u) of them with one uniform
    u, so its count is n p_i rounded down or up, and a seeded permutation says which. A vertex of the LP has
    at most one set of equal fractional requests per coupling row, so rounding moves each row by less than one
    request.
    """
    choice = np.argmax(x, axis=1)
    fractional = np.flatnonzero(x.max(axis=1) < 1 - 1e-9)
    if not fractional.size:
        return choice
    rng = np.random.default_rng(seed)
    keys = np.column_stack([groups[fractional], np.round(x[fractional], 9)])
    _, alike = np.unique(keys, axis=0, return_inverse=True)
    for key in range(alike.max() + 1):
        rows = fractional[alike == key]
        bounds = len(rows) * np.cumsum(x[rows[0]])
        whole = np.round(bounds)
        bounds = np.where(np.abs(bounds - whole) < 1e-6, whole, bounds)  # a whole number stays one
        bounds[-1] = len(rows)
        ends = np.floor(bounds + rng.random()).astype(int)
        choice[rng.permutation(rows)] = np.repeat(np.arange(x.shape[1]), np.diff(ends, prepend=0))
    return choice


def round_down(x: np.ndarray, groups: np.ndarray, damage: np.ndarray) -> np.ndarray:
    """Choose one instance per request, [R] int, so that a budget that x [R, I] keeps stays kept.

    Of n requests alike in group, shares p and damage [R, I], instance i gets floor(n p_i); the rest go to
    their least damaging instance.
    """
    choice = np.argmax(x, axis=1)
    fractional = np.flatnonzero(x.max(axis=1) < 1 - 1e-9)
    if not fractional.size:
        return choice
    keys = np.column_stack([groups[fractional], np.round(x[fractional], 9), damage[fractional]])
    _, alike = np.unique(keys, axis=0, return_inverse=True)
    for key in range(alike.max() + 1):
        rows = fractional[alike == key]
        counts = np.floor(len(rows) * x[rows[0]] + 1e-6).astype(int)
        counts[int(np.argmin(damage[rows[0]]))] += len(rows) - counts.sum()
        choice[rows] = np.repeat(np.arange(x.shape[1]), counts)
    return choice
