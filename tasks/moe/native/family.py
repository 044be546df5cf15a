"""How the native classes' MoE layers are found, and what their experts are called in checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from tasks.moe.family import GATED, Family
from tasks.moe.modules import ModuleExperts


def _adapt(module: Any, name: str, _family: Family) -> ModuleExperts:
    """Modules keep our names, whatever the checkpoint calls them."""
    return ModuleExperts(module, name, GATED, "act_fn")


def _rows(gate: Any) -> torch.Tensor:
    return gate.rows()


_NO_CLASS = "transformers has no class for it"

DEEPSEEK = Family(adapt=_adapt, not_exportable=_NO_CLASS)
LLAMA_MOE = Family(
    experts="calculator.experts",
    key="calculator.experts.{matrix}.{expert}",
    suffix="",
    matrices={"gate_proj": "weight_gate", "up_proj": "weight_up", "down_proj": "weight_down"},
    adapt=_adapt,
    rows=_rows,
    not_exportable=_NO_CLASS,
)
