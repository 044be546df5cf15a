"""Measure prefill and decode speed of the reference and of every instance on real prompt tokens.

In: artifacts/reference, artifacts/instances, artifacts/requests. Out: metrics/throughput.json: tokens per
second, median over repeats with the lowest and the highest. Instances run dequantized, so no width is faster
than the reference here: what is measured is the machine, and that the instances cost the same. The report
alone reads these timings.

Every repeat visits all models, in turn forwards and backwards, so that a drift of the machine hits all alike.
Cost: one warm-up and `repeats` passes of prefill_tokens + decode_tokens per model; all models stay in memory
where they fit in RESIDENT_BYTES, else each visit loads its model and warms it up again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from tasks.console import run_step, track
from tasks.contracts import GIB, InputError, write_json
from tasks.moe.checkpoint import load_model
from tasks.moe.halves import start_token
from tasks.params import MeasureThroughput, load_params

VERSION = 1
EXECUTION = "dequantized execution: no speed gain on this machine"
RESIDENT_BYTES = 3 * GIB  # of weights held at once


def run(
    folders: dict[str, Path],
    requests_file: Path,
    params: MeasureThroughput,
    dtype: torch.dtype,
    metrics_file: Path,
) -> dict[str, Any]:
    """Time every model of `folders` (name -> checkpoint, the reference first); write and return the metrics.

    Raises InputError for a missing checkpoint or requests, and for prompts too short or a context too long.
    """
    for name, folder in folders.items():
        if not folder.is_dir():
            raise InputError(f"{folder}: no checkpoint of {name} there; run the stage that makes it first")
    tokens = prompt_tokens(requests_file, params.prefill_tokens)
    bytes_each = parameter_count(folders["reference"]) * dtype.itemsize
    resident = bytes_each * len(folders) <= RESIDENT_BYTES
    loaded: dict[str, PreTrainedModel] = {}

    @contextmanager
    def visited(name: str) -> Iterator[PreTrainedModel]:
        model = loaded.get(name)
        if model is None:
            model = load_model(folders[name], dtype)
            one_pass(model, tokens, params.decode_tokens)  # warm-up
        if resident:
            loaded[name] = model
        yield model
        del model
        gc.collect()

    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in folders}
    names = list(folders)
    visits = [
        name for repeat in range(params.repeats) for name in (names if repeat % 2 == 0 else names[::-1])
    ]
    for name in track(visits, "throughput", len(visits)):
        with visited(name) as model:
            speeds[name].append(one_pass(model, tokens, params.decode_tokens))
    metrics: dict[str, Any] = {name: _spread(pairs) for name, pairs in speeds.items()}
    metrics |= {
        "execution": EXECUTION,
        "prefill_tokens": params.prefill_tokens,
        "decode_tokens": params.decode_tokens,
        "repeats": params.repeats,
        "threads": torch.get_num_threads(),
        "all_resident": resident,
        "version": VERSION,
    }
    write_json(metrics_file, metrics, digits=4)
    return metrics


def prompt_tokens(requests_file: Path, count: int) -> torch.Tensor:
    """The first `count` prompt tokens of the requests, one prompt after the other: [1, count] int64."""
    if not requests_file.exists():
        raise InputError(f"{requests_file}: no such file; run the stage prepare_requests first")
    stream = np.concatenate(
        [np.asarray(ids, dtype=np.int64) for ids in pd.read_parquet(requests_file)["prompt_ids"]]
    )
    if len(stream) < count:
        raise InputError(
            f"measure_throughput.prefill_tokens is {count}, but all prompts together have {len(stream)}"
        )
    return torch.from_numpy(stream[:count])[None]


def parameter_count(folder: Path) -> int:
    """Parameters of a checkpoint, from the headers of its safetensors files."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            total += sum(int(np.prod(file.get_slice(key).get_shape())) for key in file.keys())  # noqa: SIM118
    return total


@torch.inference_mode()
def one_pass(model: PreTrainedModel, tokens: torch.Tensor, decode_tokens: int) -> tuple[float, float]:
    """Prefill `tokens` [1, S] as one prompt, then decode greedily with the KV cache: tokens/s of both.

    An encoder-decoder's prefill is the encoder on the prompt and the decoder on its start token.
    Raises InputError if prompt and decoded tokens exceed the model's context.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    length = tokens.shape[1] + decode_tokens
    if context is not None and length > context:
        raise InputError(
            f"measure_throughput asks for {length} tokens of context (prefill_tokens + decode_tokens), "
            f"the model has {context}: lower prefill_tokens"
        )
    first, step = _in_halves(model) if model.config.is_encoder_decoder else _whole(model)
    started = time.perf_counter()
    logits = first(tokens)
    prefilled = time.perf_counter()
    for _ in range(decode_tokens):
        logits = step(logits[:, -1:].argmax(dim=-1))
    decoded = time.perf_counter()
    return tokens.shape[1] / (prefilled - started), decode_tokens / (decoded - prefilled)


Pass = Callable[[torch.Tensor], torch.Tensor]  # token ids -> logits


def _whole(model: Any) -> tuple[Pass, Pass]:
    """Prefill and step of a decoder-only model."""
    cache = DynamicCache(config=model.config)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits

    return run, run


def _in_halves(model: Any) -> tuple[Pass, Pass]:
    """Prefill and step of an encoder-decoder."""
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    encoded: list[Any] = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        return model(encoder_outputs=encoded[0], decoder_input_ids=ids, cache=cache, use_cache=True).logits

    def first(ids: torch.Tensor) -> torch.Tensor:
        encoded.append(model.get_encoder()(input_ids=ids))
        return step(torch.tensor([[start_token(model)]]))

    return first, step


def _spread(pairs: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    prefill, decode = np.array(pairs).T
    return {
        f"{part}_tokens_per_s": {"median": np.median(v), "low": v.min(), "high": v.max()}
        for part, v in (("prefill", prefill), ("decode", decode))
    }


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    folders = {"reference": Path("artifacts/reference")}
    folders |= {name: Path("artifacts/instances") / name for name in params.quantize_instances.names}
    metrics = run(
        folders,
        Path("artifacts/requests/requests.parquet"),
        params.measure_throughput,
        getattr(torch, params.score_requests.compute_dtype),
        Path("metrics/throughput.json"),
    )
    for name in folders:
        prefill, decode = metrics[name]["prefill_tokens_per_s"], metrics[name]["decode_tokens_per_s"]
        print(
            f"{name}: prefill {prefill['median']:.0f} ({prefill['low']:.0f} to {prefill['high']:.0f}) tok/s, "
            f"decode {decode['median']:.1f} ({decode['low']:.1f} to {decode['high']:.1f}) tok/s"
        )
    print(EXECUTION)


if __name__ == "__main__":
    run_step(main)
