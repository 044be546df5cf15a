"""One replicate-and-quantize variant: planned, packed, run, its copies' tokens counted.

In: artifacts/reference, artifacts/requests/calibration.parquet, artifacts/experts.
Out: artifacts/variants/<name>/ (plan.json, physical.safetensors with the packed experts and nothing else,
manifest.json), metrics/variants/<name>.json.
Cost: one forward pass of the variant over `prepare_requests.calibration_tokens`; rounding is quick.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tasks.console import run_step, timed
from tasks.contracts import (
    GIB,
    ExpertStatistics,
    InputError,
    read_json,
    replacing_folder,
    write_json,
)
from tasks.moe.checkpoint import PHYSICAL_FILE, PLAN_FILE, load_model, load_variant
from tasks.moe.prefill import prefill
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.replicas import model_hash, physical_load
from tasks.moe.tensors import CheckpointTensors
from tasks.params import Params, Variant, load_params
from tasks.replication.calibration import calibration_nll, read_calibration
from tasks.replication.load import before_and_after
from tasks.replication.packing import count_bytes, expert_bytes, pack_physical_experts
from tasks.replication.plan import plan_variant

VERSION = 1


def run(
    name: str,
    variant: Variant,
    reference: Path,
    requests: Path,
    experts: Path,
    out: Path,
    metrics: Path,
    batch_tokens: int,
) -> None:
    """Build and run variant `name`; paths: the artifact folders, the variant's folder and its metric file.

    Raises InputError where the statistics are of another model, the group size does not divide a matrix, or
    no plan fits into the bytes of before.
    """
    if not (experts / "experts.safetensors").is_file():
        raise InputError(f"{experts}: no expert statistics there: run measure_experts first")
    statistics = ExpertStatistics.load_from(experts / "experts.safetensors")
    sequences = read_calibration(requests)
    model = load_model(reference)
    layers = moe_layers(model)
    check_statistics(statistics, layers, experts)
    checkpoint = CheckpointTensors(reference)
    sizes = [expert_bytes(model, layer, checkpoint, variant) for layer in layers]
    plan = plan_variant(statistics, sizes, variant, model_hash(model))
    # Counted before the variant takes over the model's experts.
    parameters = sum(view.numel() for layer in layers for view in layer.matrices().values())
    reference_bytes = sum(checkpoint.get(key).nbytes for key in checkpoint.files)

    with replacing_folder(out) as folder:
        plan.save(folder / PLAN_FILE)
        with timed("packing physical experts"):
            packed = pack_physical_experts(model, plan)
            save_file(packed, folder / PHYSICAL_FILE)
        manifest = count_bytes(plan, sizes, packed, reference_bytes)
        manifest |= {"name": name, "expert_parameters": parameters, "version": VERSION}
        write_json(folder / "manifest.json", manifest)
        load_variant(model, folder)
        counts, nll = run_variant(model, sequences, batch_tokens)

    values = before_and_after(statistics.load, np.stack(counts), plan, variant.replicas)
    values |= {
        "name": name,
        "size_bytes": manifest["size_bytes"],
        "size_bytes_before": manifest["size_bytes_before"],
        "size_gib": manifest["size_bytes"] / GIB,
        "stored_bits": 8 * manifest["expert_bytes"] / parameters,
        "nll": nll,
        "nll_reference": read_json(experts / "experts.json")["nll_reference"],
        "version": VERSION,
    }
    write_json(metrics, values)
    drift, gap = max(values["routing_drift"]), values["lis_even_split_gap"]
    print(
        f"  LIS {values['lis_mean_before']:.3f} -> {values['lis_mean']:.3f}; "
        f"an even split of the load of before: {np.mean(values['lis_even_split']):.3f} "
        f"(largest gap of a layer {gap:.3f}, where quantization moved up to {drift:.1%} of a layer's picks)"
    )


def check_statistics(statistics: ExpertStatistics, layers: list[MoELayer], origin: Path) -> None:
    expected = ([layer.layer for layer in layers], (len(layers), layers[0].num_experts))
    if (statistics.layers.tolist(), statistics.load.shape) != expected:
        raise InputError(
            f"{origin}: the statistics are of MoE layers {statistics.layers.tolist()} with "
            f"{statistics.load.shape[1]} experts, expected layers {expected[0]} with {expected[1][1]}: "
            "run measure_experts on this reference"
        )


def run_variant(
    model: PreTrainedModel, sequences: list[list[int]], batch_tokens: int
) -> tuple[list[np.ndarray], float]:
    """[L] x [m + r] tokens that each physical copy computed, and the mean loss in nats of that forward."""
    picks, losses = np.zeros(len(moe_layers(model)), dtype=np.int64), []  # [L]
    for batch in prefill(model, sequences, batch_tokens, "calibration tokens", record=True):
        picks += batch.picks()[0]
        losses.append(calibration_nll(model, batch))
    counts = physical_load(model)
    if [int(count.sum()) for count in counts] != picks.tolist():
        raise RuntimeError(
            f"{picks} picks of real tokens, the copies computed {[int(c.sum()) for c in counts]}"
        )
    return counts, float(np.concatenate(losses).mean())


def check_name(name: str, params: Params) -> Variant:
    """The parameters of variant `name`; InputError for an unknown name and for the name of another model."""
    variants = params.build_variants.variants
    if name == "reference" or name in params.quantize_instances.names:
        raise InputError(f"'{name}' is the name of another model of the run: call the variant otherwise")
    if name not in variants:
        near = difflib.get_close_matches(name, list(variants), n=1, cutoff=0.0)
        hint = f"; did you mean '{near[0]}'?" if near else "; build_variants.variants is empty"
        raise InputError(f"no variant is called '{name}'{hint}")
    return variants[name]


def main(name: str) -> None:
    params = load_params()
    variant = check_name(name, params)
    torch.set_num_threads(params.runtime.threads)
    artifacts = Path("artifacts")
    run(
        name,
        variant,
        artifacts / "reference",
        artifacts / "requests",
        artifacts / "experts",
        artifacts / "variants" / name,
        Path("metrics/variants") / f"{name}.json",
        params.runtime.batch_tokens,
    )


if __name__ == "__main__":
    run_step(main)
