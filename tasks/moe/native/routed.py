"""Gated experts as modules of their own, one after the other in a ModuleList."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN


class GatedExpert(nn.Module):
    """down(act(gate x) * up x), without biases: SwiGLU (Shazeer, arXiv 2002.05202) where act is "silu"."""

    def __init__(self, hidden_size: int, width: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.act_fn = ACT2FN[activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, H]."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class RoutedExperts(nn.ModuleList):
    """The routed experts of one layer."""

    def __init__(self, num_experts: int, hidden_size: int, width: int, activation: str) -> None:
        super().__init__(GatedExpert(hidden_size, width, activation) for _ in range(num_experts))
        self.num_experts = num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts, added in the experts' order.

        hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H].
        """
        total = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            token, pick = torch.where(top_k_index == number)
            output = self[number](hidden_states[token]) * top_k_weights[token, pick, None]
            total.index_add_(0, token, output.to(total.dtype))
        return total
