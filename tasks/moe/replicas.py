"""Physical experts: a variant's originals and replicas, each run with its own weights, tokens counted.

A logical expert e of m has the physical copies p with physical_to_logical[p] = e. The router picks logical
experts; dispatch picks the copy. A token's outputs are summed in the order of its logical experts, as in the
plain model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.dispatch import DISPATCHES
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tokens import BatchTokens, TokenWatch

# Weights of physical experts: [position of the MoE layer][physical expert][matrix name] -> [out, in].
PhysicalWeights = Mapping[int, Mapping[int, Mapping[str, torch.Tensor]]]


class PhysicalExperts:
    """The physical experts of one MoE layer and the tokens that each has computed."""

    def __init__(self, layer: MoELayer, plan: LayerPlan, rule: str, seed: int, watch: TokenWatch) -> None:
        self.plan = plan
        self.load = np.zeros(len(plan.physical_to_logical), dtype=np.int64)  # [m + r] tokens computed
        self.experts = layer.experts.copies(plan.physical_to_logical)
        self._dispatch, self._seed, self._watch = DISPATCHES[rule], seed, watch
        logical = np.array(plan.physical_to_logical)
        # One more than the m logical experts: the last stands for picks that reach no expert, physical -1.
        self._copies = np.append(np.bincount(logical, minlength=layer.num_experts), 1)  # [m + 1]
        # Physical experts by logical expert, then by number; where a logical expert's copies start in it.
        self._order = np.append(np.argsort(logical, kind="stable"), -1)  # [m + r + 1]
        self._first = np.cumsum(self._copies) - self._copies  # [m + 1]

    def matrices(self) -> dict[str, torch.Tensor]:
        """[m + r, out, in] views per matrix name; writing to one writes to the physical experts."""
        return self.experts.matrices()

    def choose(self, index: np.ndarray, tokens: BatchTokens) -> np.ndarray:
        """Physical experts of the picks [N, k] of logical experts by the N real tokens: [N, k]; -1 for none."""
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
        for place, count in enumerate(torch.bincount(flat, minlength=len(self._order)).tolist()[:-1]):
            if count:
                own, physical = slice(start, start + count), int(self._order[place])
                output = self.experts.output(physical, self.experts.inner(physical, hidden[row[own]]))
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
        layer.experts.install(physical.run)
        layer.experts.module.physical = physical


def physical_experts(model: PreTrainedModel) -> list[PhysicalExperts]:
    """The physical experts of a variant's MoE layers, in depth order."""
    return [layer.experts.module.physical for layer in moe_layers(model)]


def physical_load(model: PreTrainedModel) -> list[np.ndarray]:
    """[L] x [m + r] tokens that each physical copy computed since the last `reset_physical_load`."""
    return [physical.load.copy() for physical in physical_experts(model)]


def reset_physical_load(model: PreTrainedModel) -> None:
    for physical in physical_experts(model):
        physical.load[:] = 0
