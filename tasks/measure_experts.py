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
    picks, nll, predictions = 0, 0.0, 0
    with measure_expert_inputs(model) as inputs:
        for batch in prefill(model, sequences, batch_tokens, "calibration tokens", record=True):
            assert batch.routing is not None
            mask = batch.mask.numpy()
            for place, routing in enumerate(batch.routing):
                load[batch.rows, place] = count_load(routing.index.numpy(), mask, load.shape[2])
            picks += int(mask.sum()) * batch.routing[0].index.shape[2]
            losses = calibration_nll(model, batch)
            nll, predictions = nll + float(losses.sum()), predictions + len(losses)
    total = load.sum(axis=0)  # [L, E]
    check_counts(total, picks, np.stack([own.load for own in inputs]))

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
    write_json(metrics, summary(numbers, load, importance, importance_rms, tokens, mean_nll, params))


def check_counts(load: np.ndarray, picks: int, inputs: np.ndarray) -> None:
    """The routers' counts [L, E] sum to real tokens x k (nothing drops here), the experts saw the same."""
    if (load.sum(axis=1) != picks).any() or (load != inputs).any():
        raise RuntimeError(f"{picks} picks of real tokens, the layers count {sorted(set(load.sum(axis=1)))}")


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
