"""A reference that runs with some experts' weights taken from an instance, and with routes held fixed.

The instance's model lies beside the reference's; nothing is copied or written, so swaps cost no memory and
leave no trace. Both models must be decoder-only and loaded in one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.experts import Experts, run_experts
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tokens import TokenWatch

# [L] x the calls of each MoE layer in order: index [T, k] and weight [T, k] in the model's dtype, so that a
# replay is the recorded pass to the bit.
Routes = list[list[tuple[torch.Tensor, torch.Tensor]]]


class SwappableModel:
    """A reference and an instance of it, layer beside layer.

    Raises InputError unless they are decoder-only models of the same MoE layers.
    """

    def __init__(self, reference: PreTrainedModel, instance: PreTrainedModel) -> None:
        if reference.config.is_encoder_decoder:
            raise InputError(
                f"{reference.config.model_type} is an encoder-decoder: swaps of its experts are not supported; "
                "expected a decoder-only model"
            )
        self.reference, self.instance = reference, instance
        self.layers, self.others = moe_layers(reference), moe_layers(instance)
        shapes = [[_shape(layer) for layer in layers] for layers in (self.layers, self.others)]
        if shapes[0] != shapes[1] or reference.dtype != instance.dtype:
            raise InputError(
                f"the instance is not one of this reference: MoE layers (layer, experts, width) "
                f"{shapes[1]} in {instance.dtype}, expected {shapes[0]} in {reference.dtype}; build it from "
                "this reference and load both in one dtype"
            )

    @property
    def size(self) -> tuple[int, int]:
        """(L, E) MoE layers and the experts of each; raises InputError where layers differ in experts."""
        counts = {layer.num_experts for layer in self.layers}
        if len(counts) > 1:
            raise InputError(f"MoE layers have {sorted(counts)} experts: expected the same number in each")
        return len(self.layers), counts.pop()

    @contextmanager
    def swapped(
        self, chosen: np.ndarray, routes: Routes | None = None, spare_first: bool = False
    ) -> Iterator[Routes]:
        """Inside, the reference's experts with `chosen` [L, E] compute with the instance's weights.

        With `routes`, recorded in the same passes in the same order, tokens go where those say, with their
        weights, whatever the routers say. Yields the routes that the passes inside take. `spare_first`: at
        position 0, where the attention sink is, every expert keeps the reference's weights.
        Raises RuntimeError when a pass does not fit `routes`.
        """
        taken: Routes = [[] for _ in self.layers]
        watch = TokenWatch(self.reference) if spare_first else None
        installed: list[Experts] = []
        try:
            for place, (layer, other) in enumerate(zip(self.layers, self.others, strict=True)):
                mixed = _Mixed(layer.experts, other.experts, chosen[place])
                given = None if routes is None else routes[place]
                layer.experts.install(_Layer(layer.experts, mixed, given, taken[place], watch).run)
                installed.append(layer.experts)
            yield taken
        finally:
            for experts in installed:
                experts.install(None)
            if watch is not None:
                watch.remove()


class _Mixed:
    """Experts of one layer, each from the reference or from the instance: what `run_experts` needs of them."""

    def __init__(self, reference: Experts, instance: Experts, chosen: np.ndarray) -> None:
        self.num_experts = reference.num_experts
        self._own = [instance if swapped else reference for swapped in chosen]  # [E]

    def inner(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._own[expert].inner(expert, hidden)

    def output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return self._own[expert].output(expert, inner)


class _Layer:
    """The function that runs in place of one layer's experts."""

    def __init__(
        self,
        reference: Experts,
        mixed: _Mixed,
        given: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
        taken: list[tuple[torch.Tensor, torch.Tensor]],
        watch: TokenWatch | None,
    ) -> None:
        self._reference, self._mixed, self._given, self._taken = reference, mixed, given, taken
        self._watch = watch

    def run(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._given is not None:
            if len(self._taken) >= len(self._given) or self._given[len(self._taken)][0].shape != index.shape:
                raise RuntimeError(
                    f"pass {len(self._taken)} routes {list(index.shape)} picks, the recorded routes do not"
                )
            index, weight = self._given[len(self._taken)]
        self._taken.append((index, weight))
        if self._watch is None:
            return run_experts(self._mixed, hidden, index, weight)
        first = torch.from_numpy(self._watch.of(len(hidden)).position == 0).to(hidden.device)
        output = torch.empty_like(hidden)
        for rows, experts in ((first, self._reference), (~first, self._mixed)):
            output[rows] = run_experts(experts, hidden[rows], index[rows], weight[rows])
        return output


def _shape(layer: MoELayer) -> tuple[int, int, int]:
    return layer.layer, layer.num_experts, layer.matrices()["down_proj"].shape[2]
