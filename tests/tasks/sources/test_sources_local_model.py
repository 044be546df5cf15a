from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.params import LocalModel
from tasks.prepare_reference import describe
from tasks.sources.local_model import build
from tests.seeded_models import seeded_checkpoint


def bring(source: Path, folder: Path, trust_remote_code: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    build(folder, LocalModel(folder=str(source), trust_remote_code=trust_remote_code))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return seeded_checkpoint(tmp_path / "source", num_hidden_layers=2)


@pytest.fixture
def sharded(source: Path) -> Path:
    model = load_model(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="150KB")
    return source


def test_shards_stay_shards_and_nothing_else_comes_along(sharded: Path, tmp_path: Path) -> None:
    (sharded / "optimizer.pt").write_bytes(b"x")
    (sharded / "modeling_own.py").write_text("raise SystemExit\n")
    (sharded / "consolidated.safetensors").write_bytes(b"x")  # a second form of the weights, not in the index
    (sharded / "LICENSE").write_text("terms\n")
    bring(sharded, tmp_path / "reference")
    names = {path.name for path in (tmp_path / "reference").iterdir()}
    assert names == {path.name for path in sharded.iterdir()} - {
        "optimizer.pt",
        "modeling_own.py",
        "consolidated.safetensors",
    }
    assert sum(name.endswith(".safetensors") for name in names) > 1 and "LICENSE" in names
    assert describe(tmp_path / "reference")["expert_parameters"] == 2 * 8 * 3 * 64 * 32


def test_replacing_the_artifact_leaves_the_source_alone(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "reference")
    before = (source / "model.safetensors").read_bytes()
    for path in (tmp_path / "reference").iterdir():
        path.unlink()
    assert (source / "model.safetensors").read_bytes() == before


def test_a_shard_that_the_index_names_is_missed_by_name(sharded: Path, tmp_path: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(InputError, match=gone.name):
        bring(sharded, tmp_path / "reference")


@pytest.mark.parametrize("keep", [0.9, 0.001, 0.0])
def test_a_truncated_shard_is_found(sharded: Path, tmp_path: Path, keep: float) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(InputError, match=rf"{shard.name}.*get it again"):
        bring(sharded, tmp_path / "reference")


def test_a_tensor_that_is_not_in_its_shard_is_found(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.layers.9.extra"] = first
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.layers\.9\.extra"):
        bring(sharded, tmp_path / "reference")


def test_pickles_are_refused_with_the_way_out(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*save_pretrained"):
        bring(source, tmp_path / "reference")


def change_config(source: Path, **changes: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_own_code_and_unknown_types_are_refused(source: Path, tmp_path: Path) -> None:
    change_config(source, model_type="own_moe")
    with pytest.raises(InputError, match=r"own_moe.*unknown"):
        bring(source, tmp_path / "reference")
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_own.OwnMoe"})
    with pytest.raises(InputError, match=r"own_moe.*trust_remote_code"):
        bring(source, tmp_path / "reference")


def test_a_native_class_is_used_before_a_checkpoints_own_code(source: Path, tmp_path: Path) -> None:
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_own.OwnMoe"})
    (source / "modeling_own.py").write_text("raise SystemExit('this must not run')\n")
    bring(source, tmp_path / "reference")
    assert describe(tmp_path / "reference")["model_type"] == "qwen3_moe"


def test_a_quantized_checkpoint_is_no_reference(source: Path, tmp_path: Path) -> None:
    change_config(source, quantization_config={"quant_method": "gptq"})
    with pytest.raises(InputError, match="gptq"):
        bring(source, tmp_path / "reference")


def test_what_is_no_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        bring(tmp_path / "nowhere", tmp_path / "reference")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        bring(tmp_path / "empty", tmp_path / "reference")
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        bring(source, tmp_path / "reference")
    (source / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        bring(source, tmp_path / "reference")
