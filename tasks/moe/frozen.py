"""A reference that runs with some experts' weights taken from an instance, and with routes held fixed.

The instance's model lies beside the reference's; nothing is copied or written, so swaps cost no memory and
leave no trace. Both models must be decoder-only and loaded in one dtype. A swap changes nothing below its
layer: a pass may keep what enters its MoE layers, and later passes over the same tokens begin there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.experts import Experts, run_experts
from tasks.moe.registry import MoELayer, family_of, moe_layers
from tasks.moe.tokens import TokenWatch

# [L] x the calls of each MoE layer in order: index [T, k] and weight [T, k] in the model's dtype, so that a
# replay is the recorded pass to the bit.
Routes = list[list[tuple[torch.Tensor, torch.Tensor]]]
# Place of a MoE layer among them -> in each pass, the output of the decoder layer before its own, as the family
# has it (a tensor or a tuple). A model's first decoder layer has none.
Inputs = dict[int, list[Any]]


class SwappableModel:
    """A reference and an instance of it, layer beside layer.

    Raises InputError unless they are decoder-only models of the same MoE layers in one dtype, and equal but
    for the experts' matrices.
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
        if changed := _changed(reference, instance, self.layers):
            raise InputError(
                f"the instance is not one of this reference: '{changed}' differs; expected everything but the "
                "experts' matrices as it is in the reference: quantize this reference again"
            )
        self._stack: Any = reference.get_submodule(family_of(reference.config).blocks[0].partition(".{}.")[0])

    @property
    def depth(self) -> int:
        """Decoder layers, dense ones counted."""
        return len(self._stack)

    def work(self, place: int) -> int:
        """Decoder layers that a pass computes which resumes at MoE layer `place`."""
        return self.depth - self.layers[place].layer

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

    @contextmanager
    def keeping(self, places: Iterable[int]) -> Iterator[Inputs]:
        """Keep what enters the MoE layers `places` in the passes inside: [T, H] values a layer and pass."""
        inputs: Inputs = {place: [] for place in places if self.layers[place].layer > 0}
        handles = [
            self._stack[self.layers[place].layer - 1].register_forward_hook(_keeper(outputs))
            for place, outputs in inputs.items()
        ]
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resuming(self, place: int, inputs: Inputs) -> Iterator[None]:
        """Inside, no decoder layer below MoE layer `place` computes: the passes, those in which `inputs` were
        kept and in their order, go on from there. Raises RuntimeError on more passes than were kept."""
        below = _Below(inputs[place])
        skipped = list(self._stack[: self.layers[place].layer])
        try:
            for number, layer in enumerate(skipped):
                layer.forward = below.first if number == 0 else below.other
            yield
        finally:
            for layer in skipped:
                vars(layer).pop("forward", None)


def _keeper(outputs: list[Any]) -> Any:
    return lambda _module, _inputs, output: outputs.append(output)


class _Below:
    """Runs in place of the decoder layers that a pass skips: each hands on what the last of them gave."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs, self._calls = outputs, 0

    def first(self, *_args: Any, **_options: Any) -> Any:
        if self._calls == len(self._outputs):
            raise RuntimeError(f"pass {self._calls} resumes where only {self._calls} passes were kept")
        self._calls += 1
        return self.other()

    def other(self, *_args: Any, **_options: Any) -> Any:
        return self._outputs[self._calls - 1]


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


def _changed(reference: PreTrainedModel, instance: PreTrainedModel, layers: Sequence[MoELayer]) -> str | None:
    """The first parameter or buffer, the experts' matrices aside, that an instance does not have alike."""
    matrices = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    others = dict([*instance.named_parameters(), *instance.named_buffers()])
    for name, own in [*reference.named_parameters(), *reference.named_buffers()]:
        if id(own) not in matrices and (name not in others or not torch.equal(own, others[name])):
            return name
    return None
