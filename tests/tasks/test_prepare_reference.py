from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.params import LocalModel, PrepareReference, load_params
from tasks.prepare_reference import VERSION, describe, run
from tests.seeded_models import seeded_checkpoint, seeded_tokenizer

ROOT = Path(__file__).parents[2]


def path_params(source: Path) -> PrepareReference:
    section = load_params(ROOT / "params.yaml").prepare_reference
    local = LocalModel(folder=str(source), trust_remote_code=False)
    return section.model_copy(update={"source": "path", "path": local})


def test_a_local_checkpoint_becomes_the_reference(tmp_path: Path) -> None:
    source = seeded_checkpoint(tmp_path / "source", "qwen2_moe")
    summary = run(path_params(source), tmp_path / "reference", tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text()) == json.loads(
        (tmp_path / "reference" / "reference.json").read_text()
    )
    # layers 1 and 2 of 3: 2 x 8 experts x 3 matrices x 64 x 32, float32
    assert summary["expert_parameters"] == 2 * 8 * 3 * 64 * 32
    assert (summary["moe_layers"], summary["experts"], summary["top_k"]) == (2, 8, 2)
    assert (summary["name"], summary["source"], summary["version"]) == ("reference", "path", VERSION)
    model = load_model(tmp_path / "reference")
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["size_bytes"] == 4 * summary["parameters"]
    assert summary["stored_bits"] == 32


def test_stored_bits_follow_the_stored_type(tmp_path: Path) -> None:
    source = seeded_checkpoint(tmp_path / "source")
    load_model(source).bfloat16().save_pretrained(source)
    assert describe(source)["stored_bits"] == 16


def test_a_dense_model_is_refused_and_what_was_there_stays(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=352, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    seeded_tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "kept").write_text("before")
    with pytest.raises(InputError, match=r"llama.*MoE"):
        run(path_params(tmp_path / "dense"), tmp_path / "reference", tmp_path / "metrics.json")
    assert (tmp_path / "reference" / "kept").read_text() == "before"
    assert not (tmp_path / "metrics.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "reference"]  # no half-made folder


def test_experts_that_the_configuration_promises_but_the_weights_lack_are_missed(tmp_path: Path) -> None:
    source = seeded_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_local_experts": 9}))
    # 3 layers x 3 matrices x 64 x 32 x (8 held, 9 promised)
    with pytest.raises(InputError, match=f"holds {18432 * 8} .*promises {18432 * 9}"):
        describe(source)


def test_an_empty_path_is_refused_by_the_parameters() -> None:
    section = load_params(ROOT / "params.yaml").prepare_reference.model_dump()
    section |= {"source": "path"}
    with pytest.raises(ValueError, match=r"path\.folder is empty"):
        PrepareReference.model_validate(section)


def test_no_tensor_is_loaded_for_the_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = seeded_checkpoint(tmp_path / "source")

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a tensor was loaded")

    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert describe(source)["moe_layers"] == 3
