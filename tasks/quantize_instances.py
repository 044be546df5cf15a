"""Quantize every routed expert of the reference at one bit width: one complete instance (fan-out over bits).

In: the reference's folder. Out: artifacts/instances/W<bits>, a folder that `tasks.moe.checkpoint.load_model`
loads; with `symmetric: true` plain transformers and engines that read compressed-tensors load it too.
Everything but the routed experts is byte for byte the reference's.
Costs one pass over the expert weights, one matrix of one layer in memory at a time: hqq about 4 million
weights a second on one core, rtn about 100 million.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.console import run_step
from tasks.contracts import GIB, InputError, read_json, replacing_folder, write_json
from tasks.moe.checkpoint import skeleton
from tasks.moe.instance import copy_side_files, expert_stacks, write_experts, write_index, write_rest
from tasks.moe.registry import family_of, moe_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.params import QuantizeInstances, load_params
from tasks.quant.formats import EXPERTS_FILE, MANIFEST_FILE, REST_FILE, file_sha256, quantization_config
from tasks.quant.grid import Grid

VERSION = 1


def run(reference: str | Path, output: str | Path, bits: int, params: QuantizeInstances) -> dict[str, Any]:
    """Write the instance folder `output` and return its manifest.

    Raises InputError, before any quantization, for a reference without MoE layers, an expert that the
    checkpoint lacks, or a group size that does not divide a matrix; and for weights that are not finite.
    """
    reference = Path(reference)
    grid = Grid(bits, params.group_size, params.symmetric)
    model = skeleton(reference)
    source = CheckpointTensors(reference)
    stacks = expert_stacks(model, source)
    with replacing_folder(output) as folder:
        experts, counted = write_experts(folder / EXPERTS_FILE, source, stacks, params.method, grid)
        rest, rest_bytes = write_rest(folder / REST_FILE, source, stacks)
        copy_side_files(reference, folder)
        config = read_json(reference / "config.json")
        if grid.symmetric:
            config["quantization_config"] = quantization_config(grid, family_of(model.config).pattern())
            write_index(folder, {REST_FILE: rest, EXPERTS_FILE: experts})
        # An asymmetric folder has no index, on purpose: plain transformers then refuses it, where with one it
        # would ignore the zero points or fill the experts with random weights.
        write_json(folder / "config.json", config, digits=17)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        manifest = {
            "name": f"W{bits}",
            "version": VERSION,
            "bits": bits,
            "method": params.method,
            "group_size": params.group_size,
            "symmetric": params.symmetric,
            "exportable": params.symmetric,
            "export": "compressed-tensors pack-quantized"
            if params.symmetric
            else "not for export: asymmetric",
            **_checked_counts(model, counted),
            "rest_bytes": rest_bytes,
            "size_bytes": size_bytes,  # of the whole folder but this manifest: headers and tokenizer included
            "size_gib": size_bytes / GIB,
            "ideal_gib": (counted["ideal_expert_bytes"] + rest_bytes) / GIB,
            "expert_matrices_seen_by_optimum_gptq": _seen_by_optimum(model),
            "experts_sha256": file_sha256(folder / EXPERTS_FILE),
        }
        write_json(folder / MANIFEST_FILE, manifest, digits=10)
    return manifest


def _checked_counts(model: PreTrainedModel, counted: dict[str, Any]) -> dict[str, Any]:
    """`counted` and the expert blocks; raises RuntimeError unless what was written is all that the modules
    hold."""
    layers = moe_layers(model)
    blocks = sum(layer.num_experts for layer in layers)
    matrices = sum(layer.num_experts * len(layer.matrices()) for layer in layers)
    parameters = sum(parameter.numel() for layer in layers for parameter in layer.experts.parameters())
    if (counted["matrices"], counted["expert_parameters"]) != (matrices, parameters):
        raise RuntimeError(
            f"quantized {counted['matrices']} matrices with {counted['expert_parameters']} parameters, "
            f"expected {matrices} with {parameters}"
        )
    return {"layers": len(layers), "blocks": blocks, **counted}


def _seen_by_optimum(model: PreTrainedModel) -> int:
    """Routed expert matrices that optimum's GPTQ quantizer finds. It looks for Linear modules, so it passes
    over experts fused into one parameter without a word."""
    from optimum.gptq.utils import get_layers  # seconds to import, and only needed here

    prefixes = tuple(f"{layer.name}.experts." for layer in moe_layers(model))
    return sum(name.startswith(prefixes) for name in get_layers(model))


def main(bits: int) -> None:
    """Quantize the reference's experts at BITS bits."""
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    if bits not in params.quantize_instances.bits:
        raise InputError(
            f"W{bits} is not in the pool: quantize_instances.bits is {params.quantize_instances.bits}"
        )
    manifest = run("artifacts/reference", f"artifacts/instances/W{bits}", bits, params.quantize_instances)
    write_json(f"metrics/instances/W{bits}.json", manifest)
    print(
        f"W{bits}: {manifest['blocks']} expert blocks, {manifest['matrices']} matrices, "
        f"{manifest['stored_bits']:.2f} bits per weight, {manifest['size_gib']:.3f} GiB, "
        f"relative error {manifest['relative_error']:.4f}"
    )


if __name__ == "__main__":
    run_step(main)
