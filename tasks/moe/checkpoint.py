"""Load a reference, an instance or a variant folder as a transformers model in eval mode.

A folder is recognised by its sidecar: manifest.json in an instance, plan.json in a variant, neither in a
reference. Packed experts are dequantized layer by layer into the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tasks.contracts import InputError, ReplicationPlan
from tasks.moe.family import check_stored
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.headers import merge_headers, read_header
from tasks.moe.instance import load_instance
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import check_plan, install_physical_experts
from tasks.moe.skeleton_keys import base_of, compare_keys, model_keys
from tasks.moe.tensors import CheckpointTensors, auto_class, check_finite, check_keys, read_config
from tasks.quant.formats import MANIFEST_FILE, SUFFIXES, read_packed

PLAN_FILE = "plan.json"
PHYSICAL_FILE = "physical.safetensors"


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    reference: str | Path | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load `folder` in eval mode, all its weights in `dtype`.

    A variant needs `reference`, the folder that holds everything it did not quantize. Raises InputError for a
    folder without a checkpoint, for truncated files, for any missing or unexpected key, for weights that are
    not finite, and for a variant without its reference.
    """
    folder = Path(folder)
    transformers_logging.disable_progress_bar()
    if (folder / PLAN_FILE).is_file():
        if reference is None:
            raise InputError(f"{folder} is a variant: give the reference folder that holds its other weights")
        model = load_model(reference, dtype, None, trust_remote_code)
        load_variant(model, folder)
        return model
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json there: expected a checkpoint folder")
    if (folder / MANIFEST_FILE).is_file():
        merge_headers(sorted(folder.glob("*.safetensors")))  # whole, before any is read
        model = load_instance(folder, dtype, trust_remote_code)
        check_finite(folder, model.named_parameters())
        return model
    # Safetensors only, every shard whole, and weights that transformers reads as they are.
    check_stored(CheckpointTensors(folder).headers, str(folder))
    config = read_config(folder, trust_remote_code)
    try:
        loaded: Any = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation=EXPERTS_IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below, with the missing and the unexpected
            output_loading_info=True,
        )
    except RuntimeError:  # a layer's experts could not be stacked: say which do not fit
        check_names(folder, skeleton(folder, trust_remote_code))
        raise
    model, info = loaded
    check_keys(folder, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    check_finite(folder, model.named_parameters())
    return model.eval()


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a checkpoint."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def skeleton(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder's config.json without memory for weights, to see its modules and shapes."""
    config = read_config(Path(folder), trust_remote_code)
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def check_names(folder: Path, model: PreTrainedModel) -> None:
    """Raise InputError when the tensors in `folder` are not those that `model`'s skeleton names, in their shapes."""
    stored = {base_of(name): tensor for name, tensor in CheckpointTensors(folder).headers.items()}
    missing, unexpected, known = compare_keys(model_keys(model), stored)
    other = [base for base, (_, shape) in known.items() if stored[base].shape != shape]
    check_keys(folder, missing, unexpected, other)


def load_variant(model: PreTrainedModel, folder: Path) -> None:
    """Turn `model`, a loaded reference, into the variant in `folder`; its packed experts are keyed by
    physical number.

    Raises InputError for a plan made for another model, and for any missing or unexpected packed tensor.
    """
    plan = ReplicationPlan.load_from(folder / PLAN_FILE)
    read_header(folder / PHYSICAL_FILE)  # whole, before any is read
    check_plan(model, plan, str(folder / PLAN_FILE))
    weights: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    expected: set[str] = set()
    with safe_open(folder / PHYSICAL_FILE, "pt") as source:
        stored = set(source.keys())
        for position, (layer, own) in enumerate(zip(moe_layers(model), plan.layers, strict=True)):
            weights[position] = {}
            for physical, bits in enumerate(own.bits):
                if bits:
                    keys = {matrix: layer.key(physical, matrix) for matrix in layer.matrices()}
                    weights[position][physical] = {
                        matrix: read_packed(source, [key], bits).dequantize()[0]
                        for matrix, key in keys.items()
                    }
                    expected |= {f"{key}.{suffix}" for key in keys.values() for suffix in SUFFIXES}
    if stored - expected:
        raise InputError(
            f"{folder / PHYSICAL_FILE}: {len(stored - expected)} tensors that the plan does not name, "
            f"first {min(stored - expected)}"
        )
    install_physical_experts(model, plan, weights)
