"""Quantize every routed expert of the reference at one bit width: one complete instance (fan-out over bits).

In: the reference's folder; for gptq also artifacts/requests/calibration.parquet. Out: artifacts/instances/W<bits>,
a folder that `tasks.moe.checkpoint.load_model` loads; with `symmetric: true` plain transformers and engines that
read compressed-tensors load it too, where the family allows it. All but the routed experts is byte for byte the
reference's.
Costs one pass over the expert weights, a few experts of one layer in memory at a time: on one core rtn, clip_search and
hqq take some ten million weights a second and more, gptq about four million. gptq also walks the calibration tokens
through the layers, with one layer's weights and Hessians in memory. A run that was killed is carried on by the next
one, layer by layer.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.console import run_step
from tasks.contracts import GIB, InputError, read_json, replacing_folder, write_json
from tasks.moe.checkpoint import skeleton
from tasks.moe.instance import copy_side_files, write_index, write_rest
from tasks.moe.manifest import calibration_counts, expert_counts, seen_by_optimum
from tasks.moe.quantizing import CalibratedWalk, digest_of, write_calibrated_shards, write_shards
from tasks.moe.registry import family_of
from tasks.moe.shards import Settings, Shards, unfinished
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.parallel import IN_PROCESS, workers
from tasks.params import QuantizeInstances, Runtime, load_params
from tasks.quant.formats import MANIFEST_FILE, REST_FILE, quantization_config
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tasks.quant.methods import NEEDS_HESSIANS
from tasks.replication.calibration import read_calibration

VERSION = 2


def run(
    reference: str | Path,
    output: str | Path,
    bits: int,
    params: QuantizeInstances,
    requests: str | Path | None = None,
    runtime: Runtime = IN_PROCESS,
) -> dict[str, Any]:
    """Write the instance folder `output` and return its manifest; `requests` holds gptq's calibration tokens.

    Raises InputError, before any quantization, for a reference without MoE layers, an expert that the
    checkpoint lacks, or a group size that does not divide a matrix; and for weights that are not finite, or more
    experts without calibration tokens than `gptq.max_fallback_share` allows.
    """
    reference, output = Path(reference), Path(output)
    settings = Settings(
        params.method,
        Grid(bits, params.group_size, params.symmetric),
        Gptq(damping=params.gptq.damping, shrinkage=params.gptq.shrinkage),
    )
    model = skeleton(reference)
    layers = stored_layers(model, CheckpointTensors(reference))
    for matrix in chain.from_iterable(layer.matrices for layer in layers):
        settings.grid.groups(matrix.shape[2], matrix.keys[0])
    walk = _walk(params, requests, runtime.batch_tokens)
    with unfinished(output, digest_of(reference, settings, walk)) as folder, workers(runtime) as spread:
        shards = Shards(folder, layers, settings.grid)
        if walk is None:
            write_shards(shards, reference, settings, spread)
        else:
            write_calibrated_shards(shards, reference, settings, spread, walk)
        return _publish(output, reference, model, bits, params, shards)


def _walk(params: QuantizeInstances, requests: str | Path | None, batch_tokens: int) -> CalibratedWalk | None:
    """The calibration of a method that needs one, None for the others."""
    if params.method not in NEEDS_HESSIANS:
        return None
    if requests is None:
        raise InputError(
            f"method '{params.method}' needs calibration tokens: give the folder of the requests"
        )
    sequences = read_calibration(Path(requests))
    return CalibratedWalk(sequences, batch_tokens, params.gptq.inputs, params.gptq.max_fallback_share)


def _publish(
    output: Path,
    reference: Path,
    model: PreTrainedModel,
    bits: int,
    params: QuantizeInstances,
    shards: Shards,
) -> dict[str, Any]:
    """Move the finished shards into a complete instance; returns its manifest."""
    family, counts = family_of(model.config), [shards.counts(place) for place in range(len(shards.layers))]
    counted, seen = expert_counts(model, counts), seen_by_optimum(model)
    obstacle = "asymmetric" if not params.symmetric else family.not_exportable
    export = "compressed-tensors pack-quantized" if obstacle is None else f"not for export: {obstacle}"
    with replacing_folder(output) as folder:
        rest, rest_bytes = write_rest(folder / REST_FILE, reference, shards.layers)
        copy_side_files(reference, folder)
        config = read_json(reference / "config.json")
        if obstacle is None:
            config["quantization_config"] = quantization_config(shards.grid, family.pattern())
            files = {own["file"]: shards.entries(place) for place, own in enumerate(counts)}
            write_index(folder, {REST_FILE: rest, **files})
        # A folder that is not for export has no index, on purpose: plain transformers then refuses it, where with one
        # it would ignore the zero points or fill the experts with random weights.
        write_json(folder / "config.json", config, digits=17)
        for place, own in enumerate(counts):  # late: until then, a run that is killed here is carried on
            shards.path(place).rename(folder / own["file"])
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        manifest = {
            "name": f"W{bits}",
            "version": VERSION,
            "bits": bits,
            "method": params.method,
            "group_size": params.group_size,
            "symmetric": params.symmetric,
            "exportable": obstacle is None,
            "export": export,
            **counted,
            "rest_bytes": rest_bytes,
            "size_bytes": size_bytes,  # of the whole folder but this manifest: headers and tokenizer included
            "size_gib": size_bytes / GIB,
            "ideal_gib": (counted["ideal_expert_bytes"] + rest_bytes) / GIB,
            "expert_matrices_seen_by_optimum_gptq": seen,
            "experts": [
                {key: own[key] for key in ("layer", "file", "sha256", "size_bytes")} for own in counts
            ],
        }
        if params.method in NEEDS_HESSIANS:
            manifest |= {"gptq": params.gptq.model_dump(), **calibration_counts(counts)}
        write_json(folder / MANIFEST_FILE, manifest, digits=10)
    return manifest


def main(bits: int) -> None:
    """Quantize the reference's experts at BITS bits."""
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    if bits not in params.quantize_instances.bits:
        raise InputError(
            f"W{bits} is not in the pool: quantize_instances.bits is {params.quantize_instances.bits}"
        )
    manifest = run(
        "artifacts/reference", f"artifacts/instances/W{bits}", bits, params.quantize_instances,
        "artifacts/requests", params.runtime,
    )  # fmt: skip
    # How often each expert was seen, and the shards' names, stay with the instance.
    numbers = {key: value for key, value in manifest.items() if not isinstance(value, list | dict)}
    write_json(f"metrics/instances/W{bits}.json", numbers)
    print(
        f"W{bits}: {manifest['blocks']} expert blocks, {manifest['matrices']} matrices, "
        f"{manifest['stored_bits']:.2f} bits per weight, {manifest['size_gib']:.3f} GiB, "
        f"relative error {manifest['relative_error']:.4f}"
    )


if __name__ == "__main__":
    run_step(main)
