"""Fragility phi[l, e] of every routed expert under an instance: its damage per unit of routing weight.

    swap             exact: sum_r single[b](r) / sum_r A[b](r) of tasks/risk/decomposition.py   nats
    taylor           from one pass of the reference and its gradients (`taylor_sums`)           nats
    output_error     mean norm of the expert's output error, by routing weight                  no unit
    router_row_norm  norm of the expert's router row over its layer's mean                      no unit

Routes are the reference's throughout. An expert without a token has no phi: NaN. The position-0 token is
where the attention sink sits; a few experts carry it, and a first-order estimate is far off there, so every
estimate comes with that token and without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.console import track
from tasks.moe.experts import Entered, Experts, run_experts
from tasks.moe.frozen import SwappableModel
from tasks.moe.registry import family_of, moe_layers
from tasks.risk.damage import DAMAGES
from tasks.risk.holdout import spearman
from tasks.risk.scoring import Requests
from tasks.risk.swaps import SwapLosses

ESTIMATORS = ("taylor", "output_error", "router_row_norm")  # judged against swap


@dataclass(frozen=True)
class Cost:
    """Tokens through the whole model."""

    forward_tokens: int = 0
    backward_tokens: int = 0


@dataclass(frozen=True)
class Fragility:
    """One estimate [L, E] and what it cost; NaN where an expert has no token."""

    phi: np.ndarray
    cost: Cost = field(default_factory=Cost)


def swap_fragility(losses: SwapLosses, layers: int, damage: str = "dnll") -> Fragility:
    """phi by one pass per expert over the requests of `losses`, whose level must be "expert"."""
    if losses.level != "expert":
        raise ValueError(f"the losses' blocks are at level '{losses.level}', expected 'expert'")
    loss, affinity = losses.loss(damage), losses.affinity().sum(axis=1)
    before = loss(frozenset(), "free")
    blocks = track(range(len(losses.blocks)), "swap experts", len(losses.blocks))
    single = np.array([float((loss(frozenset([block]), "frozen") - before).sum()) for block in blocks])
    phi = _per_weight(single, affinity)
    passes = 1 + len(losses.blocks)  # the reference's, and one for each expert
    return Fragility(phi.reshape(layers, -1), Cost(passes * sum(map(len, losses.sequences))))


@dataclass(frozen=True)
class TaylorSums:
    """What one pass over the requests and its gradients tell of every expert: [2, L, E], position 0 first
    counted, then not."""

    linear: np.ndarray  # nats, summed over requests
    square: np.ndarray
    error: np.ndarray  # sum over tokens of weight x norm of the output error
    weight: np.ndarray  # sum over tokens of the routing weight
    affinity: np.ndarray  # sum over requests of A
    cost: Cost

    def taylor(self, damage: str, first: bool) -> Fragility:
        """linear + square for "dnll"; for "kl", whose gradient is zero at the reference, the square alone."""
        if damage not in DAMAGES:
            raise ValueError(f"damage is '{damage}', expected one of {DAMAGES}")
        nats = self.square + (self.linear if damage == "dnll" else 0.0)
        row = 0 if first else 1
        return Fragility(_per_weight(nats[row], self.affinity[row]), self.cost)

    def output_error(self, first: bool) -> Fragility:
        """Needs no gradient: its cost is the forward pass alone."""
        row = 0 if first else 1
        return Fragility(_per_weight(self.error[row], self.weight[row]), Cost(self.cost.forward_tokens))


def taylor_sums(
    reference: PreTrainedModel,
    instance: PreTrainedModel,
    requests: Requests,
    probes: int = 1,
    seed: int = 0,
) -> TaylorSums:
    """Second-order estimates of single[b], the rise of the mean response loss when one expert is swapped.

    With d(t) = routing weight x (the instance's output - the reference's output) of an expert on token t,
    and the gradient taken at the output of its MoE layer, routes frozen:
        linear = sum_t <grad of the mean loss, d(t)>
        square = 1/(2n) (sum_t <grad of sum_s sign(s) NLL(y_s), d(t)>)^2,
    the Gauss-Newton term: labels y_s drawn from the reference's own distribution and random signs make its
    mean over draws the quadratic form of the softmax's Fisher matrix, which is the Hessian of the loss but
    for the network's own curvature (Martens 2020, arXiv:1412.1193, section 9). `probes` draws a request; one
    is noisy for a request and averages out over many. Cost: one forward pass, 1 + probes backward passes.
    """
    models = SwappableModel(reference, instance)
    layers, experts = models.size
    if probes < 1:
        raise ValueError(f"probes is {probes}, expected 1 or more")
    sums = np.zeros((5, 2, layers, experts))  # linear, square, error, weight, affinity
    generator = torch.Generator().manual_seed(seed)
    tokens = 0
    pairs = list(zip(requests.sequences, requests.prompt_length.tolist(), strict=True))
    for sequence, prompt in track(pairs, "taylor", len(pairs)):
        run = _Differentiated(models, sequence, max(prompt - 1, 1))
        tokens += len(sequence)
        draws = [run.drawn(generator) for _ in range(probes)]
        for layer in range(layers):
            sums[:, :, layer] += run.sums(layer, draws)
    return TaylorSums(*sums, cost=Cost(tokens, tokens * (1 + probes)))


def router_row_norm(model: PreTrainedModel) -> Fragility:
    """[L, E] norm of each expert's router row over its layer's mean; free."""
    norm = (
        torch.stack([layer.router_rows().double().norm(dim=1) for layer in moe_layers(model)]).cpu().numpy()
    )
    return Fragility(norm / norm.mean(axis=1, keepdims=True))


def agreement(swap: np.ndarray, estimate: np.ndarray, same_unit: bool) -> dict[str, object]:
    """Rank correlation of an estimate [L, E] with `swap` [L, E]: by layer, their mean, and over all experts.

    With `same_unit` also `worst_factor`: by how much the estimate is off, one way or the other, at the most
    fragile expert of a layer, in the layer where it is worst; `wrong_sign` counts layers where even its sign
    differs there (they have no factor). Undefined figures are absent.
    """
    by_layer = {}
    for layer, pair in enumerate(zip(swap, estimate, strict=True)):
        value = _rank_correlation(*pair)
        if value is not None:
            by_layer[str(layer)] = value
    figures: dict[str, object] = {"layers": by_layer}
    if by_layer:
        figures["mean"] = float(np.mean(list(by_layer.values())))
    overall = _rank_correlation(swap.ravel(), estimate.ravel())
    if overall is not None:
        figures["all"] = overall
    if same_unit:
        routed = np.flatnonzero(~np.isnan(swap).all(axis=1))
        top = np.nanargmax(np.abs(swap[routed]), axis=1)
        ratio = estimate[routed, top] / swap[routed, top]
        positive = ratio[ratio > 0]
        figures["wrong_sign"] = int((ratio < 0).sum())
        if len(positive):
            figures["worst_factor"] = float(np.exp(np.abs(np.log(positive)).max()))
    return figures


class _Differentiated:
    """One request's pass through the reference, differentiated at the outputs of its MoE layers."""

    def __init__(self, models: SwappableModel, sequence: list[int], first: int) -> None:
        """`first`: the first scored prediction."""
        self._models, self._read = models, len(sequence) - 1  # the last token predicts nothing
        self._entered: list[Entered] = []
        self._zeros: list[torch.Tensor] = []
        model: Any = models.reference
        for layer in models.layers:
            layer.experts.install(partial(self._run, layer.experts))
        try:
            with torch.enable_grad():
                ids = torch.tensor([sequence], device=model.device)
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, first:-1]
                self._log_model = family_of(model.config).head(model, hidden).double().log_softmax(dim=-1)
        finally:
            for layer in models.layers:
                layer.experts.install(None)
        self._scored = self._read - first
        self.loss = self.gradients(ids[0, first + 1 :], torch.full((self._scored,), 1 / self._scored))

    def _run(
        self, experts: Experts, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        index, weight = index.detach(), weight.detach()  # frozen routes: no gradient through the router
        self._entered.append((hidden.detach(), index, weight))
        output = run_experts(experts, hidden, index, weight)
        self._zeros.append(torch.zeros_like(output, requires_grad=True))
        return output + self._zeros[-1]

    def gradients(self, labels: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """[L] x [T, H] gradients of the sum of `weights` [n] times the losses of `labels` [n]."""
        with torch.enable_grad():
            losses = -self._log_model.gather(1, labels[:, None])[:, 0]
            return list(torch.autograd.grad((losses * weights).sum(), self._zeros, retain_graph=True))

    def drawn(self, generator: torch.Generator) -> list[torch.Tensor]:
        """`gradients` for labels drawn from the reference's distribution and random signs."""
        labels = torch.multinomial(self._log_model.detach().exp().cpu(), 1, generator=generator)[:, 0]
        signs = torch.randint(2, (self._scored,), generator=generator) * 2.0 - 1
        return self.gradients(labels.to(self._log_model.device), signs.to(self._log_model))

    def sums(self, layer: int, draws: list[list[torch.Tensor]]) -> np.ndarray:
        """[5, 2, E] the terms of TaylorSums for one layer."""
        hidden, index, weight = (tensor[: self._read] for tensor in self._entered[layer])
        own, other = self._models.layers[layer].experts, self._models.others[layer].experts
        sums = np.zeros((5, 2, own.num_experts))
        for expert in range(own.num_experts):
            token, pick = torch.nonzero(index == expert, as_tuple=True)
            if not len(token):
                continue
            with torch.no_grad():
                rows, given = hidden[token], weight[token, pick].double()
                error = _output(other, expert, rows) - _output(own, expert, rows)
            moved = given[:, None] * error  # [n, H]

            def along(gradients: list[torch.Tensor], token=token, moved=moved) -> torch.Tensor:
                return (gradients[layer][token].double() * moved).sum(dim=1)

            counted = (slice(None), token > 0)
            linear, drawn = along(self.loss), [along(gradients) for gradients in draws]
            for row, kept in enumerate(counted):
                squares = [float(value[kept].sum()) ** 2 for value in drawn]
                routed = float(given[kept].sum())
                sums[:, row, expert] = (
                    float(linear[kept].sum()),
                    sum(squares) / (2 * self._scored * len(draws)),
                    float(moved[kept].norm(dim=1).sum()),
                    routed,
                    routed / self._read,
                )
        return sums


def _output(experts: Experts, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    return experts.output(expert, experts.inner(expert, hidden)).double()


def _per_weight(damage: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """damage / weight, NaN where there is no weight."""
    return np.where(weight > 0, damage / np.where(weight > 0, weight, 1.0), np.nan)


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Of the places where both are known; None for fewer than 3, or where either is constant."""
    known = ~(np.isnan(x) | np.isnan(y))
    if known.sum() < 3:
        return None
    value = float(spearman(x[None, known], y[None, known])[0])
    return None if np.isnan(value) else value
