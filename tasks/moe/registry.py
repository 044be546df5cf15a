"""Where a model's MoE layers are: the one table that knows family names, module names and checkpoint keys.

A family that keeps its experts fused behind transformers' experts interface is added as a row of FAMILIES.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.fused import Experts, check_layout, expert_matrices


@dataclass(frozen=True)
class Family:
    """Names of one model family: modules below a decoder layer, and an expert's keys in a checkpoint."""

    block: str  # the MoE block below a decoder layer
    router: str  # below the block
    experts: str  # below the block
    checkpoint: str  # module path of one expert's matrix as checkpoints name it, without ".weight"
    matrices: dict[str, str]  # our name of a matrix -> the checkpoint's

    def key(self, layer: int, expert: int, matrix: str) -> str:
        """The checkpoint's module path of a matrix, such as `model.layers.1.mlp.experts.0.gate_proj`."""
        return self.checkpoint.format(layer=layer, expert=expert, matrix=self.matrices[matrix])

    def pattern(self) -> str:
        """A regular expression that matches every `key` and nothing else."""
        escaped = re.escape(self.checkpoint)
        numbered = escaped.replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
        return numbered.replace(r"\{matrix\}", f"(?:{'|'.join(self.matrices.values())})") + "$"


_QWEN = Family(
    block="mlp",
    router="gate",
    experts="experts",
    checkpoint="model.layers.{layer}.mlp.experts.{expert}.{matrix}",
    matrices={"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"},
)
FAMILIES: dict[str, Family] = {"qwen2_moe": _QWEN, "qwen3_moe": _QWEN}


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer: its router, its routed experts, and views of their weights. Shared experts are no part
    of it."""

    layer: int  # decoder layer
    name: str  # module path of the MoE block
    router: Any  # nn.Module
    experts: Experts  # nn.Module
    num_experts: int  # E
    top_k: int  # k
    router_temperature: float  # logits / temperature are the unflattened logits

    def matrices(self) -> dict[str, torch.Tensor]:
        """[E, out, in] views per matrix name; writing to one writes to the model."""
        return expert_matrices(self.experts)

    def router_rows(self) -> torch.Tensor:
        """[E, H] the router's row of each expert."""
        return self.router.weight.data


def family_of(config: Any) -> Family:
    """The family of a model's configuration; raises InputError when it is not in the table."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"model type '{config.model_type}' is not a known MoE family: expected one of {sorted(FAMILIES)}"
        )
    return family


def moe_layers(model: PreTrainedModel) -> list[MoELayer]:
    """The MoE layers of a causal language model in depth order.

    Raises InputError when the model has none, or when an experts layout is not understood (module and flag
    named).
    """
    config = model.config
    family = family_of(config)
    temperature = float(getattr(config, "router_temperature", None) or 1.0)
    found = []
    decoder: Any = model.base_model
    for index, decoder_layer in enumerate(decoder.layers):
        block = getattr(decoder_layer, family.block)
        experts = getattr(block, family.experts, None)
        if experts is None:
            continue  # a dense layer
        name = f"{model.base_model_prefix}.layers.{index}.{family.block}"
        check_layout(experts, f"{name}.{family.experts}")
        router = getattr(block, family.router)
        found.append(MoELayer(index, name, router, experts, experts.num_experts, router.top_k, temperature))
    if not found:
        raise InputError(
            f"the model ({config.model_type}, {len(decoder.layers)} layers) has no MoE layers: "
            "expected at least one layer with routed experts"
        )
    return found


def expert_keys(model: PreTrainedModel, layer: MoELayer, matrix: str) -> list[str]:
    """Module paths [E] of one matrix of a layer's experts, as checkpoints name them, without `.weight`."""
    family = family_of(model.config)
    return [family.key(layer.layer, expert, matrix) for expert in range(layer.num_experts)]
