"""An instance on disk: packed routed experts, everything else as the reference stores it, and how both are
loaded.

model-experts-00001-of-000NN.safetensors   packed experts (tasks/quant/formats.py), one shard per MoE layer; those
                                           that the manifest lists as protected as the reference stores them
model-rest.safetensors                     every other tensor, the same bytes for every instance of a reference
manifest.json                              what was counted, and the shards; marks the folder as an instance
config.json, tokenizer files, generation settings, notices; model.safetensors.index.json where exportable
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tasks.contracts import InputError, read_json, write_json
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.registry import moe_layers
from tasks.moe.stored_experts import StoredLayer, consumed
from tasks.moe.tensors import CheckpointTensors, auto_class, check_finite, check_keys, read_config
from tasks.quant.formats import (
    INDEX_FILE,
    MANIFEST_FILE,
    REST_FILE,
    SUFFIXES,
    Entry,
    TensorFile,
    expert_files,
    plain_name,
    read_packed,
    read_plain,
)

MAPPED_BYTES = 2**28
EXPERTS_AT_ONCE = 16
SIDE_FILES = (
    "generation_config.json",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
    "*token*",
    "vocab.*",
    "merges.txt",
)


def write_rest(path: Path, reference: Path, layers: Sequence[StoredLayer]) -> tuple[dict[str, Entry], int]:
    """Copy every tensor but the experts' as it is stored; returns the file's entries and their bytes.

    Biases of experts are among them. Raises InputError for a tensor that is not finite.
    """
    source = CheckpointTensors(reference)
    names = sorted(source.files.keys() - consumed(layers))
    entries = {name: source.entry(name) for name in names}
    written = mapped = 0
    with TensorFile(path, entries) as file:
        for name in names:
            if mapped > MAPPED_BYTES:  # what is mapped counts as memory of this process
                source, mapped = CheckpointTensors(reference), 0
            tensor = source.get(name)
            check_finite(reference, [(name, tensor)])
            file.write(name, tensor)
            written, mapped = written + tensor.nbytes, mapped + tensor.nbytes
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
    manifest, shards = read_json(folder / MANIFEST_FILE), expert_files(folder)
    if len(shards) != len(layers):
        raise InputError(
            f"{folder}: {len(shards)} shards of experts, but the model of config.json has {len(layers)} MoE layers: "
            "expected one each"
        )
    protected = protected_experts(manifest)
    sizes = {layer.layer: layer.num_experts for layer in layers}
    for number, kept in protected.items():
        if max(kept) >= sizes.get(number, 0):
            raise InputError(
                f"{folder}: {MANIFEST_FILE} protects expert {max(kept)} of layer {number}: expected one of the "
                f"{sizes.get(number, 0)} experts that the layer has: quantize again"
            )
    for layer, shard in zip(layers, shards, strict=True):
        kept = protected.get(layer.layer, ())
        with safe_open(shard, "pt") as source:
            known = {
                name
                for matrix in layer.matrices()
                for expert, key in enumerate(layer.keys(matrix))
                for name in ([plain_name(key)] if expert in kept else [f"{key}.{part}" for part in SUFFIXES])
            }
            check_keys(shard, (), set(source.keys()) - known)
            for matrix, view in layer.matrices().items():
                read_experts_into(view, source, layer.keys(matrix), manifest["bits"], kept)
    return model.eval()


def protected_experts(manifest: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Layer, as MoELayer counts -> the experts that an instance keeps as the reference stores them."""
    kept: dict[int, tuple[int, ...]] = {}
    for own in manifest.get("protected", ()):
        kept[own["layer"]] = (*kept.get(own["layer"], ()), own["expert"])
    return kept


def read_experts_into(
    view: torch.Tensor, source: Any, keys: Sequence[str], num_bits: int, protected: Collection[int] = ()
) -> None:
    """Fill `view` [E, out, in] with the matrices `keys` of a shard, packed or protected, a few experts at a time.

    Raises InputError naming a tensor that is absent or whose shape disagrees.
    """
    packed = [expert for expert in range(len(keys)) if expert not in protected]
    for first in range(0, len(packed), EXPERTS_AT_ONCE):
        part = packed[first : first + EXPERTS_AT_ONCE]
        quantized = read_packed(source, [keys[expert] for expert in part], num_bits)
        view[part] = quantized.dequantize(view.dtype)
    for expert in sorted(protected):
        view[expert] = read_plain(source, keys[expert], tuple(view.shape[1:]))


@contextmanager
def _without_load_report() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
