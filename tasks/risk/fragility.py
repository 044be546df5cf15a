"""Fragility phi[l, e] of every routed expert under an instance: its damage per unit of routing weight.

    swap             exact: sum_r single[b](r) / sum_r A[b](r) of tasks/risk/decomposition.py   nats
    taylor           from one pass of the reference and its gradients (`estimate_sums`)         nats
    output_error     mean norm of the expert's output error, by routing weight                  no unit
    router_row_norm  norm of the expert's router row over its layer's mean                      no unit

Routes are the reference's throughout. An expert without a token has no phi: NaN. The position-0 token is
where the attention sink sits; a few experts carry it, and a first-order estimate is far off there, so every
estimate comes with that token and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe.experts import Entered, Experts, run_experts
from tasks.moe.frozen import SwappableModel
from tasks.moe.registry import family_of, moe_layers
from tasks.risk.damage import DAMAGES
from tasks.risk.holdout import spearman
from tasks.risk.scoring import Requests
from tasks.risk.swaps import SwapLosses


@dataclass(frozen=True)
class Cost:
    """Tokens through the whole model."""

    forward_tokens: float = 0
    backward_tokens: float = 0


@dataclass(frozen=True)
class Estimate:
    """One fragility [L, E] and what it cost; NaN where an expert has no token."""

    phi: np.ndarray
    cost: Cost = field(default_factory=Cost)


def swap_fragility(losses: SwapLosses, layers: Sequence[int], damage: str) -> Estimate:
    """phi [L, E] by one run per expert of the MoE layers `layers`, NaN in the others; the level of `losses`
    must be "expert". The cost is that of these runs and of the reference's."""
    if losses.level != "expert":
        raise ValueError(f"the losses' blocks are at level '{losses.level}', expected 'expert'")
    loss, affinity = losses.loss(damage), losses.affinity().sum(axis=1)
    before, paid = loss(frozenset(), "free"), losses.forward_tokens
    places = np.array([layer for layer, _ in losses.blocks])
    single = np.full(len(losses.blocks), np.nan)
    chosen = np.flatnonzero(np.isin(places, layers)).tolist()
    for block in track(chosen, "swap experts", len(chosen)):
        single[block] = float((loss(frozenset([block]), "frozen") - before).sum())
    cost = losses.forward_tokens - paid + sum(map(len, losses.sequences))
    return Estimate(_per_weight(single, affinity).reshape(int(places.max()) + 1, -1), Cost(cost))


@dataclass(frozen=True)
class Differentiated:
    """One request's pass through the reference, differentiated at the outputs of its MoE layers: n tokens that
    predict something."""

    entered: list[Entered]  # [L] hidden [n, H], index and weight [n, k]
    loss: list[torch.Tensor]  # [L] x [n, H] gradient of the mean loss
    drawn: list[list[torch.Tensor]]  # [probes] [L] x [n, H] gradients for drawn labels and signs
    scored: int


@dataclass(frozen=True)
class Gradients:
    """What every instance's Taylor estimate needs of the reference: 2 + probes arrays [T, L, H] in its dtype,
    on its device."""

    passes: list[Differentiated]
    cost: Cost


def reference_gradients(
    reference: PreTrainedModel, requests: Requests, probes: int = 1, seed: int = 0
) -> Gradients:
    """One forward pass over the requests and 1 + `probes` backward passes; see `estimate_sums`.

    Raises InputError on a loss that is no number, ValueError without a probe.
    """
    if probes < 1:
        raise ValueError(f"probes is {probes}, expected 1 or more")
    generator = torch.Generator().manual_seed(seed)
    pairs = list(zip(requests.sequences, requests.prompt_length.tolist(), strict=True))
    tokens = sum(map(len, requests.sequences))
    passes = []
    for (sequence, prompt), name in zip(track(pairs, "gradients", len(pairs)), requests.ids, strict=True):
        run = _Pass(reference, sequence, max(prompt - 1, 1))
        if not bool(torch.isfinite(run.probability).all()):
            raise InputError(
                f"the reference's loss of sequence '{name}' is not a finite number; the checkpoint is broken"
            )
        passes.append(run.differentiated(probes, generator))
    return Gradients(passes, Cost(tokens, tokens * (1 + probes)))


@dataclass(frozen=True)
class EstimateSums:
    """What requests tell of every expert under one instance: [2, L, E], position 0 first counted, then not."""

    linear: np.ndarray  # nats, summed over requests
    square: np.ndarray
    error: np.ndarray  # sum over tokens of weight x norm of the output error
    weight: np.ndarray  # sum over tokens of the routing weight
    affinity: np.ndarray  # sum over requests of A
    requests: int

    def __add__(self, other: EstimateSums) -> EstimateSums:
        names = [own.name for own in fields(self)]
        return EstimateSums(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def nats(self, damage: str, first: bool = True) -> np.ndarray:
        """[L, E] the estimated sum over requests of single[b]: linear + square for "dnll"; for "kl", whose
        gradient is zero at the reference, the square alone."""
        if damage not in DAMAGES:
            raise ValueError(f"damage is '{damage}', expected one of {DAMAGES}")
        return (self.square + (self.linear if damage == "dnll" else 0.0))[0 if first else 1]

    def taylor(self, damage: str, first: bool = True) -> np.ndarray:
        """phi [L, E] nats per unit of routing weight, NaN without a token."""
        return _per_weight(self.nats(damage, first), self.affinity[0 if first else 1])

    def output_error(self, first: bool = True) -> np.ndarray:
        """phi [L, E], NaN without a token; needs no gradient, only what enters the experts."""
        row = 0 if first else 1
        return _per_weight(self.error[row], self.weight[row])


def estimate_sums(
    gradients: Sequence[Differentiated], reference: PreTrainedModel, instance: PreTrainedModel
) -> EstimateSums:
    """Second-order estimates of single[b], the rise of the mean response loss when one expert is swapped, and
    the sizes of output errors. Computes both models' experts on their tokens, and no pass.

    With d(t) = routing weight x (the instance's output - the reference's output) of an expert on token t,
    and the gradient taken at the output of its MoE layer, routes frozen:
        linear = sum_t <grad of the mean loss, d(t)>
        square = 1/(2n) (sum_t <grad of sum_s sign(s) NLL(y_s), d(t)>)^2,
    the Gauss-Newton term: labels y_s drawn from the reference's own distribution and random signs make its
    mean over draws the quadratic form of the softmax's Fisher matrix, which is the Hessian of the loss but
    for the network's own curvature (Martens 2020, arXiv:1412.1193, section 9). One draw is noisy for a
    request and averages out over many.
    """
    models = SwappableModel(reference, instance)
    layers, experts = models.size
    sums = np.zeros((5, 2, layers, experts))  # linear, square, error, weight, affinity
    for run in track(gradients, "fragility", len(gradients)):
        for layer in range(layers):
            sums[:, :, layer] += _sums(run, layer, models)
    return EstimateSums(*sums, requests=len(gradients))


def router_row_norm(model: PreTrainedModel) -> np.ndarray:
    """[L, E] norm of each expert's router row over its layer's mean; free."""
    norm = (
        torch.stack([layer.router_rows().double().norm(dim=1) for layer in moe_layers(model)]).cpu().numpy()
    )
    return norm / norm.mean(axis=1, keepdims=True)


def agreement(
    swap: np.ndarray, estimate: np.ndarray, same_unit: bool, layers: Sequence[int]
) -> dict[str, object]:
    """Rank correlation of an estimate [L, E] with `swap` [L, E]: by layer, named by `layers` [L], their mean,
    and over all experts. Experts of which either is NaN are left out, and so are layers without any.

    With `same_unit` also `worst_factor`: by how much the estimate is off, one way or the other, at the most
    fragile expert of a layer, in the layer where it is worst; `wrong_sign` counts layers where even its sign
    differs there (they have no factor). Undefined figures are absent.
    """
    by_layer = {}
    for layer, own, other in zip(layers, swap, estimate, strict=True):
        value = _rank_correlation(own, other)
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


class _Pass:
    """One request's pass through the reference, with its graph."""

    def __init__(self, model: Any, sequence: list[int], first: int) -> None:
        """`first`: the first scored prediction."""
        self._read = len(sequence) - 1  # the last token predicts nothing
        self._entered: list[Entered] = []
        self._zeros: list[torch.Tensor] = []
        layers = moe_layers(model)
        for layer in layers:
            layer.experts.install(partial(self._run, layer.experts))
        try:
            with torch.enable_grad():
                ids = torch.tensor([sequence], device=model.device)
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, first:-1]
                self._logits = family_of(model.config).head(model, hidden)  # [s, V]
        finally:
            for layer in layers:
                layer.experts.install(None)
        self.probability = self._logits.detach().softmax(dim=-1)  # [s, V]
        self._scored, self._targets = self._read - first, ids[0, first + 1 :]

    def _run(
        self, experts: Experts, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        index, weight = index.detach(), weight.detach()  # frozen routes: no gradient through the router
        self._entered.append((hidden.detach(), index, weight))
        output = run_experts(experts, hidden, index, weight)
        self._zeros.append(torch.zeros_like(output, requires_grad=True))
        return output + self._zeros[-1]

    def differentiated(self, probes: int, generator: torch.Generator) -> Differentiated:
        mean = torch.full((self._scored,), 1 / self._scored, dtype=torch.float64)
        loss = self._gradients(self._targets, mean)
        drawn = [self._drawn(generator) for _ in range(probes)]
        entered = [
            (hidden[: self._read].clone(), index[: self._read].clone(), weight[: self._read].clone())
            for hidden, index, weight in self._entered
        ]
        return Differentiated(entered, loss, drawn, self._scored)

    def _gradients(self, labels: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """[L] x [n, H] gradients of the sum of `weights` [s] times the losses of `labels` [s]; at the logits
        that of one loss is p - 1 at its label."""
        at_logits = self.probability.clone()
        at_logits.scatter_add_(1, labels[:, None], torch.full_like(at_logits[:, :1], -1.0))
        at_logits *= weights[:, None].to(at_logits)
        found = torch.autograd.grad(self._logits, self._zeros, at_logits, retain_graph=True)
        return [gradient[: self._read].clone() for gradient in found]

    def _drawn(self, generator: torch.Generator) -> list[torch.Tensor]:
        """`_gradients` for labels drawn from the reference's distribution and random signs."""
        labels = torch.multinomial(self.probability.cpu(), 1, generator=generator)[:, 0]
        signs = torch.randint(2, (self._scored,), generator=generator, dtype=torch.int64) * 2.0 - 1
        return self._gradients(labels.to(self.probability.device), signs)


def _sums(run: Differentiated, layer: int, models: SwappableModel) -> np.ndarray:
    """[5, 2, E] the terms of EstimateSums for one layer and request."""
    hidden, index, weight = run.entered[layer]
    own, other = models.layers[layer].experts, models.others[layer].experts
    sums = np.zeros((5, 2, own.num_experts))
    for expert in range(own.num_experts):
        token, pick = torch.nonzero(index == expert, as_tuple=True)
        if not len(token):
            continue
        with torch.no_grad():
            rows, given = hidden[token], weight[token, pick].double()
            moved = given[:, None] * (_output(other, expert, rows) - _output(own, expert, rows))  # [n, H]

        def along(gradients: list[torch.Tensor], token=token, moved=moved) -> torch.Tensor:
            return (gradients[layer][token].double() * moved).sum(dim=1)

        linear, drawn = along(run.loss), [along(gradients) for gradients in run.drawn]
        for row, kept in enumerate((slice(None), token > 0)):
            squares = [float(value[kept].sum()) ** 2 for value in drawn]
            routed = float(given[kept].sum())
            sums[:, row, expert] = (
                float(linear[kept].sum()),
                sum(squares) / (2 * run.scored * len(drawn)),
                float(moved[kept].norm(dim=1).sum()),
                routed,
                routed / len(hidden),
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
