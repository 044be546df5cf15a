"""Throughput: every model visited in every repeat, real prompt tokens, decode with the cache, clear
errors.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from tasks import measure_throughput
from tasks.contracts import InputError, read_json
from tasks.measure_throughput import one_pass, parameter_count, prompt_tokens, run
from tasks.moe.checkpoint import load_model
from tasks.params import MeasureThroughput
from tests.seeded_models import seeded_checkpoint

PARAMS = MeasureThroughput(prefill_tokens=24, decode_tokens=3, repeats=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("throughput")
    seeded_checkpoint(folder / "reference")
    shutil.copytree(folder / "reference", folder / "W4")
    return {"reference": folder / "reference", "W4": folder / "W4"}


@pytest.fixture
def requests_file(tmp_path) -> Path:
    path = tmp_path / "requests.parquet"
    pd.DataFrame({"id": ["a", "b"], "prompt_ids": [list(range(1, 21)), list(range(30, 50))]}).to_parquet(path)
    return path


@pytest.mark.parametrize("limit", [None, 0])
def test_every_repeat_visits_every_model(models, requests_file, tmp_path, monkeypatch, limit):
    """Whether the models stay loaded or not; visits go forwards and backwards in turn, after one warm-up a
    load.
    """
    if limit is not None:
        monkeypatch.setattr(measure_throughput, "RESIDENT_BYTES", limit)
    seen, loads = [], []

    def loading(folder, dtype):
        loads.append(folder.name)
        model = load_model(folder, dtype)
        model.name_of_test = folder.name
        return model

    def passing(model, tokens, decode_tokens):
        seen.append(model.name_of_test)
        return one_pass(model, tokens, decode_tokens)

    monkeypatch.setattr(measure_throughput, "load_model", loading)
    monkeypatch.setattr(measure_throughput, "one_pass", passing)
    metrics = run(models, requests_file, PARAMS, torch.float32, tmp_path / "throughput.json")
    order = ["reference", "W4", "W4", "reference", "reference", "W4"]
    if limit is None:  # a warm-up at the first visit
        assert loads == ["reference", "W4"]
        assert seen == ["reference", "reference", "W4", "W4", *order[2:]]
    else:  # a load and a warm-up at each
        assert loads == order
        assert seen == [name for name in order for _ in range(2)]
    assert metrics["all_resident"] == (limit is None)
    assert (
        read_json(tmp_path / "throughput.json")["execution"]
        == "dequantized execution: no speed gain on this machine"
    )
    for name in models:
        for part in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            spread = metrics[name][part]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]


def test_tokens_and_seconds_are_those_of_the_pass(models, monkeypatch):
    """A clock that gains 2 s at the prefill and 6 s at three decoded tokens: 24 / 2 = 12 tok/s and 3 / 6 =
    0.5 tok/s. The decode steps see one token and the cache of all before it."""
    clock = iter([0.0, 2.0, 8.0])
    monkeypatch.setattr(measure_throughput.time, "perf_counter", lambda: next(clock))
    model = load_model(models["reference"])
    shapes = []

    def spy(module, args, options, output):
        shapes.append(
            (options["input_ids"].shape[1], options["cache"].get_seq_length(), output.logits.shape[1])
        )

    model.register_forward_hook(spy, with_kwargs=True)
    tokens = torch.arange(24)[None]
    assert one_pass(model, tokens, 3) == (12.0, 0.5)
    assert shapes == [(24, 24, 1), (1, 25, 1), (1, 26, 1), (1, 27, 1)]


def test_prompt_tokens_are_real_ones_in_order(requests_file):
    assert prompt_tokens(requests_file, 22).tolist() == [[*range(1, 21), 30, 31]]
    with pytest.raises(InputError, match=r"prefill_tokens is 41, but all prompts together have 40"):
        prompt_tokens(requests_file, 41)
    with pytest.raises(InputError, match="run the stage prepare_requests first"):
        prompt_tokens(requests_file.with_name("none.parquet"), 1)


def test_parameters_are_counted_without_loading(models):
    model = load_model(models["reference"])
    assert parameter_count(models["reference"]) == sum(p.numel() for p in model.parameters())


def test_missing_checkpoint_and_short_context_are_refused(models, requests_file, tmp_path):
    with pytest.raises(InputError, match="no checkpoint of W3"):
        run({**models, "W3": tmp_path / "W3"}, requests_file, PARAMS, torch.float32, tmp_path / "t.json")
    model = load_model(models["reference"])
    model.config.max_position_embeddings = 20
    with pytest.raises(InputError, match=r"asks for 27 tokens of context.*has 20"):
        one_pass(model, torch.arange(24)[None], 3)
