"""Load, importance and LIS of every routed expert, on the calibration tokens.

In: artifacts/reference, artifacts/requests/calibration.parquet.
Out: artifacts/experts/ (experts.safetensors: ExpertStatistics; experts.json: the reference's loss on the
same tokens), metrics/experts.json.
Cost: one forward pass of the reference over `prepare_requests.calibration_tokens`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.console import run_step
from tasks.contracts import ExpertStatistics, replacing_folder, write_json
from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tasks.params import MeasureExperts, load_params
from tasks.replication.calibration import calibration_nll, read_calibration
from tasks.replication.importance import wanda
from tasks.replication.load import count_load, lis, lis_by_batch, rank_correlation

VERSION = 1


def run(
    reference: Path, requests: Path, out: Path, metrics: Path, params: MeasureExperts, batch_tokens: int
) -> None:
    """Measure the reference's experts; paths: reference, requests, the folder and the file of the outputs.

    Raises InputError as `read_calibration` and `load_model` do.
    """
    sequences = read_calibration(requests)
    model = load_model(reference)
    layers = moe_layers(model)
    load = np.zeros((len(sequences), len(layers), layers[0].num_experts), dtype=np.int64)  # [R, L, E]
    picks, dropped = (np.zeros(len(layers), dtype=np.int64) for _ in range(2))  # [L]
    nll, predictions = 0.0, 0
    with measure_expert_inputs(model) as inputs:
        for batch in prefill(model, sequences, batch_tokens, "calibration tokens", record=True):
            assert batch.routing is not None
            for place, (routing, passed) in enumerate(zip(batch.routing, batch.visited, strict=True)):
                reached = routing.reached(load.shape[2]).numpy()
                load[batch.rows, place] = count_load(reached, passed.numpy(), load.shape[2])
            routed, lost = batch.picks()
            picks, dropped = picks + routed, dropped + lost
            losses = calibration_nll(model, batch)
            nll, predictions = nll + float(losses.sum()), predictions + len(losses)
    total = load.sum(axis=0)  # [L, E]
    check_counts(total, picks, np.stack([own.load for own in inputs]))
    has_capacity = hasattr(model.config, "expert_capacity")
    if dropped.any() and not has_capacity:
        raise RuntimeError(f"{dropped} picks reached no expert, but this family's experts have no capacity")

    scores = [
        wanda(layer.matrices(), own.squares(), own.load) for layer, own in zip(layers, inputs, strict=True)
    ]
    importance, importance_rms = (np.stack(form) for form in zip(*scores, strict=True))
    numbers = np.array([layer.layer for layer in layers], dtype=np.int64)
    tokens = sum(map(len, sequences))
    mean_nll = nll / predictions
    with replacing_folder(out) as folder:
        ExpertStatistics(numbers, total, importance, importance_rms).save(folder / "experts.safetensors")
        write_json(
            folder / "experts.json",
            {"tokens": tokens, "predictions": predictions, "nll_reference": mean_nll, "version": VERSION},
        )
    values = summary(numbers, load, importance, importance_rms, tokens, mean_nll, params)
    if has_capacity:
        values["dropped"] = dropped  # [L] picks over an expert's capacity: not load, counted apart
    write_json(metrics, values)


def check_counts(load: np.ndarray, picks: np.ndarray, inputs: np.ndarray) -> None:
    """The routers' counts [L, E] sum to the picks [L] that reached an expert, real tokens x k where nothing is
    dropped, and the experts saw the same."""
    if (load.sum(axis=1) != picks).any() or (load != inputs).any():
        raise RuntimeError(f"{picks} picks of real tokens, the layers count {load.sum(axis=1)}")


def summary(
    numbers: np.ndarray,
    load: np.ndarray,
    importance: np.ndarray,
    importance_rms: np.ndarray,
    tokens: int,
    nll: float,
    params: MeasureExperts,
) -> dict[str, Any]:
    """metrics/experts.json from layer numbers [L], load [R, L, E] and importance [L, E]."""
    total = load.sum(axis=0)
    scores = lis(total)
    correlation = rank_correlation(total, importance)
    correlation_rms = rank_correlation(total, importance_rms)
    values: dict[str, Any] = {
        "layers": numbers,
        "tokens": tokens,
        "sequences": len(load),
        "lis": scores,
        "lis_mean": scores.mean(),
        "lis_batch": lis_by_batch(load, params.lis_batch_size, params.capacity_quantile),
        "load": total,
        "experts_without_tokens": int((total == 0).sum()),
        "nll_reference": nll,
        "version": VERSION,
    }
    # Undefined where all of a layer's experts have the same load: such layers are left out, and counted.
    for name, form in (("", correlation), ("_rms", correlation_rms)):
        if np.isfinite(form).any():
            values[f"load_importance_spearman{name}"] = np.nanmean(form)
    values["layers_without_rank_correlation"] = int(np.isnan(correlation).sum())
    return values


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    run(
        Path("artifacts/reference"),
        Path("artifacts/requests"),
        Path("artifacts/experts"),
        Path("metrics/experts.json"),
        params.measure_experts,
        params.runtime.batch_tokens,
    )


if __name__ == "__main__":
    run_step(main)
