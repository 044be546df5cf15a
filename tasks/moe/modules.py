"""Experts that are modules of their own in a ModuleList or ModuleDict, as older classes and Switch keep them.

Experts of equal shape are re-homed: one stacked tensor per matrix whose slices are the modules' weights, so
that matrices are views here as they are of fused experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tasks.contracts import InputError
from tasks.moe import experts as protocol
from tasks.moe.experts import Entered, Run


class ModuleExperts:
    """The experts protocol over a ModuleList or ModuleDict that its MoE block calls with hidden states, index
    and weight.

    Args:
        module: the container; its class must define a `forward`, which `install` replaces.
        name: its module path, for errors.
        matrices: our name of a matrix -> the expert's Linear; without "gate_proj" the experts have no gate.
        activation: the expert's attribute that holds the activation function.

    Raises InputError, naming the module, for experts of other parts or of unequal shapes.
    """

    def __init__(self, module: Any, name: str, matrices: Mapping[str, str], activation: str) -> None:
        self.module = module
        own = _in_order(module, name)
        self.num_experts = len(own)
        if type(module).forward is nn.Module.forward:
            raise InputError(
                f"{name} ({type(module).__name__}): the container has no forward of its own, so its block "
                "runs the experts by itself: expected a container called with hidden states, index and weight"
            )
        for number, expert in enumerate(own):
            _check_expert(expert, f"{name}[{number}]", matrices, activation)
        self._parameters = {
            matrix: [getattr(expert, linear).weight for expert in own] for matrix, linear in matrices.items()
        }
        for matrix, weights in self._parameters.items():
            shapes = sorted({tuple(weight.shape) for weight in weights})
            if len(shapes) > 1:
                raise InputError(
                    f"{name} ({type(module).__name__}): '{matrices[matrix]}' has the shapes {shapes}: "
                    "expected experts of one shape in a layer"
                )
        biases = {
            matrix: [getattr(expert, linear).bias for expert in own] for matrix, linear in matrices.items()
        }
        stacks = {matrix: _rehomed(weights) for matrix, weights in self._parameters.items()}
        self._linears = _Linears(stacks, biases, getattr(own[0], activation))

    def matrices(self) -> dict[str, torch.Tensor]:
        return dict(self._linears.stacks)

    def parameters(self) -> Iterator[nn.Parameter]:
        for weights in self._parameters.values():
            yield from weights

    def inner(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._linears.inner(expert, hidden)

    def output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return self._linears.output(expert, inner)

    def copies(self, physical_to_logical: Sequence[int]) -> ModuleExperts:
        numbers = list(physical_to_logical)
        stacks = {matrix: stack[numbers] for matrix, stack in self._linears.stacks.items()}
        for matrix, weights in self._parameters.items():
            for weight, view in zip(weights, stacks[matrix][: self.num_experts], strict=True):
                weight.data = view  # the logical experts are stored once
        biases = {
            matrix: [None if own[number] is None else own[number].detach().clone() for number in numbers]
            for matrix, own in self._linears.biases.items()
        }
        made = object.__new__(type(self))
        made.module, made.num_experts, made._parameters = self.module, len(numbers), self._parameters
        made._linears = _Linears(stacks, biases, self._linears.activation)
        self._linears.stacks = {matrix: stack[: self.num_experts] for matrix, stack in stacks.items()}
        return made

    def entered(self, args: tuple, options: dict[str, Any]) -> Entered:
        return protocol.entered(args, options)

    def install(self, function: Run | None) -> None:
        protocol.install(self, function)


class _Linears:
    """Stacked matrices [E, out, in] with an expert's computation: down(activation(gate) * up)."""

    def __init__(
        self,
        stacks: dict[str, torch.Tensor],
        biases: dict[str, list[Any]],  # [E] of [out], or None
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.stacks, self.biases, self.activation = stacks, biases, activation

    def inner(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        up = self._linear("up_proj", expert, hidden)
        if "gate_proj" not in self.stacks:
            return self.activation(up)
        return self.activation(self._linear("gate_proj", expert, hidden)) * up

    def output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return self._linear("down_proj", expert, inner)

    def _linear(self, matrix: str, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self.stacks[matrix][expert], self.biases[matrix][expert]
        product = inputs.to(weight.dtype) @ weight.T  # a family may keep one matrix in float32
        return product if bias is None else product + bias


def _in_order(module: Any, name: str) -> list[Any]:
    """The experts by number; a ModuleDict's keys must end in them."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    for number, key in enumerate(module):
        if key.rstrip("0123456789") + str(number) != key:
            raise InputError(
                f"{name} ({type(module).__name__}): expert {number} is called '{key}': expected names that "
                f"end in the expert's number"
            )
    return list(module.values())


def _check_expert(expert: Any, name: str, matrices: Mapping[str, str], activation: str) -> None:
    """Raise InputError unless the expert is made of these Linears and an activation function alone."""
    where = f"{name} ({type(expert).__name__})"
    parts = {part for part, _ in expert.named_parameters()}
    for linear in matrices.values():
        if not isinstance(getattr(expert, linear, None), nn.Linear):
            raise InputError(f"{where}: has no Linear '{linear}': expected {sorted(matrices.values())}")
        parts -= {f"{linear}.weight", f"{linear}.bias"}
    if parts:
        raise InputError(
            f"{where}: parameter '{min(parts)}' belongs to no matrix of an expert: this experts layout is not "
            f"understood; expected {sorted(matrices.values())} alone"
        )
    if not callable(getattr(expert, activation, None)):
        raise InputError(f"{where}: has no activation function '{activation}'")


def _rehomed(weights: list[nn.Parameter]) -> torch.Tensor:
    """[E, out, in]: one tensor whose slices are the weights' memory; they move there unless they are already.

    A copied model has weights with memory of their own again, so nothing is remembered from call to call.
    """
    first = weights[0].data
    if first.device.type == "meta":
        return torch.stack([weight.data for weight in weights])  # shapes only
    step = first.numel() * first.element_size()
    together = all(
        weight.data_ptr() == first.data_ptr() + number * step
        and weight.is_contiguous()
        and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for number, weight in enumerate(weights)
    )
    if together:
        size, stride = (len(weights), *first.shape), (first.numel(), *first.stride())
        return first.as_strided(size, stride, first.storage_offset())
    stack = torch.stack([weight.data for weight in weights])
    for weight, view in zip(weights, stack, strict=True):
        weight.data = view
    return stack
