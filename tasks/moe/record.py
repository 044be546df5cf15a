"""Token routing as the model carried it out: logits recorded at each router, picks where the experts are
entered. Some routers return softmaxed values or none, and some families choose outside the router, so
`output_router_logits` is never read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tasks.moe.registry import MoELayer, moe_layers


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one MoE layer; [..., k] is [B*S, k] from a recorder and [B, S, k] from a prefill."""

    index: torch.Tensor  # [..., k] int64, selected experts, also where the pick reached none
    weight: torch.Tensor  # [..., k] float32, routing weights as the model applies them; 0 where not routed
    gate_prob: torch.Tensor  # [..., k] float32, the router's score of the selected, over all E (MoELayer)
    routed: torch.Tensor  # [..., k] bool, False where a pick reached no expert

    def reshaped(self, *shape: int) -> LayerRouting:
        return LayerRouting(*(getattr(self, name).view(*shape, -1) for name in self.__dataclass_fields__))

    def reached(self, experts: int) -> torch.Tensor:
        """[..., k] `index` with the number `experts`, which is none, where a pick reached no expert."""
        return self.index.masked_fill(~self.routed, experts)


class RoutingRecorder:
    """Holds the routing of the latest forward pass until it is popped."""

    def __init__(self, layers: list[MoELayer]) -> None:
        self._layers = layers
        self._logits: dict[int, torch.Tensor] = {}
        self._seen: dict[int, LayerRouting] = {}

    def at_router(self, position: int):
        """The forward hook of a layer's router."""
        layer = self._layers[position]

        def keep(_module: nn.Module, _inputs: tuple, output: Any) -> None:
            logits = layer.family.logits(output)
            self._logits[position] = logits.reshape(-1, layer.num_experts)

        return keep

    def at_experts(self, position: int):
        """The forward pre-hook of a layer's experts."""
        layer = self._layers[position]

        def keep(_module: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
            _, index, weight = layer.experts.entered(inputs, options)
            logits = self._logits.pop(position)
            routed = index < layer.num_experts
            if not bool(routed.all()):  # what the router chose for those that were dropped
                index = torch.where(routed, index, logits.topk(index.shape[1]).indices)
            probabilities = layer.gate_probabilities(logits)
            self._seen[position] = LayerRouting(
                index, weight.float() * routed, probabilities.gather(-1, index), routed
            )

        return keep

    def pop(self) -> list[LayerRouting]:
        """Routing of every MoE layer in the latest forward, in depth order, arrays [B*S, k]; then
        forgotten."""
        if len(self._seen) != len(self._layers):
            raise RuntimeError(f"{len(self._seen)} of {len(self._layers)} routers ran since the last pop")
        seen, self._seen = self._seen, {}
        return [seen[position] for position in range(len(self._layers))]


@contextmanager
def record_routing(model: PreTrainedModel) -> Iterator[RoutingRecorder]:
    """Record every forward pass while the context is open."""
    layers = moe_layers(model)
    recorder = RoutingRecorder(layers)
    handles = []
    for position, layer in enumerate(layers):
        handles.append(layer.router.register_forward_hook(recorder.at_router(position)))
        handles.append(
            layer.experts.module.register_forward_pre_hook(recorder.at_experts(position), with_kwargs=True)
        )
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
