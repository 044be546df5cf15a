"""Fragility-weighted perplexity (FWP): a prompt's perplexity in which weakly routed tokens weigh more.

    strength(t) = mean of s[l, e](t) over all layers l and the experts e that token t selected in l
    w(t)        = 1 / strength(t),      w~(t) = w(t) / mean_t w(t)
    FWP(r)      = exp(mean_t w~(t) NLL(t))        over the T predicted prompt tokens t of request r

arXiv 2609.12550; the paper leaves the strength s open, so there are two (`STRENGTHS`), and a third weighting of
our own, `MEASURED`: w(t) = sum over l, e of g[l, e](t) max(phi[l, e], 0), with g the routing weights and phi an
instance's fragility in nats, so that FWP is the instance's own. Everything is float64 and vectorised over
requests by segments: request r owns values offset[r] : offset[r + 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.contracts import PrefillRouting, TokenScores

STRENGTHS = ("gate_prob", "router_row_norm")
MEASURED = "measured"
ALIGNMENTS = ("token", "predictor")

# Below this spread of w~ a strength is constant for all practical purposes, and FWP is the plain perplexity.
EQUALS_PPL_STD = 1e-3


@dataclass(frozen=True)
class PromptTokens:
    """The scored prompt tokens of all requests, prompt length - 2 of each where all exist (`prompt_tokens`)."""

    offset: np.ndarray  # [R + 1] into M
    nll: np.ndarray  # [M] nats, of the token
    position: np.ndarray  # [M] the prefilled token whose routing weighs it, an index into PrefillRouting's T


def prompt_tokens(scores: TokenScores, routing: PrefillRouting, align: str) -> PromptTokens:
    """Pair every predicted prompt token with a prefilled position, whose routing gives its weight.

    `align` "token": the position of the token itself; "predictor": the position before, from which it is
    predicted. The prediction made from position 0 is left out, so a prompt of P tokens has P - 2; of an
    encoder-decoder, the tokens that the encoder reads are not predicted.
    Raises ValueError where routing and scores do not have the same prompts, or a prompt has fewer than 3
    tokens.
    """
    if align not in ALIGNMENTS:
        raise ValueError(f"align is '{align}', expected one of {ALIGNMENTS}")
    length = np.asarray(scores.prompt_length, dtype=np.int64)
    if not np.array_equal(np.diff(routing.offset.astype(np.int64)), length):
        raise ValueError("the routing and the scores are not of the same prompts: their lengths differ")
    scored_from = np.ones_like(length) if scores.first is None else scores.first.astype(np.int64)
    count = length - 1 - scored_from
    if (count < 1).any():
        short = length[count.argmin()]
        raise ValueError(f"a prompt of {short} tokens has no scored prediction; at least 3 are needed")
    offset = np.concatenate([[0], np.cumsum(count)])
    step = np.arange(offset[-1]) - np.repeat(offset[:-1], count)  # 0 .. T - 1 within each request
    prediction = np.repeat(scores.offset[:-1].astype(np.int64) + scored_from, count) + step
    first = scored_from + (1 if align == "token" else 0)
    position = np.repeat(routing.offset[:-1].astype(np.int64) + first, count) + step
    return PromptTokens(offset, scores.nll[prediction].astype(np.float64), position)


def token_strength(routing: PrefillRouting, name: str) -> np.ndarray:
    """Routing strength of every prefilled token [T], the mean over the layers it passes and selected experts.

    `gate_prob`: softmax over all experts before any renormalisation over the selected ones (after it, models
    with norm_topk_prob have mean exactly 1/k and FWP is PPL). `router_row_norm`: the norm of the selected
    expert's router row over its layer's mean norm.
    """
    if name == "gate_prob":
        chosen = routing.gate_prob.astype(np.float64)
    elif name == "router_row_norm":
        layer = np.arange(routing.index.shape[1])[None, :, None]
        chosen = routing.router_row_norm.astype(np.float64)[layer, routing.index]
    else:
        raise ValueError(f"strength is '{name}', expected one of {STRENGTHS}")
    return mean_over_picks(chosen, routing.visited)


def mean_over_picks(values: np.ndarray, visited: np.ndarray | None) -> np.ndarray:
    """Mean of `values` [T, L, k] over a token's picks in the layers that it passes, `visited` [T, L]: [T].

    A pick that its expert dropped counts: it is the router's choice that is weighed.
    """
    if visited is None:
        return values.mean(axis=(1, 2))
    if not visited.any(axis=1).all():
        raise ValueError("a token passes no MoE layer, so it has no routing strength")
    return (values.mean(axis=2) * visited).sum(axis=1) / visited.sum(axis=1)


def segment_mean(values: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Mean of `values` [M] over each segment [R]; raises ValueError on an empty segment."""
    count = np.diff(offset)
    if (count < 1).any():
        raise ValueError(f"segment {int(np.argmin(count))} is empty")
    return np.add.reduceat(np.asarray(values, dtype=np.float64), offset[:-1]) / count


def expected_damage(routing: PrefillRouting, phi: np.ndarray) -> np.ndarray:
    """sum over l, e of g[l, e](t) phi[l, e] of every prefilled token [T]; `phi` [L, E] nats per routing weight.

    A pick that reached no expert has weight 0. Raises ValueError where `phi` is of another model.
    """
    if phi.shape != routing.router_row_norm.shape:
        raise ValueError(f"phi is {phi.shape}, the routing's model has {routing.router_row_norm.shape}")
    damage = np.zeros(len(routing.index))
    for layer, own in enumerate(phi):  # one layer at a time: [T, L, k] float64 would be large
        damage += (routing.weight[:, layer].astype(np.float64) * own[routing.index[:, layer]]).sum(axis=1)
    return damage


def separable(routing: PrefillRouting, phi: np.ndarray) -> np.ndarray:
    """sum_b A_prompt[b](r) phi[b] of every request [R], nats: A_prompt[b] is the mean over all prompt tokens of
    the routing weight of expert b. What the prompt's routing alone says about the damage (method, section 3)."""
    return segment_mean(expected_damage(routing, phi), routing.offset.astype(np.int64))


def measured_weight(routing: PrefillRouting, phi: np.ndarray) -> np.ndarray:
    """w(t) of the strength `MEASURED` [T], 0 or more."""
    return expected_damage(routing, np.maximum(phi, 0.0))


def token_weights(strength: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """w~ [M]: the inverse of `strength` [M], scaled to mean 1 within each request."""
    strength = np.asarray(strength, dtype=np.float64)
    if not (strength > 0).all() or not np.isfinite(strength).all():
        raise ValueError("a routing strength is not a positive finite number")
    return normalised(1.0 / strength, offset)


def normalised(weight: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """w~ [M]: `weight` [M] >= 0 scaled to mean 1 within each request; 1 for a request whose weights are all 0."""
    weight = np.asarray(weight, dtype=np.float64)
    mean, count = segment_mean(weight, offset), np.diff(offset)
    return np.where(np.repeat(mean > 0, count), weight / np.repeat(np.where(mean > 0, mean, 1), count), 1.0)


def weighted_log_ppl(nll: np.ndarray, weight: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """mean_t w~(t) NLL(t) [R] of losses `nll` [M] in nats and w~ [M]."""
    return segment_mean(weight * np.asarray(nll, dtype=np.float64), offset)


def log_fwp(nll: np.ndarray, strength: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """log FWP [R] of the losses `nll` [M] in nats and the strengths [M] of the tokens that weigh them."""
    return weighted_log_ppl(nll, token_weights(strength, offset), offset)


def fwp(nll: np.ndarray, strength: np.ndarray) -> float:
    """FWP of one request: `nll` [T] nats and `strength` [T] > 0."""
    return float(np.exp(log_fwp(nll, strength, np.array([0, len(nll)]))[0]))


def weight_report(tokens: PromptTokens, weight: np.ndarray) -> dict[str, float | bool]:
    """How far FWP with the token weights w~ `weight` [M] is from plain perplexity on these prompts.

    std_weight: standard deviation of w~ over all tokens; correlation_log_ppl: Pearson correlation of log FWP
    with log PPL over requests (absent where either is constant); equals_ppl: std_weight < 1e-3.
    """
    std = float(weight.std())
    report: dict[str, float | bool] = {"std_weight": std, "equals_ppl": std < EQUALS_PPL_STD}
    weighted, plain = (
        weighted_log_ppl(tokens.nll, weight, tokens.offset),
        segment_mean(tokens.nll, tokens.offset),
    )
    if min(weighted.std(), plain.std()) > 0:
        report["correlation_log_ppl"] = float(np.corrcoef(weighted, plain)[0, 1])
    return report


def strength_report(tokens: PromptTokens, strength: np.ndarray) -> dict[str, float | bool]:
    """`weight_report` of FWP under `strength` [T] of every prefilled token."""
    return weight_report(tokens, token_weights(strength[tokens.position], tokens.offset))
