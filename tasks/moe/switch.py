"""Switch Transformers (Fedus et al., arXiv 2101.03961): an encoder-decoder whose router drops tokens over
capacity.

In transformers 5 the block calls its experts, a ModuleDict `expert_0`..., with a one-hot choice [T, 1, E] that is
zero where an expert was full: capacity counts the tokens of one sequence in order, so padding behind them takes no
place, and a dropped token's output is zero. Experts have no gate: wi, an activation, wo.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.moe.experts import Entered
from tasks.moe.family import Family
from tasks.moe.modules import ModuleExperts


class SwitchExperts(ModuleExperts):
    """The experts protocol over Switch's experts."""

    def entered(self, args: tuple, options: dict[str, Any]) -> Entered:
        """hidden [T, H], one-hot choice [T, 1, E] and weight [T, 1] -> hidden, index [T, 1], weight [T, 1]; a
        dropped token has the index E and the weight 0."""
        hidden, chosen, weight = (*args, *options.values())
        routed = chosen.any(dim=-1)
        index = chosen.to(torch.int8).argmax(dim=-1).masked_fill(~routed, self.num_experts)
        return hidden, index, weight.masked_fill(~routed, 0)


def _adapt(module: Any, name: str, family: Family) -> SwitchExperts:
    return SwitchExperts(module, name, family.matrices, family.activation)


def _logits(output: Any) -> torch.Tensor:
    return output[2]


def _rows(router: Any) -> torch.Tensor:
    return router.classifier.weight.data


def _top_1(_router: Any) -> int:
    return 1


def _head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Where embeddings are tied, T5 divides by sqrt(H) before the lm_head."""
    scale = model.config.d_model**-0.5 if model.config.tie_word_embeddings else 1.0
    return model.get_output_embeddings()(hidden * scale)


SWITCH = Family(
    blocks=("encoder.block.{}.layer.1.mlp", "decoder.block.{}.layer.2.mlp"),
    router="router",
    key="experts.expert_{expert}.{matrix}",
    matrices={"up_proj": "wi", "down_proj": "wo"},
    activation="act",
    adapt=_adapt,
    logits=_logits,
    rows=_rows,
    top_k=_top_1,
    head=_head,
)
