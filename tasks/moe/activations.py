"""Sums of squared expert inputs, taken inside the one forward pass; nothing is kept per token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tasks.moe.fused import experts_forward
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tokens import TokenWatch

MEASURED = "expertpool_measured"


class _Tap:
    """Stands in for an experts module while it runs, and sees the activations that its down_proj gets."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts: Any = experts
        self.seen: list[torch.Tensor] = []  # per expert that has tokens, in order: [n, width]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def _apply_gate(self, fused: torch.Tensor) -> torch.Tensor:
        return self._keep(self._experts._apply_gate(fused))

    def act_fn(self, inner: torch.Tensor) -> torch.Tensor:
        """Only experts without a gate call it here; those with one call the module's own."""
        return self._keep(self._experts.act_fn(inner))

    def _keep(self, inner: torch.Tensor) -> torch.Tensor:
        self.seen.append(inner)
        return inner


class ExpertInputs:
    """Per expert of one MoE layer: token counts and sums of squared input channels, in float64."""

    def __init__(self, layer: MoELayer, watch: TokenWatch) -> None:
        matrices = layer.matrices()
        self.names = tuple(matrices)
        self.load = np.zeros(layer.num_experts, dtype=np.int64)  # [E]
        self._hidden = np.zeros((layer.num_experts, next(iter(matrices.values())).shape[2]))
        self._inner = np.zeros((layer.num_experts, matrices["down_proj"].shape[2]))
        self._watch = watch

    def squares(self) -> dict[str, np.ndarray]:
        """name -> [E, in]: gate_proj and up_proj read the layer's input, down_proj the gated activations."""
        return {name: self._inner if name == "down_proj" else self._hidden for name in self.names}

    def run(
        self, experts: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        real = self._watch.of(len(hidden)).real
        hidden_real, index_real = hidden[real], index[real]
        tap = _Tap(experts)
        output = torch.zeros_like(hidden)
        output[real] = experts_forward(tap, hidden_real, index_real, weight[real])  # type: ignore[arg-type]
        counts = torch.bincount(index_real.reshape(-1), minlength=len(self.load)).numpy()
        self.load += counts
        selected = torch.zeros(len(index_real), len(self.load), dtype=torch.float64)
        selected.scatter_(1, index_real, 1.0)
        self._hidden += (selected.T @ hidden_real.double().square()).numpy()
        for expert, inner in zip(np.flatnonzero(counts), tap.seen, strict=True):
            self._inner[expert] += inner.double().square().sum(dim=0).numpy()
        return output


def _measured_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    inputs: ExpertInputs = experts.expert_inputs  # type: ignore[assignment]
    return inputs.run(experts, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(MEASURED, _measured_forward)


@contextmanager
def measure_expert_inputs(model: Any) -> Iterator[list[ExpertInputs]]:
    """Sum squared inputs of every routed expert over the forward passes inside; padding is left out.

    Yields one ExpertInputs per MoE layer, in depth order. Outputs of real tokens are those of the plain
    model; padding gets zeros from the routed experts.
    """
    layers, watch = moe_layers(model), TokenWatch(model)
    before = model.config._experts_implementation
    inputs = [ExpertInputs(layer, watch) for layer in layers]
    for layer, own in zip(layers, inputs, strict=True):
        layer.experts.expert_inputs = own  # type: ignore[assignment]
    model.set_experts_implementation(MEASURED)
    try:
        yield inputs
    finally:
        model.set_experts_implementation(before)
        for layer in layers:
            del layer.experts.expert_inputs
        watch.remove()
