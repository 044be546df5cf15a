"""Sums of squared expert inputs, taken inside the one forward pass; nothing is kept per token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tasks.moe.experts import run_experts
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tokens import TokenWatch


class ExpertInputs:
    """Per expert of one MoE layer: token counts and sums of squared input channels, in float64."""

    def __init__(self, layer: MoELayer, watch: TokenWatch) -> None:
        matrices = layer.matrices()
        self.names = tuple(matrices)
        self.load = np.zeros(layer.num_experts, dtype=np.int64)  # [E]
        self._hidden = np.zeros((layer.num_experts, matrices["up_proj"].shape[2]))
        self._inner = np.zeros((layer.num_experts, matrices["down_proj"].shape[2]))
        self._experts, self._watch = layer.experts, watch

    def squares(self) -> dict[str, np.ndarray]:
        """name -> [E, in]: gate_proj and up_proj read the layer's input, down_proj the gated activations."""
        return {name: self._inner if name == "down_proj" else self._hidden for name in self.names}

    def run(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], index and weight [T, k] -> [T, H]; padding gets zeros."""
        real = self._watch.of(len(hidden)).real
        hidden_real, index_real = hidden[real], index[real]
        output = torch.zeros_like(hidden)
        output[real] = run_experts(self._experts, hidden_real, index_real, weight[real], self._observe)
        selected = torch.zeros(len(index_real), len(self.load) + 1, dtype=torch.float64)
        selected.scatter_(1, index_real, 1.0)  # the last column is for picks that reach no expert
        self._hidden += (selected[:, :-1].T @ hidden_real.double().square()).numpy()
        return output

    def _observe(self, expert: int, hidden: torch.Tensor, inner: torch.Tensor) -> None:
        self.load[expert] += len(hidden)
        self._inner[expert] += inner.double().square().sum(dim=0).numpy()


@contextmanager
def measure_expert_inputs(model: Any) -> Iterator[list[ExpertInputs]]:
    """Sum squared inputs of every routed expert over the forward passes inside; padding is left out.

    Yields one ExpertInputs per MoE layer, in depth order. Outputs of real tokens are those of the plain
    model; padding gets zeros from the routed experts.
    """
    layers, watch = moe_layers(model), TokenWatch(model)
    inputs = [ExpertInputs(layer, watch) for layer in layers]
    for layer, own in zip(layers, inputs, strict=True):
        layer.experts.install(own.run)
    try:
        yield inputs
    finally:
        for layer in layers:
            layer.experts.install(None)
        watch.remove()
