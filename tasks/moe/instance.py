"""An instance on disk: packed routed experts, everything else as the reference stores it, and how both are
loaded.

model-experts.safetensors   packed experts under the checkpoint's own names (tasks/quant/formats.py)
model-rest.safetensors      every other tensor, the same bytes for every instance of a reference
manifest.json               what was counted; marks the folder as an instance
config.json, tokenizer files, generation settings, notices; model.safetensors.index.json where exportable
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tasks.console import track
from tasks.contracts import InputError, read_json, write_json
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.registry import expert_keys, moe_layers
from tasks.moe.tensors import CheckpointTensors, auto_class, check_keys, read_config
from tasks.quant.formats import (
    EXPERTS_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    REST_FILE,
    Entry,
    TensorFile,
    packed_entries,
    packed_tensors,
    read_packed,
)
from tasks.quant.grid import Grid, scale_dtype
from tasks.quant.methods import quantize
from tasks.quant.size import ideal_bytes, relative_error_parts
from tasks.quant.threads import side_by_side

SIDE_FILES = (
    "generation_config.json",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
    "*token*",
    "vocab.*",
    "merges.txt",
)


@dataclass(frozen=True)
class Stack:
    """One matrix of all experts of one layer."""

    keys: list[str]  # [E] module paths in the checkpoint
    shape: tuple[int, int, int]  # E, out, in

    @property
    def names(self) -> list[str]:
        """[E] names of the floating tensors."""
        return [f"{key}.weight" for key in self.keys]


def expert_stacks(model: PreTrainedModel, source: CheckpointTensors) -> list[Stack]:
    """Every stack of routed expert matrices, in depth order; `model` may be on the meta device.

    Raises InputError when the model has no MoE layers or the checkpoint lacks an expert's tensor.
    """
    stacks = []
    for layer in moe_layers(model):
        for matrix, view in layer.matrices().items():
            stack = Stack(expert_keys(model, layer, matrix), (view.shape[0], view.shape[1], view.shape[2]))
            lacking = [name for name in stack.names if name not in source.files]
            if lacking:
                raise InputError(
                    f"{source.folder}: the checkpoint has no '{lacking[0]}' ({len(lacking)} of the layer's "
                    f"{len(stack.keys)} {matrix} matrices are absent): expected one tensor per expert"
                )
            stacks.append(stack)
    return stacks


def write_experts(
    path: Path, source: CheckpointTensors, stacks: list[Stack], method: str, grid: Grid
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Quantize and write stack by stack, one in memory at a time.

    Returns the file's entries and what was counted while writing: matrices, expert_parameters, expert_bytes,
    ideal_expert_bytes, stored_bits, relative_error (Frobenius, over all experts). Raises InputError before
    any work for a group size that does not divide, later for tensors of another shape or that are not finite.
    """
    entries: dict[str, Entry] = {}
    for stack in stacks:
        grid.groups(stack.shape[2], stack.keys[0])
        stored_as = scale_dtype(source.entry(stack.names[0])[0])
        entries.update(packed_entries(stack.keys, stack.shape[1:], grid, stored_as))
    parameters = matrices = stored = 0
    ideal = error = total = 0.0
    with TensorFile(path, entries) as file:
        for stack in track(stacks, f"W{grid.num_bits} {method}", len(stacks)):
            weights = source.stacked(stack.names)
            if tuple(weights.shape) != stack.shape:
                got, expected = list(weights.shape[1:]), list(stack.shape[1:])
                raise InputError(f"{source.folder}: '{stack.names[0]}' is {got}, config.json says {expected}")
            finite = side_by_side(lambda weight: bool(torch.isfinite(weight).all()), weights)
            if not all(finite):
                broken = stack.names[finite.index(False)]
                raise InputError(
                    f"{source.folder}: '{broken}' holds NaN or infinity: expected finite weights"
                )
            quantized = quantize(method, weights, grid, stack.keys[0])
            for name, tensor in packed_tensors(quantized, stack.keys).items():
                file.write(name, tensor)
                stored += tensor.nbytes
            stack_error, stack_total = relative_error_parts(weights, quantized)
            error, total = error + stack_error, total + stack_total
            ideal += ideal_bytes(stack.shape, grid)
            parameters += weights.numel()
            matrices += len(stack.keys)
    return entries, {
        "matrices": matrices,
        "expert_parameters": parameters,
        "expert_bytes": stored,
        "ideal_expert_bytes": ideal,
        "stored_bits": 8 * stored / parameters,
        "relative_error": (error / total) ** 0.5 if total else 0.0,
    }


def write_rest(path: Path, source: CheckpointTensors, stacks: list[Stack]) -> tuple[dict[str, Entry], int]:
    """Copy every tensor but the experts' as it is stored; returns the file's entries and their bytes."""
    experts = {name for stack in stacks for name in stack.names}
    names = sorted(name for name in source.files if name not in experts)
    entries = {name: source.entry(name) for name in names}
    written = 0
    with TensorFile(path, entries) as file:
        for name in names:
            tensor = source.get(name)
            file.write(name, tensor)
            written += tensor.nbytes
    return entries, written


def copy_side_files(reference: Path, folder: Path) -> None:
    """Tokenizer, generation settings and notices travel with an instance."""
    for pattern in SIDE_FILES:
        for path in sorted(reference.glob(pattern)):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, folder / path.name)


def write_index(folder: Path, files: Mapping[str, Mapping[str, Entry]]) -> None:
    """The index by which transformers finds tensors: file name -> entries."""
    weight_map = {name: file for file, entries in files.items() for name in entries}
    sizes = [
        dtype.itemsize * torch.Size(shape).numel()
        for entries in files.values()
        for dtype, shape in entries.values()
    ]
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def load_instance(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load an instance in eval mode, its experts dequantized layer by layer. Raises InputError on any key
    that is missing or too many."""
    config = read_config(folder, trust_remote_code)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # our own code reads the experts, symmetric or not
    with safe_open(folder / REST_FILE, "pt") as source:
        rest = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118 (not a dict)
    with torch.device("meta"):
        shell = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    with _without_load_report():  # it would list the experts, which come from their own file
        model, info = type(shell).from_pretrained(
            None,
            config=config,
            state_dict=rest,
            dtype=dtype,
            experts_implementation=EXPERTS_IMPLEMENTATION,
            output_loading_info=True,
        )
    layers = moe_layers(model)
    experts = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    fused = {name for name, parameter in model.named_parameters() if id(parameter) in experts}
    missing = set(info["missing_keys"])
    check_keys(
        folder, missing - fused, {*info["unexpected_keys"], *(fused - missing)}, info["mismatched_keys"]
    )
    num_bits = read_json(folder / MANIFEST_FILE)["bits"]
    with safe_open(folder / EXPERTS_FILE, "pt") as source:
        for layer in layers:
            for matrix, view in layer.matrices().items():
                view.copy_(read_packed(source, expert_keys(model, layer, matrix), num_bits).dequantize())
    return model.eval()


@contextmanager
def _without_load_report() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
