from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.params import Tiny
from tasks.sources import tiny
from tasks.sources.synthetic import DOMAINS, documents
from tasks.sources.upcycled_smollm2 import mean_nll


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, seed in (("first", 0), ("again", 0), ("other", 1)):
            torch.rand(3)  # the surrounding random state must not matter
            tiny.build(tmp_path / name, Tiny(steps=2, seed=seed))
    finally:
        torch.set_num_threads(threads)
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    }
    assert weights["first"] == weights["again"] != weights["other"]


def test_training_rows_are_no_request_rows() -> None:
    for domain in DOMAINS:
        training = set(documents(domain, tiny.DOCUMENTS, tiny.TRAINING_SEED))
        assert not training & set(documents(domain, 500, seed=0))


def test_it_has_learnt_the_domains(tiny_reference: Path) -> None:
    model, tokenizer = load_model(tiny_reference), load_tokenizer(tiny_reference)
    uniform = math.log(tiny.VOCABULARY)
    for domain in DOMAINS:
        unseen = [
            [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]][:200]
            for text in documents(domain, 8, seed=0)
        ]
        assert mean_nll(model, unseen) < uniform / 3  # names, numbers and things stay unpredictable


def test_the_tokenizer_reads_anything(tiny_reference: Path) -> None:
    tokenizer = load_tokenizer(tiny_reference)
    text = "def f(x):\n\treturn 'Grüße, 世界'  # 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (tiny.BOS, tiny.EOS)
    assert tiny.BOS not in tokenizer(text)["input_ids"]  # no special token by itself


def test_its_description(tiny_reference: Path) -> None:
    values = json.loads((tiny_reference / "reference.json").read_text())
    # 2 layers x 8 experts x 3 matrices x 64 x 32
    assert values["expert_parameters"] == 2 * 8 * 3 * 64 * 32 == 98304
    # embeddings 1024 x 64 (tied); a layer: q, o 64 x 64, k, v 32 x 64, norms 2 x 64 + 2 x 32, router 8 x 64;
    # the last norm 64
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 2 * 64 + 2 * 32 + 8 * 64
    assert values["parameters"] == 1024 * 64 + 2 * layer + 64 + 98304
    assert (values["moe_layers"], values["experts"], values["top_k"]) == (2, 8, 2)
    assert values["stored_bits"] == pytest.approx(32)
    assert values["size_bytes"] == 4 * values["parameters"]
