"""transformers' fused experts: one 3-D parameter per projection, its layout told by flags on the experts
module.

The flags are set by `transformers.integrations.moe.use_experts_implementation`: `has_gate`, `has_bias`,
`is_transposed`, `is_concatenated` (else gate and up rows are interleaved) and `has_post_expert_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tasks.contracts import InputError
from tasks.moe import experts as protocol
from tasks.moe.experts import Entered, Run, run_experts

EXPERTS_IMPLEMENTATION = "expertpool_loop"
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def check_layout(module: Any, name: str) -> None:
    """Raise InputError naming module and flag unless the layout flags are all there, all known, and explain
    every parameter."""
    where = f"{name} ({type(module).__name__})"
    for flag in FLAGS:
        value = getattr(module, flag, None)
        if value not in (True, False):
            got = "is absent" if value is None else f"is {value}"
            raise InputError(f"{where}: layout flag '{flag}' {got}, expected true or false")
    for flag, value in sorted(vars(module).items()):
        unknown = flag.startswith(("has_", "is_")) and flag not in FLAGS
        if unknown or (flag == "_is_expert_parallel" and value):
            raise InputError(
                f"{where}: layout flag '{flag}' is {value}: this experts layout is not understood; "
                f"expected the flags {', '.join(FLAGS)} and no other"
            )
    expected = _parameter_names(module)
    present = {parameter for parameter, _ in module.named_parameters(recurse=False)}
    for parameter in sorted(expected ^ present):
        flag = "has_bias" if parameter.endswith("_bias") else "has_gate"
        fault = "lacks" if parameter in expected else "has"
        raise InputError(
            f"{where}: layout flag '{flag}' is {getattr(module, flag)}, but the module {fault} the parameter "
            f"'{parameter}': expected exactly {', '.join(sorted(expected))}"
        )
    if module.has_post_expert_norm and not hasattr(module, "post_expert_norm"):
        raise InputError(
            f"{where}: layout flag 'has_post_expert_norm' is True, but the module lacks 'post_expert_norm'"
        )


def _parameter_names(module: Any) -> set[str]:
    """Names of the fused parameters that the flags promise."""
    weights = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    return weights | {f"{name}_bias" for name in weights} if module.has_bias else weights


class FusedExperts:
    """The experts protocol over one fused experts module whose layout was checked."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.num_experts: int = module.num_experts
        self._first = "gate_up_proj" if module.has_gate else "up_proj"

    def matrices(self) -> dict[str, torch.Tensor]:
        """[E, out, in] views of the fused parameters: writing to one writes to the model."""
        first, down = (self._oriented(getattr(self.module, name).data) for name in (self._first, "down_proj"))
        if not self.module.has_gate:
            return {"up_proj": first, "down_proj": down}
        if self.module.is_concatenated:
            gate, up = first.chunk(2, dim=1)
        else:
            gate, up = first[:, 0::2], first[:, 1::2]
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from (getattr(self.module, self._first), self.module.down_proj)

    def inner(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        first = self._linear(self._first, expert, hidden)
        return self.module._apply_gate(first) if self.module.has_gate else self.module.act_fn(first)

    def output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        output = self._linear("down_proj", expert, inner)
        return self.module.post_expert_norm(output) if self.module.has_post_expert_norm else output

    def copies(self, physical_to_logical: Sequence[int]) -> FusedExperts:
        return FusedExperts(_Copies(self.module, list(physical_to_logical)))

    def entered(self, args: tuple, options: dict[str, Any]) -> Entered:
        return protocol.entered(args, options)

    def install(self, function: Run | None) -> None:
        protocol.install(self, function)

    def _oriented(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(-1, -2) if self.module.is_transposed else weight

    def _linear(self, name: str, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        product = inputs @ self._oriented(getattr(self.module, name)[expert]).T
        return product + getattr(self.module, f"{name}_bias")[expert] if self.module.has_bias else product


class _Copies:
    """Stands in for the experts module with [m + r, ...] parameters; the rest is the module's own."""

    def __init__(self, module: Any, physical_to_logical: list[int]) -> None:
        self._module = module
        self.num_experts = len(physical_to_logical)
        for name in sorted(_parameter_names(module)):
            original = getattr(module, name)
            stack = nn.Parameter(original.data[physical_to_logical], requires_grad=False)
            setattr(self, name, stack)
            # The module keeps a view of the first m, so that the logical experts are stored once.
            setattr(module, name, nn.Parameter(stack.data[: len(original)], requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # not set yet, while this object is being copied
            raise AttributeError(name)
        return getattr(self._module, name)


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`run_experts` as transformers' experts interface calls it."""
    return run_experts(FusedExperts(module), hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
