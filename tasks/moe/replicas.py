"""Physical experts: a variant's originals and replicas, each run with its own weights, tokens counted.

A logical expert e of m has the physical copies p with physical_to_logical[p] = e. The router picks logical
experts; dispatch picks the copy. A token's outputs are summed in the order of its logical experts, as in the
plain model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.dispatch import DISPATCHES
from tasks.moe.fused import expert_matrices, run_expert
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tokens import BatchTokens, TokenWatch

REPLICATED = "expertpool_replicated"

# Weights of physical experts: [position of the MoE layer][physical expert][matrix name] -> [out, in].
PhysicalWeights = Mapping[int, Mapping[int, Mapping[str, torch.Tensor]]]


class _PhysicalStack:
    """Stands in for the experts module with [m + r, ...] weights; the rest is the module's own."""

    def __init__(self, experts: nn.Module, physical_to_logical: list[int]) -> None:
        self._experts: Any = experts
        names = ("gate_up_proj", "down_proj") if self._experts.has_gate else ("up_proj", "down_proj")
        for name in names:
            original = getattr(experts, name)
            stack = nn.Parameter(original.data[physical_to_logical], requires_grad=False)
            setattr(self, name, stack)
            # The module keeps a view of the first m, so that the logical experts are stored once.
            setattr(experts, name, nn.Parameter(stack.data[: len(original)], requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class PhysicalExperts:
    """The physical experts of one MoE layer and the tokens that each has computed."""

    def __init__(self, layer: MoELayer, plan: LayerPlan, rule: str, seed: int, watch: TokenWatch) -> None:
        self.plan = plan
        self.load = np.zeros(len(plan.physical_to_logical), dtype=np.int64)  # [m + r] tokens computed
        self.stack = _PhysicalStack(layer.experts, plan.physical_to_logical)
        self._dispatch, self._seed, self._watch = DISPATCHES[rule], seed, watch
        logical = np.array(plan.physical_to_logical)
        self._copies = np.bincount(logical, minlength=layer.num_experts)  # [m]
        # [m + r] physical experts by logical expert, then by number; [m] where an expert's copies start in it
        self._order = np.argsort(logical, kind="stable")
        self._first = np.cumsum(self._copies) - self._copies

    def matrices(self) -> dict[str, torch.Tensor]:
        """[m + r, out, in] views per matrix name; writing to one writes to the physical experts."""
        return expert_matrices(self.stack)  # type: ignore[arg-type]

    def choose(self, index: np.ndarray, tokens: BatchTokens) -> np.ndarray:
        """Physical experts of the picks [N, k] of logical experts by the N real tokens: [N, k]."""
        return self._order[self._places(index, tokens)]

    def run(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], index and weight [N, k] -> [N, H]; padding is not computed and gets zeros."""
        tokens = self._watch.of(len(hidden))
        rows = tokens.real.nonzero()[:, 0]
        flat = torch.from_numpy(self._places(index[rows].cpu().numpy(), tokens).reshape(-1))
        order = torch.argsort(flat, stable=True)
        row, weights = rows[order // index.shape[1]], weight[rows].reshape(-1)[order, None]
        total = torch.zeros_like(hidden)
        start = 0
        for place, count in enumerate(torch.bincount(flat, minlength=len(self._order)).tolist()):
            if count:
                own, physical = slice(start, start + count), int(self._order[place])
                output = run_expert(self.stack, physical, hidden[row[own]])  # type: ignore[arg-type]
                total.index_add_(0, row[own], (output * weights[own]).to(total.dtype))
                self.load[physical] += count
                start += count
        return total

    def _places(self, index: np.ndarray, tokens: BatchTokens) -> np.ndarray:
        """Places in `_order` for the picks [N, k] of the N real tokens."""
        real = tokens.real.cpu().numpy()
        request, position = tokens.request[real][:, None], tokens.position[real][:, None]
        copy = self._dispatch(self._seed, self.plan.layer, request, position, self._copies[index])
        return self._first[index] + copy


def _replicated_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    physical: PhysicalExperts = experts.physical  # type: ignore[assignment]
    return physical.run(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(REPLICATED, _replicated_forward)


def model_hash(model: PreTrainedModel) -> str:
    """sha256 of what a plan depends on: the family, its size, and the shape of every MoE layer."""
    config = model.config
    shape = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "moe": [
            [
                layer.layer,
                layer.top_k,
                {name: list(view.shape) for name, view in sorted(layer.matrices().items())},
            ]
            for layer in moe_layers(model)
        ],
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def check_plan(model: PreTrainedModel, plan: ReplicationPlan, origin: str) -> None:
    """Raise InputError unless `plan` was made for this model and each logical expert has a copy."""
    if plan.model_hash != model_hash(model):
        raise InputError(
            f"{origin}: the plan was made for another model: got model_hash {plan.model_hash[:12]}..., "
            f"expected {model_hash(model)[:12]}...; build the variant from this reference"
        )
    if plan.dispatch not in DISPATCHES:
        raise InputError(f"{origin}: dispatch is '{plan.dispatch}', expected one of {sorted(DISPATCHES)}")
    for layer, own in zip(moe_layers(model), plan.layers, strict=True):
        expected = list(range(layer.num_experts))
        extra = own.physical_to_logical[layer.num_experts :]
        if own.layer != layer.layer or own.physical_to_logical[: layer.num_experts] != expected:
            raise InputError(
                f"{origin}: layer {own.layer} does not list its {layer.num_experts} experts first"
            )
        if len(own.bits) != len(own.physical_to_logical) or not set(extra) <= set(expected):
            raise InputError(f"{origin}: layer {own.layer} has {len(own.bits)} widths for replicas {extra}")


def install_physical_experts(model: PreTrainedModel, plan: ReplicationPlan, weights: PhysicalWeights) -> None:
    """Turn a loaded reference into the variant `plan` in place.

    `weights` holds the stored weights of the physical experts that differ from the reference's; the others
    compute with their logical expert's. Call it once per loaded model.
    """
    check_plan(model, plan, "plan")
    watch = TokenWatch(model)
    for position, (layer, own) in enumerate(zip(moe_layers(model), plan.layers, strict=True)):
        physical = PhysicalExperts(layer, own, plan.dispatch, plan.seed, watch)
        views = physical.matrices()
        for expert, matrices in weights.get(position, {}).items():
            for name, matrix in matrices.items():
                views[name][expert].copy_(matrix)
        layer.experts.physical = physical  # type: ignore[assignment]
    model.set_experts_implementation(REPLICATED)


def physical_experts(model: PreTrainedModel) -> list[PhysicalExperts]:
    """The physical experts of a variant's MoE layers, in depth order."""
    return [layer.experts.physical for layer in moe_layers(model)]  # type: ignore[misc]


def physical_load(model: PreTrainedModel) -> list[np.ndarray]:
    """[L] x [m + r] tokens that each physical copy computed since the last `reset_physical_load`."""
    return [physical.load.copy() for physical in physical_experts(model)]


def reset_physical_load(model: PreTrainedModel) -> None:
    for physical in physical_experts(model):
        physical.load[:] = 0
