"""One layer's routed experts, whatever their layout: the protocol that every other part of the code sees.

`tasks/moe/fused.py` adapts transformers' fused 3-D parameters to it, `tasks/moe/modules.py` a ModuleList or
ModuleDict with one module per expert. Expert number `num_experts` in an index [T, k] is no expert: such a pick
was dropped (over capacity) and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Entered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden [T, H], index [T, k], weight [T, k]


class RunnableExperts(Protocol):
    """What it takes to compute with a layer's experts one by one."""

    num_experts: int  # E

    def inner(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """What down_proj reads for the tokens `hidden` [n, H]: [n, width]."""
        ...

    def output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """The expert's output from `inner` [n, width], before its routing weight: [n, H]."""
        ...


class Experts(RunnableExperts, Protocol):
    """The routed experts of one MoE layer."""

    module: Any  # the nn.Module that the MoE block calls

    def matrices(self) -> dict[str, torch.Tensor]:
        """name -> [E, out, in] views; writing to one writes to the model. Names: "gate_proj", "up_proj",
        "down_proj"; experts without a gate have no "gate_proj"."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters that hold the matrices; biases are not among them."""
        ...

    def copies(self, physical_to_logical: Sequence[int]) -> Experts:
        """Experts with weights of their own, each at first those of a logical expert, biases too.

        The first E must be the logical experts in order: the model keeps views of them, so that they are
        stored once.
        """
        ...

    def entered(self, args: tuple, options: dict[str, Any]) -> Entered:
        """Read the arguments of a call of `module`: hidden [T, H], index [T, k] (E where dropped), weight."""
        ...

    def install(self, function: Run | None) -> None:
        """Run `function(hidden, index, weight) -> [T, H]` in place of the module's own forward; None restores
        it. Raises RuntimeError when a function is installed already (a variant's replicas, say)."""
        ...


def install(experts: Experts, function: Run | None) -> None:
    """`Experts.install` for every layout: an instance's own `forward` goes before its class's."""
    own = vars(experts.module)
    if function is None:
        own.pop("forward", None)
    elif "forward" in own:
        raise RuntimeError("another function runs in place of the experts already: take it back first")
    else:
        own["forward"] = partial(_installed, experts, function)


def _installed(experts: Experts, function: Run, *args: Any, **options: Any) -> torch.Tensor:
    return function(*experts.entered(args, options))


def entered(args: tuple, options: dict[str, Any]) -> Entered:
    """`Experts.entered` of modules that are called with hidden states, index and weight, in this order."""
    hidden, index, weight = (*args, *options.values())
    return hidden, index, weight


def run_experts(
    experts: RunnableExperts,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    observe: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Experts one after the other on their own tokens: the fastest order on a CPU, and a deterministic one.

    hidden [T, H], index and weight [T, k] -> [T, H]. Each token adds its experts' outputs in the experts'
    order, so neither threads nor the other tokens of a batch change the order of a sum. `observe(expert,
    tokens [n, H], inner [n, width])` sees the inputs of the matrices of each expert that has tokens.
    """
    top_k, size = index.shape[1], experts.num_experts
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)  # picks without an expert come last
    tokens, weights = order // top_k, weight.reshape(-1)[order, None]
    total = torch.zeros_like(hidden)
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=size)[:size].tolist()):
        if count:
            own = slice(start, start + count)
            rows = hidden[tokens[own]]
            inner = experts.inner(expert, rows)
            if observe is not None:
                observe(expert, rows, inner)
            output = experts.output(expert, inner)
            del rows, inner  # their memory, still in the cache, takes the next results
            output = output * weights[own]
            total.index_add_(0, tokens[own], output.to(total.dtype))
            start += count
    return total
