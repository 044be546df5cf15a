"""Where a model's MoE layers are: the one table that knows family names, module names and checkpoint keys.

A family whose classes follow transformers' experts interface is added as a row of FAMILIES; one that computes
otherwise brings the functions that differ (`tasks/moe/family.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.family import Family, Fused, MoELayer, plain_head
from tasks.moe.modules import ModuleExperts
from tasks.moe.native.family import DEEPSEEK, LLAMA_MOE  # importing it also registers the native classes
from tasks.moe.switch import SWITCH

_FUSED_ON_DISK = "its checkpoints keep experts fused, and transformers loads quantized experts one by one"


def _scaled_head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return plain_head(model, hidden) / model.config.logits_scaling


_QWEN = Family()
FAMILIES: dict[str, Family] = {
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "olmoe": _QWEN,
    "deepseek_v2": _QWEN,
    "deepseek_v3": Family(scores="sigmoid"),
    "mixtral": Family(
        stored=("model.layers.{}.block_sparse_moe",),
        matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    "gpt_oss": Family(
        router="router",
        fused={
            "gate_proj": Fused("experts.gate_up_proj", "even", transposed=True),
            "up_proj": Fused("experts.gate_up_proj", "odd", transposed=True),
            "down_proj": Fused("experts.down_proj", transposed=True),
        },
        not_exportable=_FUSED_ON_DISK,
    ),
    "granitemoe": Family(
        blocks=("model.layers.{}.block_sparse_moe",),
        router="router",
        fused={
            "gate_proj": Fused("input_linear.weight", "first half"),
            "up_proj": Fused("input_linear.weight", "second half"),
            "down_proj": Fused("output_linear.weight"),
        },
        head=_scaled_head,
        not_exportable=_FUSED_ON_DISK,
    ),
    "switch_transformers": SWITCH,
    "llama_moe": LLAMA_MOE,
    "deepseek": DEEPSEEK,
}


def family_of(config: Any) -> Family:
    """The family of a model's configuration; raises InputError when it is not in the table."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"model type '{config.model_type}' is not a known MoE family: expected one of {sorted(FAMILIES)}"
        )
    return family


def moe_layers(model: PreTrainedModel) -> list[MoELayer]:
    """The MoE layers of a language model in depth order, an encoder's before the decoder's.

    Raises InputError when the model has none, or when an experts layout is not understood (module and flag
    named).
    """
    config = model.config
    family = family_of(config)
    temperature = float(getattr(config, "router_temperature", None) or 1.0)
    found, index = [], 0
    for block_path, stored_path in zip(family.blocks, family.stored or family.blocks, strict=True):
        stack, _, below = block_path.partition(".{}.")
        for number, layer in enumerate(model.get_submodule(stack)):  # type: ignore[arg-type]
            block = _below(layer, below)
            module = _below(block, family.experts)
            if module is not None:  # else a dense layer
                name = block_path.format(number)
                experts = family.adapt(module, f"{name}.{family.experts}", family)
                router = _below(block, family.router)
                found.append(
                    MoELayer(
                        layer=index,
                        name=name,
                        stored=stored_path.format(number),
                        router=router,
                        experts=experts,
                        num_experts=experts.num_experts,
                        top_k=family.top_k(router),
                        router_temperature=temperature,
                        family=family,
                    )
                )
            index += 1
    if not found:
        raise InputError(
            f"the model ({config.model_type}, {index} layers) has no MoE layers: "
            "expected at least one layer with routed experts"
        )
    return found


def keeps_experts_apart(model: PreTrainedModel) -> bool:
    """Whether transformers keeps every routed expert as a module of its own, so that it loads each in its own format;
    where it fuses a layer's experts into one parameter, all must be stored alike."""
    return all(isinstance(layer.experts, ModuleExperts) for layer in moe_layers(model))


def _below(module: Any, path: str) -> Any:
    """The submodule at a dotted path, None when there is none."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
