"""Score every request under one model: token losses, KL from the reference, token routing of the prompt.

In: requests.parquet and one model (the reference, or an instance and the reference's scores).
Out: artifacts/scores/<model>/ with TokenScores and PrefillRouting (tasks/contracts.py); for the reference
also `hidden.safetensors`, the final hidden state before every prediction. Each instance redoes only the
lm_head on those, so its KL(reference || instance) is exact over the whole vocabulary.
Cost: one forward pass over all requests, the lm_head once (reference) or twice (instance), a gigabyte or so
beyond the model for a vocabulary of 49,152.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from tasks.console import run_step
from tasks.contracts import InputError, TokenScores, read_json, replacing_folder, write_json
from tasks.moe.checkpoint import load_model
from tasks.params import load_params
from tasks.risk.damage import check_same_requests, damage_summary, request_means, scored_tokens
from tasks.risk.scoring import Requests, read_requests, score

VERSION = 1

REFERENCE = "reference"


def run(
    name: str,
    model_folder: Path,
    requests_file: Path,
    scores_folder: Path,
    metrics_file: Path,
    compute_dtype: str,
    batch_tokens: int,
) -> None:
    """Score model `name`; writes scores_folder/<name> and the metrics. The reference goes first."""
    model = load_model(model_folder, dtype=getattr(torch, compute_dtype))
    requests = read_requests(requests_file, model.config.vocab_size)
    stamp = {
        "name": name,
        "compute_dtype": compute_dtype,
        "lm_head_sha256": _head_sha256(model),
        "version": VERSION,
    }
    reference, hidden = None, None
    if name != REFERENCE:
        reference, hidden = _read_reference(scores_folder / REFERENCE, requests, stamp)
    scores, routing, own_hidden = score(model, requests, name, batch_tokens, hidden)
    with replacing_folder(scores_folder / name) as folder:
        scores.save(folder)
        routing.save(folder)
        if reference is None:
            save_file({"hidden": own_hidden}, folder / "hidden.safetensors")
        write_json(folder / "scores.json", stamp)
    counted = {"name": name, "tokens": int(scored_tokens(scores, "response").sum()), "version": VERSION}
    if reference is None:
        per_request = request_means(scores.nll.astype(np.float64), scores, "response")
        write_json(metrics_file, {**counted, "nll_mean": float(per_request.mean())})
    else:
        write_json(metrics_file, {**counted, **damage_summary(scores, reference, requests.frame)})


def _read_reference(
    folder: Path, requests: Requests, stamp: dict[str, Any]
) -> tuple[TokenScores, torch.Tensor]:
    """The reference's scores and hidden states [N, H]; of these requests, this dtype and this lm_head."""
    if not (folder / "scores.json").exists():
        raise InputError(f"{folder}: the reference is not scored yet; run the stage score_reference first")
    scores, known = TokenScores.load_from(folder), read_json(folder / "scores.json")
    check_same_requests(requests.ids, scores, REFERENCE)
    if not np.array_equal(scores.offset, requests.offset):
        raise InputError(
            f"{folder}: was scored on other token sequences; run the stage score_reference again"
        )
    if known["compute_dtype"] != stamp["compute_dtype"]:
        raise InputError(
            f"{folder}: was computed in {known['compute_dtype']}, this instance in {stamp['compute_dtype']}; "
            "damage needs one dtype: run the stage score_reference again"
        )
    if known["lm_head_sha256"] != stamp["lm_head_sha256"]:
        raise InputError(
            f"{stamp['name']}: its lm_head is not the reference's, so the reference's distribution cannot "
            "be redone from its hidden states; build the instance from this reference, its lm_head untouched"
        )
    with safe_open(folder / "hidden.safetensors", framework="pt") as file:
        return scores, file.get_tensor("hidden")


def _head_sha256(model: PreTrainedModel) -> str:
    head = cast(nn.Linear, model.get_output_embeddings())
    weight = head.weight.detach().contiguous().view(torch.uint8)
    return hashlib.sha256(weight.cpu().numpy().tobytes()).hexdigest()


def main(name: str = typer.Argument(help="reference, or an instance: W2, W3, ...")) -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    known = [REFERENCE, *params.quantize_instances.names]
    if name not in known:
        raise InputError(f"model '{name}' is not in the pool; one of: {', '.join(known)}")
    run(
        name,
        Path("artifacts/reference") if name == REFERENCE else Path("artifacts/instances") / name,
        Path("artifacts/requests/requests.parquet"),
        Path("artifacts/scores"),
        Path(f"metrics/scores/{name}.json"),
        params.score_requests.compute_dtype,
        params.runtime.batch_tokens,
    )


if __name__ == "__main__":
    run_step(main)
