"""transformers' fused experts: one 3-D parameter per projection, its layout told by flags on the experts
module.

The flags are set by `transformers.integrations.moe.use_experts_implementation`: `has_gate`, `has_bias`,
`is_transposed`, `is_concatenated` (else gate and up rows are interleaved) and `has_post_expert_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tasks.contracts import InputError

EXPERTS_IMPLEMENTATION = "expertpool_loop"
Experts = Any  # an nn.Module whose parameters and layout flags are set by its family
UNDERSTOOD = {
    "has_gate": (True, False),
    "is_transposed": (True, False),
    "is_concatenated": (True, False),
    "has_bias": (False,),
    "has_post_expert_norm": (False,),
}


def check_layout(experts: Experts, name: str) -> None:
    """Raise InputError naming module and flag unless every layout flag is present and understood."""
    for flag, known in UNDERSTOOD.items():
        value = getattr(experts, flag, None)
        if value not in known:
            got = "is absent" if value is None else f"is {value}"
            raise InputError(
                f"{name} ({type(experts).__name__}): layout flag '{flag}' {got}, expected one of "
                f"{list(known)}: this experts layout is not understood yet"
            )


def expert_matrices(experts: Experts) -> dict[str, torch.Tensor]:
    """The experts' matrices as [E, out, in] views of the fused parameters: writing to one writes to the
    model."""

    def oriented(weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(1, 2) if experts.is_transposed else weight

    down = oriented(experts.down_proj.data)
    if not experts.has_gate:
        return {"up_proj": oriented(experts.up_proj.data), "down_proj": down}
    fused = oriented(experts.gate_up_proj.data)
    if experts.is_concatenated:
        gate, up = fused.chunk(2, dim=1)
    else:
        gate, up = fused[:, 0::2], fused[:, 1::2]
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def run_expert(experts: Experts, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """One expert on the tokens `hidden` [n, H], before its routing weight: [n, H]."""
    first = (experts.gate_up_proj if experts.has_gate else experts.up_proj)[expert]
    last = experts.down_proj[expert]
    if not experts.is_transposed:
        first, last = first.T, last.T
    inner = hidden @ first
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return inner @ last


def experts_forward(
    experts: Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts one after the other on their own tokens: the fastest order on a CPU, and a deterministic one.

    hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]. Each token adds its experts' outputs
    in the experts' order, so neither threads nor the other tokens of a batch change the order of a sum.
    """
    top_k = top_k_index.shape[1]
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens, weights = order // top_k, top_k_weights.reshape(-1)[order, None]
    total = torch.zeros_like(hidden_states)
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts.num_experts).tolist()):
        if count:
            own = slice(start, start + count)
            output = run_expert(experts, expert, hidden_states[tokens[own]]) * weights[own]
            total.index_add_(0, tokens[own], output.to(total.dtype))
            start += count
    return total


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
