import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model, load_tokenizer, skeleton
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.tensors import CheckpointTensors
from tests.seeded_models import seeded_checkpoint


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_reference_loads_for_inference(tmp_path: Path) -> None:
    folder = seeded_checkpoint(tmp_path / "model")
    model = load_model(folder)
    assert not model.training
    assert model.config._experts_implementation == EXPERTS_IMPLEMENTATION
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    half = load_model(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert load_tokenizer(folder)("one two").input_ids


def test_missing_and_unexpected_keys(tmp_path: Path) -> None:
    folder = seeded_checkpoint(tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.extra.weight"] = torch.zeros(1)

    edit(folder, change)
    with pytest.raises(InputError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "1 missing (model.norm.weight)" in message
    assert "1 unexpected (model.layers.0.extra.weight)" in message


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    folder = seeded_checkpoint(tmp_path / "model")
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(InputError, match="1 of another shape"):
        load_model(folder)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(tmp_path)
    folder = seeded_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickle files \(pytorch_model\.bin\).*save_pretrained"):
        load_model(folder)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    whole = seeded_checkpoint(tmp_path / "whole")
    model = load_model(whole)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = CheckpointTensors(whole), CheckpointTensors(sharded)
    assert one.files.keys() == many.files.keys()
    assert all(torch.equal(one.get(name), many.get(name)) for name in one.files)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(load_model(sharded)(ids).logits, model(ids).logits)
    shard = sorted(set(many.files.values()))[0]
    (sharded / shard).unlink()
    with pytest.raises(InputError, match=f"that model.safetensors.index.json names are missing: {shard}"):
        load_model(sharded)


def test_remote_code_only_when_asked(tmp_path: Path) -> None:
    folder = seeded_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "made_up_moe"
    config["auto_map"] = {"AutoConfig": "configuration.Made", "AutoModelForCausalLM": "modeling.Made"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="trust_remote_code"):
        load_model(folder)


def test_a_skeleton_has_no_memory(tmp_path: Path) -> None:
    model = skeleton(seeded_checkpoint(tmp_path / "model"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_variant_needs_its_reference(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="is a variant: give the reference folder"):
        load_model(tmp_path)
