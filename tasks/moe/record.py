"""Token routing as the router decided it, recorded by a hook on each router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from tasks.moe.registry import MoELayer, moe_layers


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one MoE layer; [..., k] is [B*S, k] from a recorder and [B, S, k] from a prefill."""

    index: torch.Tensor  # [..., k] int64, selected experts
    weight: torch.Tensor  # [..., k] float32, routing weights as the model applies them
    gate_prob: (
        torch.Tensor
    )  # [..., k] float32, softmax over all E of logits / router_temperature, at the selected

    def reshaped(self, *shape: int) -> LayerRouting:
        return LayerRouting(*(getattr(self, name).view(*shape, -1) for name in self.__dataclass_fields__))


class RoutingRecorder:
    """Holds the routing of the latest forward pass until it is popped."""

    def __init__(self, layers: list[MoELayer]) -> None:
        self._layers = layers
        self._seen: dict[int, LayerRouting] = {}

    def _hook(self, position: int):
        temperature = self._layers[position].router_temperature

        def keep(_module: nn.Module, _inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
            logits, weight, index = output
            probabilities = torch.softmax(logits.float() / temperature, dim=-1)
            self._seen[position] = LayerRouting(index, weight.float(), probabilities.gather(-1, index))

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
    """Record at the routers while the context is open: some families return softmaxed values, or nothing, as
    `router_logits`, so `output_router_logits` is never read."""
    layers = moe_layers(model)
    recorder = RoutingRecorder(layers)
    handles = [
        layer.router.register_forward_hook(recorder._hook(position)) for position, layer in enumerate(layers)
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
