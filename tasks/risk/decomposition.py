"""Why an instance costs a request what it costs: its damage taken apart, exactly, by swaps of blocks.

A block is an expert or a whole layer. N(X, routes) is a request's loss when the blocks X compute with the
instance's weights and the rest with the reference's, routes frozen to the reference's or free:

    total          = N(all, free) - N(none, free)
    route change   = N(all, free) - N(all, frozen)
    single[b]      = N({b}, frozen) - N(none, frozen),      additive = sum_b single[b]
    interaction    = sum over pairs of N({a, b}) - N({a}) - N({b}) + N(none), all frozen
    higher order   = N(all, frozen) - N(none, frozen) - additive - interaction
    separable      = sum_b A[b] phi[b],  A = the request's mean routing weight, phi from the fit requests
    bias           = fit mean of (additive - separable),    separability = additive - separable - bias

so that total = bias + separable + separability + interaction + higher order + route change (the form of
arXiv 2609.12550's decomposition conditional on the reference's routes). Float64; nothing here knows a model:
N is a function, so the algebra is tested on made losses. `tasks/risk/swaps.py` gives N of a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import t as student

from tasks.console import track

Loss = Callable[[frozenset[int], Literal["frozen", "free"]], np.ndarray]  # -> [R] nats per token

TERMS = ("bias", "separable", "separability", "interaction", "higher_order", "route_change")
CONFIDENCE = 0.95
# Frozen routes and nothing swapped must give the reference's own loss; recorded routes do so to the bit.
REPLAY_NOISE = 1e-12


@dataclass(frozen=True)
class SwapTerms:
    """What the swaps measured, all [R] in nats per token, before anything is fitted."""

    total: np.ndarray  # [R]
    route_change: np.ndarray  # [R]
    single: np.ndarray  # [B, R]
    pairs: np.ndarray  # [m, R] second differences of the pairs that were swapped
    all_pairs: int  # B (B - 1) / 2; with fewer rows in `pairs` they are a random sample

    @property
    def sampled(self) -> bool:
        return len(self.pairs) < self.all_pairs

    @property
    def additive(self) -> np.ndarray:
        return self.single.sum(axis=0)

    @property
    def interaction(self) -> np.ndarray:
        """[R] the sum over all pairs; where they were sampled, the estimate of it."""
        return self.pairs.mean(axis=0) * self.all_pairs if self.sampled else self.pairs.sum(axis=0)

    @property
    def higher_order(self) -> np.ndarray:
        """[R] what is left; where pairs were sampled it also holds, with the other sign, their sampling error."""
        return self.total - self.route_change - self.additive - self.interaction

    def sampling_error(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Half width of the 95 % interval of `interaction` [R] from the sampling of pairs, 0 where all were
        swapped; with `rows`, that of its mean over those requests, a scalar array.

        Student's t over pairs drawn without replacement, hence the finite population's correction. Trust it
        with dozens of pairs: a few pairs may hold most of the sum.
        """
        values = self.pairs if rows is None else self.pairs[:, rows].mean(axis=1)
        if not self.sampled:
            return np.zeros(values.shape[1:])
        drawn = len(values)
        correction = np.sqrt(1 - drawn / self.all_pairs)
        quantile = student.ppf((1 + CONFIDENCE) / 2, drawn - 1)
        return quantile * self.all_pairs * correction * values.std(axis=0, ddof=1) / np.sqrt(drawn)


def swap_terms(loss: Loss, blocks: int, pairs: int | None = None, seed: int = 0) -> SwapTerms:
    """Ask `loss` for what the decomposition needs: 4 + B + pairs losses.

    `pairs`: how many of the B (B - 1) / 2 pairs to swap, drawn without replacement; None, or as many as there
    are: all of them. Raises ValueError for fewer than 2 sampled pairs, RuntimeError when frozen routes do not
    give the reference's own loss.
    """
    chosen = _chosen_pairs(blocks, pairs, seed)
    everything, nothing = frozenset(range(blocks)), frozenset()
    reference, frozen = _asked(loss, nothing, "free"), _asked(loss, nothing, "frozen")
    apart = float(np.abs(reference - frozen).max())
    if apart > REPLAY_NOISE * (1 + float(np.abs(reference).max())):
        raise RuntimeError(f"frozen routes alone change a loss by {apart} nats: they are not the reference's")
    instance, held = _asked(loss, everything, "free"), _asked(loss, everything, "frozen")
    # The pairs of a block right after it: a `loss` may resume a pair's pass from that of its lower block.
    order = [(block,) for block in range(blocks)] + chosen
    asked = {
        own: _asked(loss, frozenset(own), "frozen")
        for own in track(sorted(order), "swap blocks and pairs", len(order))
    }
    alone = np.stack([asked[(block,)] for block in range(blocks)])
    second = [asked[pair] - alone[list(pair)].sum(axis=0) + frozen for pair in chosen]
    return SwapTerms(
        total=instance - reference,
        route_change=instance - held,
        single=alone - frozen,
        pairs=np.stack(second) if second else np.zeros((0, len(reference))),
        all_pairs=blocks * (blocks - 1) // 2,
    )


def _asked(loss: Loss, blocks: frozenset[int], routes: Literal["frozen", "free"]) -> np.ndarray:
    return np.asarray(loss(blocks, routes), dtype=np.float64)


def _chosen_pairs(blocks: int, count: int | None, seed: int) -> list[tuple[int, int]]:
    every = blocks * (blocks - 1) // 2
    if count is None or count >= every:
        return list(combinations(range(blocks), 2))
    if count < 2:
        raise ValueError(f"{count} of {every} pairs are to be sampled; at least 2 give an interval")
    drawn = np.sort(np.random.default_rng(seed).choice(every, size=count, replace=False))
    start = np.cumsum([0, *range(blocks - 1, 0, -1)])  # of the pairs whose lower block is 0, 1, ...
    lower = np.searchsorted(start, drawn, side="right") - 1
    return [(int(a), int(a + 1 + place - start[a])) for a, place in zip(lower, drawn, strict=True)]


@dataclass(frozen=True)
class Decomposition:
    """The terms of every request, and what was fitted for them."""

    swaps: SwapTerms
    fragility: np.ndarray  # [B] phi, nats per unit of routing weight; 0 for the blocks in `unrouted`
    unrouted: int  # blocks without a phi, as no fit request routes to them: their damage is separability
    bias: float
    separable: np.ndarray  # [R]

    @property
    def separability(self) -> np.ndarray:
        return self.swaps.additive - self.separable - self.bias

    def terms(self) -> dict[str, np.ndarray]:
        """name -> [R], in the order of TERMS; they add up to `swaps.total`."""
        return {
            "bias": np.full(len(self.separable), self.bias),
            "separable": self.separable,
            "separability": self.separability,
            "interaction": self.swaps.interaction,
            "higher_order": self.swaps.higher_order,
            "route_change": self.swaps.route_change,
        }

    def frame(self) -> pd.DataFrame:
        """One row a request: total, additive, the terms, and the sampling error of interaction [nats]."""
        columns = {"total": self.swaps.total, "additive": self.swaps.additive, **self.terms()}
        return pd.DataFrame({**columns, "sampling_error": self.swaps.sampling_error()})


def decompose(
    swaps: SwapTerms, affinity: np.ndarray, fit: np.ndarray, fragility: np.ndarray | None = None
) -> Decomposition:
    """Split the additive part by the routing `affinity` A [B, R]; phi and bias come from the requests `fit`
    [R] bool alone.

    phi = (sum_r single) / (sum_r A) gives back the fit requests' sum of the additive part, so bias is then 0
    but for rounding. With a `fragility` [B] from elsewhere (`taylor`, say; NaN where unknown) it is not.
    Where a layer's routing weights add up to 1 and blocks are layers, A is 1 for every request: separable is
    then a constant, and all that differs between requests is separability.
    Raises ValueError without a fit request, or for an affinity of another shape.
    """
    if affinity.shape != swaps.single.shape:
        raise ValueError(f"affinity is {affinity.shape}, expected (blocks, requests) {swaps.single.shape}")
    if not fit.any():
        raise ValueError("no request to fit phi and bias on")
    if fragility is None:
        damage, weight = swaps.single[:, fit].sum(axis=1), affinity[:, fit].sum(axis=1)
        fragility = np.divide(damage, weight, out=np.full(len(weight), np.nan), where=weight > 0)
    unrouted = int(np.isnan(fragility).sum())
    fragility = np.nan_to_num(fragility)
    separable = fragility @ affinity
    bias = float((swaps.additive - separable)[fit].mean())
    return Decomposition(swaps, fragility, unrouted, bias, separable)


def term_figures(made: Decomposition, rows: np.ndarray, draws: np.ndarray) -> dict[str, object]:
    """The terms over the requests `rows` [n], holdout ones, and `draws` [B, n] of places in them, draws[0]
    being the sample itself (`tasks/risk/holdout.py`).

    Of each term: mean with its 95 % percentiles over the draws, std over requests, and share = covariance
    with the total over the total's variance: the part of the differences between requests that it makes
    (shares add up to 1). Where pairs were sampled, interaction and the rest have `sampling_error`, the half
    width of the mean's interval from that, and higher_order is called rest_with_sampling_error.
    Raises RuntimeError when the terms do not add up.
    """
    terms, total = made.terms(), made.swaps.total
    gap = float(np.abs(sum(terms.values()) - total).max())
    if gap > 1e-9 * (1 + float(np.abs(total).max())):
        raise RuntimeError(f"the terms miss the total by {gap} nats")
    figures: dict[str, object] = {"requests": len(rows), "unrouted_blocks": made.unrouted}
    spread = float(total[rows].var())
    shown = {"total": total, **terms}
    if made.swaps.sampled:
        shown["beyond_additive"] = terms["interaction"] + terms["higher_order"]
    for name, values in shown.items():
        own = values[rows]
        replicates = own[draws[1:]].mean(axis=1)
        figure = {"mean": float(own.mean()), "std": float(own.std())}
        if len(replicates):
            low, high = np.percentile(replicates, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
            figure |= {"mean_low": float(low), "mean_high": float(high)}
        if spread > 0:
            centred = total[rows] - total[rows].mean()
            figure["share"] = float(((own - own.mean()) * centred).mean()) / spread
        if made.swaps.sampled and name in ("interaction", "higher_order"):
            figure["sampling_error"] = float(made.swaps.sampling_error(rows))
            name = "rest_with_sampling_error" if name == "higher_order" else name
        figures[name] = figure
    figures["pairs"], figures["all_pairs"] = len(made.swaps.pairs), made.swaps.all_pairs
    return figures


def two_expert_terms(weight: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """The mean over tokens of D = a f1 + (1 - a) f2, exactly in three: E[(f1 + f2) / 2], (E[a] - 1/2)
    (E[f1] - E[f2]), and Cov(a, f1 - f2) (arXiv 2609.12550, the two-expert case).

    `weight` a [T] on the first expert, `first` f1 and `second` f2 [T] their damages on each token.
    """
    difference = first - second
    middle = float(((first + second) / 2).mean())
    separable = float((weight.mean() - 0.5) * difference.mean())
    covariance = float(((weight - weight.mean()) * (difference - difference.mean())).mean())
    return middle, separable, covariance
