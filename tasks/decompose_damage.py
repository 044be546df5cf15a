"""Take every instance's damage apart by exact swaps, and estimate the fragility of every expert.

In: the reference, the instances, requests.parquet (a few fit and holdout requests, by class and seed) and
calibration.parquet. Out: artifacts/decomposition/ (tasks/contracts.py) and metrics/decomposition.json: per
instance the terms on holdout requests, how well cheap fragilities agree with exact swaps, what each costs in
tokens, and its super experts. Fragility sees calibration tokens alone. An encoder-decoder's routes cannot be
held over its two stacks: its metrics say `supported: false` and why.
Cost: about (L / 2 + pairs / 3) passes over the requests an instance, as a pass begins at its lowest swapped
layer; one pass and 1 + probes backward passes over the calibration tokens; swap_layers * E / 2 passes over
swap_tokens an instance. `cost` in the metrics has the tokens. Reference and one instance are in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from tasks.console import run_step
from tasks.contracts import Fragility, InputError, replacing_folder, write_json
from tasks.moe.checkpoint import load_model
from tasks.moe.tensors import read_config
from tasks.params import DecomposeDamage, load_params
from tasks.replication.calibration import read_calibration
from tasks.risk.damage_audit import Audit, fitting
from tasks.risk.decomposition import TERMS
from tasks.risk.fragility import router_row_norm
from tasks.risk.scoring import Requests, read_requests

VERSION = 1

COLUMNS = ["instance", "id", "split", "total", *TERMS, "sampling_error"]  # of terms.parquet


def run(
    reference_folder: Path,
    instances_folder: Path,
    requests_folder: Path,
    instances: list[str],
    params: DecomposeDamage,
    damage: str,
    scored: Literal["response", "prompt"],
    batch_tokens: int,
    output_folder: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Decompose the damage ("dnll" or "kl") of `instances`; write the outputs, return the metrics.

    Raises InputError where a split has no request, an instance is missing or of another reference, or a loss
    is no number.
    """
    for name in instances:
        if not (instances_folder / name / "config.json").is_file():
            raise InputError(
                f"{instances_folder / name}: no instance there; run the stage quantize_instances for {name}"
            )
    dtype = getattr(torch, params.compute_dtype)
    config = read_config(reference_folder)
    if config.is_encoder_decoder:
        reason = f"{config.model_type} is an encoder-decoder: swaps and gradients need a decoder-only model"
        arrays = {"router_row_norm": router_row_norm(load_model(reference_folder, dtype))}
        found = {"supported": False, "reason": reason, "version": VERSION}
        return _write(output_folder, metrics_file, arrays, pd.DataFrame(columns=COLUMNS), found, found)
    requests = read_requests(requests_folder / "requests.parquet", config.vocab_size)
    requests = sampled(requests, params.fit_requests, params.holdout_requests, params.seed)
    calibration = calibration_requests(read_calibration(requests_folder), params.fragility_tokens)
    audit = Audit(
        load_model(reference_folder, dtype), requests, calibration, params, damage, scored, batch_tokens
    )
    for name in instances:
        audit.add(name, load_model(instances_folder / name, dtype))
    counts = {"supported": True, "version": VERSION, **audit.counts()}
    metrics = {**counts, "instances": audit.figures, "cost": audit.cost()}
    return _write(output_folder, metrics_file, audit.arrays, pd.concat(audit.terms), counts, metrics)


def _write(
    folder: Path,
    metrics_file: Path,
    arrays: dict[str, np.ndarray],
    terms: pd.DataFrame,
    counts: dict[str, Any],
    metrics: dict[str, Any],
) -> dict[str, Any]:
    with replacing_folder(folder) as made:
        Fragility({name: np.nan_to_num(array) for name, array in arrays.items()}).save(made)
        terms[COLUMNS].to_parquet(made / "terms.parquet", index=False)
        write_json(made / "decomposition.json", counts)
    write_json(metrics_file, metrics)
    return metrics


def sampled(requests: Requests, fit: int, holdout: int, seed: int) -> Requests:
    """`fit` and `holdout` of the requests of these splits, one of each class in turn, classes and requests in
    a seeded order; all of a split that has no more. Raises InputError where a split has none."""
    taken: list[int] = []
    for part, (split, count) in enumerate((("fit", fit), ("holdout", holdout))):
        own = np.flatnonzero((requests.frame["split"] == split).to_numpy())
        if not len(own):
            raise InputError(
                f"requests.parquet: split '{split}' has no request; phi and bias need fit requests, and the "
                "terms are reported on holdout ones: prepare requests with both"
            )
        rng = np.random.default_rng([seed, part])
        own = rng.permutation(own)
        classes = requests.frame["class"].to_numpy()[own]
        order = {name: at for at, name in enumerate(rng.permutation(sorted(set(classes))))}
        turn = pd.Series(classes).groupby(classes).cumcount().to_numpy()
        ranked = np.lexsort(([order[name] for name in classes], turn))
        taken += own[ranked[:count]].tolist()
    taken.sort()
    sequences = [requests.sequences[row] for row in taken]
    return Requests(requests.frame.iloc[taken], sequences, requests.prompt_length[taken])


def calibration_requests(sequences: list[list[int]], most: int) -> Requests:
    """Calibration sequences of `most` tokens together as requests of which every prediction but the first is
    scored; those of fewer than 3 tokens have none and are left out."""
    long = [row for row, own in enumerate(sequences) if len(own) > 2]
    rows = [long[place] for place in fitting([len(sequences[row]) for row in long], most)]
    kept, ids = [sequences[row] for row in rows], [f"calibration/{row}" for row in rows]
    frame = pd.DataFrame({"id": ids, "class": "calibration", "split": "calibration"})
    return Requests(frame, kept, np.full(len(kept), 2, dtype=np.int64))


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    run(
        Path("artifacts/reference"),
        Path("artifacts/instances"),
        Path("artifacts/requests"),
        params.quantize_instances.names,
        params.decompose_damage,
        params.calibrate_fwp.damage,
        params.calibrate_fwp.scored,
        params.runtime.batch_tokens,
        Path("artifacts/decomposition"),
        Path("metrics/decomposition.json"),
    )


if __name__ == "__main__":
    run_step(main)
