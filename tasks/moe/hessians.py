"""Hessians of one MoE layer's experts: sums of x x^T over the inputs x that reach each of its matrices.

gate_proj and up_proj read the layer's input ("hidden"), down_proj what the expert makes of it ("inner").
Only routed, real tokens count; shared experts are no part of it.
"""

from __future__ import annotations

import torch

from tasks.moe.experts import Experts
from tasks.quant.hessian import Hessians
from tasks.quant.threads import side_by_side


class HessianSums:
    """Grows batch by batch. Every expert's sums are made on one thread and in the batches' order, so that the
    number of threads never changes a bit."""

    def __init__(self, experts: Experts) -> None:
        """Takes 4 · E · (H² + width²) bytes, all at once."""
        matrices = experts.matrices()
        count, _, hidden = matrices["up_proj"].shape
        inner = matrices["down_proj"].shape[2]
        self._experts = experts
        self._tokens = torch.zeros(count, dtype=torch.int64)
        self._hidden = torch.zeros(count, hidden, hidden)
        self._inner = torch.zeros(count, inner, inner)

    def add(self, hidden: torch.Tensor, index: torch.Tensor) -> None:
        """Add real tokens `hidden` [n, H] and the experts that each of them reaches, `index` [n, k].

        A pick outside of 0..E-1 reaches no expert; picking an expert twice counts once.
        """
        count = len(self._tokens)
        picked = torch.zeros(len(index), count + 1, dtype=torch.bool)
        picked.scatter_(1, torch.where((index >= 0) & (index < count), index, count), True)

        def add_expert(expert: int) -> None:
            with torch.inference_mode():
                own = hidden[picked[:, expert]].float()
                inner = self._experts.inner(expert, own).float()
                self._hidden[expert].addmm_(own.T, own)
                self._inner[expert].addmm_(inner.T, inner)

        per_expert = picked[:, :count].sum(dim=0)
        side_by_side(add_expert, per_expert.nonzero()[:, 0].tolist())
        self._tokens += per_expert

    def hessians(self) -> dict[str, Hessians]:
        """The sums so far, not copied: "hidden" [E, H, H] of gate_proj and up_proj, "inner" [E, width, width] of
        down_proj."""
        return {
            "hidden": Hessians(self._tokens, self._hidden),
            "inner": Hessians(self._tokens, self._inner),
        }
