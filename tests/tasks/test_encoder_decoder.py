"""Throughput and benchmarks of an encoder-decoder; the other stages are in test_families.py."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tasks import evaluate_benchmarks
from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.evaluation.harness import MoELanguageModel
from tasks.measure_throughput import _in_halves, one_pass
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.moe.record import record_routing
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import install_physical_experts, model_hash, physical_load
from tasks.params import load_params
from tests.seeded_models import VOCABULARY, seeded_checkpoint

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")
PAIRS = [
    ("Anna has 12 apples.\nAnswer:", " A"),
    ("Anna has 12 apples.\nAnswer:", " B"),
    ("One fox", " who lived near the river and far from the sea, and had 12 apples"),
    ("Once upon a time there was a small fox who lived", " near"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeded_checkpoint(tmp_path_factory.mktemp("switch") / "reference", "switch_transformers")


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder), load_tokenizer(folder)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, item, number) for number, item in enumerate(arguments)]


def test_log_likelihoods_are_those_of_lm_eval(loaded):
    """The encoder reads the context, the decoder the continuation; of a whole text the decoder reads all."""
    model, tokenizer = loaded
    plain = HFLM(pretrained=model, tokenizer=tokenizer, backend="seq2seq", batch_size=1)
    ours = MoELanguageModel(model, tokenizer, batch_size=3)
    expected = plain.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", PAIRS))
    assert [pair[0] for pair in found] == pytest.approx([pair[0] for pair in expected], abs=1e-4)
    assert [pair[1] for pair in found] == [pair[1] for pair in expected]
    texts = [("Once upon a time there was a small fox.\n" * 2,), ("def area(width):",)]
    rolled = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert rolled == pytest.approx(
        plain.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True), abs=1e-3
    )
    ours.check_load()


def test_load_is_what_the_experts_computed(loaded):
    """Against one unpadded pass of each pair, recorded where the experts are entered; some tokens are dropped."""
    model, tokenizer = loaded
    ours = MoELanguageModel(model, tokenizer, batch_size=8)
    ours.loglikelihood(instances("loglikelihood", PAIRS))
    load, picks = np.zeros_like(ours.load), 0
    with record_routing(model) as recorder, torch.inference_mode():
        for context, continuation in PAIRS:
            ids, target = (tokenizer(text, return_tensors="pt").input_ids for text in (context, continuation))
            start = torch.full((1, 1), model.config.decoder_start_token_id)
            model(input_ids=ids, decoder_input_ids=torch.cat([start, target[:, :-1]], dim=1))
            for layer, routing in enumerate(recorder.pop()):
                load[layer] += np.bincount(routing.index[routing.routed].numpy(), minlength=8)
                picks += routing.index.numel()
    assert (ours.load == load).all()
    assert load.sum() < picks
    ours.check_load()


def benchmark_rows(folder: Path) -> Path:
    questions = [
        {"id": f"q{n}", "subject": "x", "question": f"What is {n}?", "choices": list("wxyz"), "answer": n % 4}
        for n in range(6)
    ]
    folder.mkdir()
    pd.DataFrame(questions).to_json(folder / "questions.jsonl", orient="records", lines=True)
    text = pd.DataFrame([{"id": "t", "text": "Once upon a time there was a small fox."}])
    text.to_json(folder / "perplexity.jsonl", orient="records", lines=True)
    return folder


def test_benchmarks_of_the_reference_and_of_a_variant(folder, loaded, tmp_path):
    requests = benchmark_rows(tmp_path / "requests")
    params = PARAMS.evaluate_benchmarks.model_copy(update={"limit": {}})
    found = evaluate_benchmarks.run("reference", folder, folder, requests, tmp_path / "results", params)
    assert found["tasks"]["mmlu_packaged"]["n"] == 6
    assert np.isfinite(found["tasks"]["heldout_perplexity"]["nll"])
    assert min(found["lis"]) >= 1
    # A variant whose replicas are copies answers alike, and its copies computed what the routers sent.
    model, tokenizer = load_model(folder), loaded[1]
    physical = [*range(8), 0, 1]
    layers = [LayerPlan(layer.layer, physical, [0] * 10) for layer in moe_layers(model)]
    install_physical_experts(model, ReplicationPlan(model_hash(model), 32, "round_robin", 0, layers), {})
    plain, replicated = (MoELanguageModel(own, tokenizer, batch_size=4) for own in (loaded[0], model))
    answers = [own.loglikelihood(instances("loglikelihood", PAIRS)) for own in (plain, replicated)]
    assert [pair[0] for pair in answers[0]] == pytest.approx([pair[0] for pair in answers[1]], abs=1e-4)
    for own, load in zip(replicated.load, physical_load(model), strict=True):
        assert np.bincount(physical, weights=load).tolist() == own.tolist()


def test_a_generating_benchmark_is_an_error_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_benchmarks, "load_model", None)
    monkeypatch.setattr(evaluate_benchmarks, "read_benchmarks", lambda *_: [Generating()])
    params = PARAMS.evaluate_benchmarks.model_copy(update={"tasks": ["gsm8k"], "limit": {}})
    with pytest.raises(InputError, match=r"benchmark 'gsm8k' generates text.*leave it out"):
        evaluate_benchmarks.run("reference", folder, folder, tmp_path, tmp_path / "results", params)


class Generating:
    name, kind = "gsm8k", "generate_until"


def test_throughput_decodes_what_generate_decodes(loaded):
    model, _ = loaded
    ids = torch.randint(2, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))
    prefill_speed, decode_speed = one_pass(model, ids, 3)
    assert prefill_speed > 0 and decode_speed > 0
    first, step = _in_halves(model)
    tokens = []
    with torch.inference_mode():
        logits = first(ids)
        for _ in range(5):
            tokens.append(int(logits[0, -1].argmax()))
            logits = step(torch.tensor([tokens[-1:]]))
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
    )
    assert expected[0, 1:].tolist() == tokens
