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


class PickObserver:
    """Sees what every MoE layer chose, once per layer and forward pass (`observe_picks`)."""

    def see(
        self,
        position: int,
        logits: torch.Tensor,
        index: torch.Tensor,
        weight: torch.Tensor,
        routed: torch.Tensor,
    ) -> None:
        """The picks of MoE layer number `position`, as `LayerRouting` describes them, arrays [B*S, k];
        `logits` [B*S, E] are its router's."""
        raise NotImplementedError


class RoutingRecorder(PickObserver):
    """Holds the routing of the latest forward pass until it is popped."""

    def __init__(self, layers: list[MoELayer]) -> None:
        self._layers = layers
        self._seen: dict[int, LayerRouting] = {}

    def see(
        self,
        position: int,
        logits: torch.Tensor,
        index: torch.Tensor,
        weight: torch.Tensor,
        routed: torch.Tensor,
    ) -> None:
        probabilities = self._layers[position].gate_probabilities(logits)
        self._seen[position] = LayerRouting(index, weight, probabilities.gather(-1, index), routed)

    def pop(self) -> list[LayerRouting]:
        """Routing of every MoE layer in the latest forward, in depth order, arrays [B*S, k]; then
        forgotten."""
        if len(self._seen) != len(self._layers):
            raise RuntimeError(f"{len(self._seen)} of {len(self._layers)} routers ran since the last pop")
        seen, self._seen = self._seen, {}
        return [seen[position] for position in range(len(self._layers))]


class LayerHooks:
    """The forward hook of a layer's router, which keeps its logits, and the pre-hook of its experts."""

    def __init__(self, layer: MoELayer, position: int, observer: PickObserver) -> None:
        self._layer, self._position, self._observer = layer, position, observer
        self._logits: torch.Tensor | None = None

    def at_router(self, _module: nn.Module, _inputs: tuple, output: Any) -> None:
        self._logits = self._layer.family.logits(output).reshape(-1, self._layer.num_experts)

    def at_experts(self, _module: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        _, index, weight = self._layer.experts.entered(inputs, options)
        logits, self._logits = self._logits, None
        if logits is None:
            raise RuntimeError(
                f"{self._layer.name}: its experts were entered, but its router did not run before"
            )
        routed = index < self._layer.num_experts
        if not bool(routed.all()):  # what the router chose for those that were dropped
            index = torch.where(routed, index, logits.topk(index.shape[1]).indices)
        self._observer.see(self._position, logits, index, weight.float() * routed, routed)


@contextmanager
def observe_picks(layers: list[MoELayer], observer: PickObserver) -> Iterator[None]:
    """Show the observer every forward pass through `layers`, a model's MoE layers, while the context is open."""
    handles = []
    for position, layer in enumerate(layers):
        hooks = LayerHooks(layer, position, observer)
        handles.append(layer.router.register_forward_hook(hooks.at_router))
        handles.append(layer.experts.module.register_forward_pre_hook(hooks.at_experts, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_routing(model: PreTrainedModel) -> Iterator[RoutingRecorder]:
    """Record every forward pass while the context is open."""
    layers = moe_layers(model)
    recorder = RoutingRecorder(layers)
    with observe_picks(layers, recorder):
        yield recorder
