"""Step: a source -> the reference checkpoint.

In: the parameters of one source (`smollm2-moe`, `tiny`, `hub`, `path`).
Out: artifacts/reference, an ordinary transformers Mixture-of-Experts checkpoint (safetensors, one or several
shards) with its tokenizer and reference.json; metrics/reference.json with the same values. Cost:
`smollm2-moe` two minutes on two cores, 3 GiB of memory and a download of 93 MB; `tiny` half a minute; `hub`
and `path` what it takes to bring the files: no tensor is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from tasks.console import run_step
from tasks.contracts import GIB, InputError, replacing_folder, write_json
from tasks.moe.checkpoint import skeleton
from tasks.moe.family import check_stored
from tasks.moe.headers import read_headers
from tasks.moe.registry import moe_layers
from tasks.params import PrepareReference, load_params

VERSION = 1


def run(
    params: PrepareReference, folder: Path, metrics: Path, downloads: Path | None = None
) -> dict[str, Any]:
    """Build the reference of `params.source` in `folder` and describe it in `metrics`.

    downloads: where fetched packages are kept, else as `smollm2.downloads_folder`.
    Raises InputError, with `folder` as it was before, when the source cannot be used.
    """
    transformers_logging.disable_progress_bar()
    with replacing_folder(folder) as temporary:
        facts = _build(temporary, params, downloads)
        summary = {
            "name": "reference",
            "source": params.source,
            "version": VERSION,
            **describe(temporary, _trust_remote_code(params)),
            **facts,
        }
        write_json(temporary / "reference.json", summary)
    write_json(metrics, summary)
    return summary


def _build(folder: Path, params: PrepareReference, downloads: Path | None) -> dict[str, Any]:
    # Each source is imported where it is used: `tiny` needs no hub client, `path` no training.
    if params.source == "smollm2-moe":
        from tasks.sources import smollm2, upcycled_smollm2

        return upcycled_smollm2.build(folder, params.smollm2_moe, downloads or smollm2.downloads_folder())
    if params.source == "tiny":
        from tasks.sources import tiny

        return tiny.build(folder, params.tiny)
    if params.source == "hub":
        from tasks.sources import hub_model

        return hub_model.build(folder, params.hub)
    from tasks.sources import local_model

    return local_model.build(folder, params.path)


def _trust_remote_code(params: PrepareReference) -> bool:
    allowed = {"hub": params.hub.trust_remote_code, "path": params.path.trust_remote_code}
    return allowed.get(params.source, False)


def describe(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Shape and size of the checkpoint in `folder`, from its configuration and the headers of its weights.

    Raises InputError when the model has no MoE layers, when weights of its routed experts are missing, and when
    they are quantized already.
    """
    model = skeleton(folder, trust_remote_code)
    layers = moe_layers(model)
    tensors = read_headers(folder)
    expert_parameters = sum(matrix.numel() for layer in layers for matrix in layer.matrices().values())
    check_stored(tensors, folder.name)
    names = {name for layer in layers for matrix in layer.matrices() for name in layer.tensors(matrix)}
    stored = [tensor for name, tensor in tensors.items() if name in names]
    elements = sum(tensor.elements for tensor in stored)
    if elements != expert_parameters:
        raise InputError(
            f"{folder.name}: the checkpoint holds {elements} weights of routed experts, its config.json "
            f"promises {expert_parameters} in {len(layers)} layers: get the complete checkpoint"
        )
    size_bytes = sum(tensor.size_bytes for tensor in tensors.values())
    return {
        "model_type": model.config.model_type,
        "moe_layers": len(layers),
        "experts": layers[0].num_experts,
        "top_k": layers[0].top_k,
        "parameters": sum(tensor.elements for tensor in tensors.values()),
        "expert_parameters": expert_parameters,
        "size_bytes": size_bytes,
        "size_gib": size_bytes / GIB,
        "stored_bits": 8 * sum(tensor.size_bytes for tensor in stored) / expert_parameters,
    }


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    run(params.prepare_reference, Path("artifacts/reference"), Path("metrics/reference.json"))


if __name__ == "__main__":
    run_step(main)
