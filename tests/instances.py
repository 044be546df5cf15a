"""Instances of the seeded models, for the tests that make and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.params import QuantizeInstances, load_params
from tasks.quant.formats import expert_files

ROOT = Path(__file__).parents[1]
IDS = torch.randint(0, 350, (2, 20), generator=torch.Generator().manual_seed(0))


def settings(**changes: Any) -> QuantizeInstances:
    """params.yaml's section with a group size that fits the seeded models."""
    values = load_params(ROOT / "params.yaml").quantize_instances.model_dump()
    return QuantizeInstances(**{**values, "group_size": 32, **changes})


def packed(folder: Path) -> dict[str, torch.Tensor]:
    """The packed tensors of all shards."""
    return {name: tensor for shard in expert_files(folder) for name, tensor in load_file(shard).items()}


def half_precision(source: Path, folder: Path) -> Path:
    """The checkpoint `source`, stored in bfloat16 as real ones are."""
    load_model(source, torch.bfloat16).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    (folder / "NOTICE").write_text("where the weights come from\n")
    return folder


def logits(model: Any) -> torch.Tensor:
    """Of `IDS`."""
    with torch.inference_mode():
        return model(IDS).logits
