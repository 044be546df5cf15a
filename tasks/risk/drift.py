"""Requests that are not like those a predictor was fitted on: a class never seen, a signal beyond its fit range.

A range runs from the least to the largest value over the fit requests, widened by `WIDEN` of its width at each end.
Unwidened, a fresh request of the same law falls outside with probability 2 / (n + 1) per signal, by exchangeability;
so at most the sum of that over the signals is flagged by chance (`chance_at_most`), and widening only lowers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import InputError

WIDEN = 0.1  # of the width of the fit range, at each end
RANGED = ("log_length", "log_ppl", "log_fwp", "separable")  # each instance's own is <signal>_<instance>
WORDS = {
    "log_length": "prompt length",
    "log_ppl": "log PPL",
    "log_fwp": "log FWP",
    "separable": "separable term",
}


@dataclass(frozen=True)
class Drift:
    """What the fit requests spanned."""

    classes: list[str]
    signals: dict[str, list[float]]  # column -> [least, largest] over the fit requests, not widened
    requests: int

    @classmethod
    def of(cls, fit: pd.DataFrame, instances: Sequence[str]) -> Drift:
        """Of the frame of the fit requests."""
        columns = [*RANGED, *(f"{name}_{instance}" for name in RANGED for instance in instances)]
        known = {column: fit[column].to_numpy(dtype=np.float64) for column in columns if column in fit}
        ranges = {column: [float(values.min()), float(values.max())] for column, values in known.items()}
        return cls(sorted(set(fit["class"])), ranges, len(fit))

    def flags(self, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Which requests lie outside [R] bool, and why [R] str, reasons joined by "; ", "" inside.

        Raises InputError where `frame` lacks a column, or a signal is no finite number.
        """
        missing = [name for name in ("class", *self.signals) if name not in frame]
        if missing:
            raise InputError(
                f"no column '{missing[0]}' to hold against the fit requests; found {list(frame)}"
            )
        reasons: list[list[str]] = [[] for _ in range(len(frame))]
        for row in np.flatnonzero(~np.isin(frame["class"].to_numpy(dtype=str), self.classes)):
            reasons[row].append(f"class '{frame['class'].iloc[row]}' never seen")
        for name, (least, largest) in self.signals.items():
            values = frame[name].to_numpy(dtype=np.float64)
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise InputError(f"signal '{name}' of row {row} is {values[row]}, expected a finite number")
            room = WIDEN * (largest - least) + 1e-9 * max(abs(least), abs(largest))
            for row in np.flatnonzero(values < least - room):
                reasons[row].append(f"{words(name)} below the fit range")
            for row in np.flatnonzero(values > largest + room):
                reasons[row].append(f"{words(name)} above the fit range")
        told = np.array(["; ".join(dict.fromkeys(own)) for own in reasons], dtype=object)
        return told != "", told

    @property
    def chance_at_most(self) -> float:
        """Share of fresh requests of the same law that is flagged by chance, at most."""
        return min(1.0, 2 * len(self.signals) / (self.requests + 1))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "widened_by": WIDEN}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Drift:
        """Of a predictor.json, or of its `fit_range`."""
        own = values.get("fit_range", values)
        if not {"classes", "signals", "requests"} <= set(own):
            raise InputError("predictor.json has no fit_range (version 1); run the stage calibrate_fwp again")
        return cls(own["classes"], own["signals"], own["requests"])


def words(column: str) -> str:
    """log_fwp_W2 -> "log FWP of W2"."""
    signal = max((name for name in RANGED if column.startswith(name)), key=len)
    instance = column[len(signal) + 1 :]
    return f"{WORDS[signal]} of {instance}" if instance else WORDS[signal]


def drift_figures(
    split: np.ndarray, outside: np.ndarray, reasons: np.ndarray, drift: Drift
) -> dict[str, Any]:
    """Per split of the requests [R]: how many are outside, and for which reasons (one request may have several)."""
    figures: dict[str, Any] = {"chance_at_most": drift.chance_at_most}
    for name in sorted(set(split)):
        own = split == name
        told = Counter(reason for row in reasons[own] if row for reason in row.split("; "))
        figures[str(name)] = {
            "requests": int(own.sum()),
            "outside": int(outside[own].sum()),
            "reasons": dict(sorted(told.items())),
        }
    return figures
