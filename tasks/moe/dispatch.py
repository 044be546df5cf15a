"""Which copy of a replicated expert computes a token: a pure function of (seed, layer, request, token index).

No state and no batch enters, so the same request is dispatched alike alone, in any batch and in any order.
Integer arithmetic on numpy's uint64, which wraps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*words: np.ndarray | int) -> np.ndarray:
    """Counter-based hash: one uint64 per element of the broadcast integer `words`; their order matters.

    Each word passes the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection that flips
    about half of the bits for each bit of the input.
    """
    state: np.ndarray = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            value = np.uint64(word & _MASK) if isinstance(word, int) else np.asarray(word).astype(np.uint64)
            state = (state ^ value) + np.uint64(_GOLDEN)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def request_key(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Name each sequence by its own tokens, so that no door has to hand request ids down to the experts.

    Args:
        ids: [B, S] token ids.
        mask: [B, S] true for real tokens; padding on either side does not matter.

    Returns:
        [B] uint64. Equal sequences have equal keys.
    """
    position = np.cumsum(mask, axis=1)
    with np.errstate(over="ignore"):
        return np.where(mask, mix(ids, position), np.uint64(0)).sum(axis=1, dtype=np.uint64)


def random(
    seed: int, layer: int, request: np.ndarray, position: np.ndarray, copies: np.ndarray
) -> np.ndarray:
    """A copy drawn uniformly for each token.

    request and position [N, 1], copies [N, k] -> [N, k] in 0..copies - 1.
    """
    return (mix(seed, layer, request, position) % copies.astype(np.uint64)).astype(np.int64)


def round_robin(
    seed: int, layer: int, request: np.ndarray, position: np.ndarray, copies: np.ndarray
) -> np.ndarray:
    """Copies take turns from token to token, from a start drawn per request and layer; shapes as `random`.

    Over any run of consecutive tokens the turns of two copies differ by at most one.
    """
    copies = copies.astype(np.uint64)
    start = mix(seed, layer, request) % copies
    return ((start + position.astype(np.uint64)) % copies).astype(np.int64)


Dispatch = Callable[[int, int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
DISPATCHES: dict[str, Dispatch] = {"random": random, "round_robin": round_robin}
