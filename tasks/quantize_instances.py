"""Quantize every routed expert of the reference at one bit width: one complete instance (fan-out over bits).

In: the reference's folder; for gptq, or with protected experts, also artifacts/requests/calibration.parquet. Out:
artifacts/instances/W<bits>, a folder that `tasks.moe.checkpoint.load_model` loads; with `symmetric: true` plain
transformers and engines that read compressed-tensors load it too, where the family allows it. All but the routed
experts is byte for byte the reference's.
Costs one pass over the expert weights, a few experts of one layer in memory at a time: on one core rtn, clip_search and
hqq take some ten million weights a second and more, gptq about four million. gptq also walks the calibration tokens
through the layers, with one layer's weights and Hessians in memory. With `protect: n` every expert is quantized twice,
first to find the n that lose most (tasks/moe/fragile.py): these stay as the reference stores them. A run that was
killed is carried on by the next one, layer by layer.
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
from tasks.moe.fragile import Fragile, by_place, most_fragile, output_errors
from tasks.moe.instance import copy_side_files, write_index, write_rest
from tasks.moe.manifest import calibration_counts, expert_counts, protected_counts, seen_by_optimum
from tasks.moe.quantizing import CalibratedWalk, digest_of, write_calibrated_shards, write_shards
from tasks.moe.registry import family_of, keeps_experts_apart
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
    """Write the instance folder `output` and return its manifest; `requests` holds the calibration tokens of gptq and
    of `protect`.

    Raises InputError, before any quantization, for a reference without MoE layers, an expert that the
    checkpoint lacks, a group size that does not divide a matrix, or no expert left to quantize; and for weights that
    are not finite, or more experts without calibration tokens than `gptq.max_fallback_share` allows.
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
    blocks = sum(layer.experts for layer in layers)
    if params.protect >= blocks:
        raise InputError(
            f"quantize_instances.protect is {params.protect}, but the model has {blocks} routed experts: "
            "expected fewer, so that some are quantized"
        )
    walk = _walk(params, requests, runtime.batch_tokens)
    digest = digest_of(reference, settings, walk, params.protect)
    with unfinished(output, digest) as folder, workers(runtime) as spread:
        fragile: list[Fragile] = []
        if walk is not None and params.protect:
            errors = output_errors(reference, layers, settings, walk, spread, folder)
            fragile = most_fragile(errors, params.protect)
        shards = Shards(folder, layers, settings.grid, by_place(fragile))
        if walk is not None and params.method in NEEDS_HESSIANS:
            write_calibrated_shards(shards, reference, settings, spread, walk)
        else:
            write_shards(shards, reference, settings, spread)
        return _publish(output, reference, model, bits, params, shards, fragile)


def _walk(params: QuantizeInstances, requests: str | Path | None, batch_tokens: int) -> CalibratedWalk | None:
    """The calibration tokens where the method or `protect` needs them, else None."""
    if params.method not in NEEDS_HESSIANS and not params.protect:
        return None
    if requests is None:
        who = f"method '{params.method}'" if params.method in NEEDS_HESSIANS else f"protect {params.protect}"
        raise InputError(f"{who} needs calibration tokens: give the folder of the requests")
    sequences = read_calibration(Path(requests))
    return CalibratedWalk(sequences, batch_tokens, params.gptq.inputs, params.gptq.max_fallback_share)


def _publish(
    output: Path,
    reference: Path,
    model: PreTrainedModel,
    bits: int,
    params: QuantizeInstances,
    shards: Shards,
    fragile: list[Fragile],
) -> dict[str, Any]:
    """Move the finished shards into a complete instance; returns its manifest."""
    family, counts = family_of(model.config), [shards.counts(place) for place in range(len(shards.layers))]
    counted, seen = expert_counts(model, counts), seen_by_optimum(model)
    protected = protected_counts(fragile, model, counts) if fragile else {}
    obstacle = "asymmetric" if not params.symmetric else family.not_exportable
    if obstacle is None and fragile and not keeps_experts_apart(model):
        obstacle = "engines read the experts of a layer in one format, and protected ones are not packed"
    export = "compressed-tensors pack-quantized" if obstacle is None else f"not for export: {obstacle}"
    with replacing_folder(output) as folder:
        rest, rest_bytes = write_rest(folder / REST_FILE, reference, shards.layers)
        copy_side_files(reference, folder)
        config = read_json(reference / "config.json")
        if obstacle is None:
            kept = [name for own in protected.get("protected", ()) for name in own["matrices"]]
            config["quantization_config"] = quantization_config(shards.grid, family.pattern(), kept)
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
            **protected,
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
    for own in manifest.get("protected", ()):
        print(
            f"  protected: expert {own['expert']} of layer {own['layer']}, output error {own['output_error']:.4g} "
            f"({own['output_error_without_first']:.4g} without position 0), {own['size_bytes']} bytes"
        )


if __name__ == "__main__":
    run_step(main)
