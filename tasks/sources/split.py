"""Every row of the packaged corpus gets its one role before anything reads it.

The role is a pure function of the row's id and source: the salted sha256 of the id, read as a number in [0,
1), falls into one of the source's shares. Rows that share a file share the part of the id before the colon,
and only that part is hashed, so that passages of one file never serve two roles.
"""

from __future__ import annotations

import hashlib
import re

ROLES = ("upcycling", "calibration", "requests", "benchmark")

# Shares in the order of ROLES. MMLU questions are three sources by their length (`packaged.LONG_QUESTION`):
# long ones are scarce among requests and too long for the benchmark, the longest are too long for both.
SHARES: dict[str, tuple[float, float, float, float]] = {
    "mmlu": (0.03, 0.03, 0.45, 0.49),
    "mmlu-long": (0.02, 0.02, 0.96, 0.00),
    "mmlu-longest": (0.5, 0.5, 0.00, 0.00),
    "worked": (0.06, 0.06, 0.88, 0.00),
    "code": (0.35, 0.15, 0.35, 0.15),
    "documentation": (0.25, 0.15, 0.45, 0.15),
}

# Chosen among the first integers for the counts that it gives (24 requests of every class, long ones among
# them, and 100 short benchmark questions), before any model had read a row: never for results.
SALT = "expertpool-7"


def fraction(text: str) -> float:
    """The salted sha256 of `text` as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"{SALT}|{text}".encode()).digest()[:8], "big") / 2**64


def role(row_id: str, source: str) -> str:
    """The role of a row: one of ROLES. Raises KeyError on an unknown source."""
    place = fraction(row_id.partition(":")[0])
    for name, share in zip(ROLES, SHARES[source], strict=True):
        place -= share
        if place < 0:
            return name
    return "requests"  # the shares sum to 1 but for rounding


def normalised(text: str) -> str:
    """Letters and digits alone, in lower case: equal for texts that differ in layout, brackets or spacing."""
    return re.sub(r"[\W_]+", "", text.casefold())
