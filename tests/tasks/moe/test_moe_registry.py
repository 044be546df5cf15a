import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.registry import FAMILIES, moe_layers
from tasks.moe.tensors import CheckpointTensors
from tests.seeded_models import seeded_checkpoint


@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", [0, 1, 2]), ("qwen2_moe", [1, 2])])
def test_layers_in_depth_order(tmp_path: Path, family: str, layers: list[int]) -> None:
    model = load_model(seeded_checkpoint(tmp_path / family, family))
    found = moe_layers(model)
    assert [layer.layer for layer in found] == layers
    for layer in found:
        assert (layer.num_experts, layer.top_k, layer.router_temperature) == (8, 2, 1.0)
        assert model.get_submodule(layer.name).experts is layer.experts.module
        assert {name: tuple(view.shape) for name, view in layer.matrices().items()} == {
            "gate_proj": (8, 32, 64),
            "up_proj": (8, 32, 64),
            "down_proj": (8, 64, 32),
        }
        assert layer.router_rows().shape == (8, 64)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_matrices_are_the_checkpoints_and_write_through(tmp_path: Path, family: str) -> None:
    folder = seeded_checkpoint(tmp_path / family, family)
    model, source = load_model(folder), CheckpointTensors(folder)
    for layer in moe_layers(model):
        for matrix, view in layer.matrices().items():
            keys = layer.keys(matrix)
            assert all(re.fullmatch(FAMILIES[family].pattern(), key) for key in keys)
            assert torch.equal(view, source.stacked([f"{key}.weight" for key in keys]))
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        before = model(ids).logits
        moe_layers(model)[-1].matrices()["down_proj"].zero_()
        assert not torch.equal(model(ids).logits, before)


def test_the_pattern_leaves_out_what_is_not_routed() -> None:
    pattern = FAMILIES["qwen2_moe"].pattern()
    assert re.match(pattern, "model.layers.11.mlp.experts.127.down_proj")
    for other in ("model.layers.1.mlp.shared_expert.down_proj", "model.layers.1.mlp.gate", "lm_head"):
        assert not re.match(pattern, other)


def test_router_temperature_comes_from_the_configuration(tmp_path: Path) -> None:
    model = load_model(seeded_checkpoint(tmp_path / "model", router_temperature=0.01))
    assert {layer.router_temperature for layer in moe_layers(model)} == {0.01}


def test_a_model_without_moe_layers(tmp_path: Path) -> None:
    dense = load_model(seeded_checkpoint(tmp_path / "model", "qwen2_moe", mlp_only_layers=[0, 1, 2]))
    with pytest.raises(InputError, match=r"qwen2_moe, 3 layers.*no MoE layers"):
        moe_layers(dense)


def test_a_family_that_is_not_known() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(InputError, match=r"'llama' is not a known MoE family: expected one of .*'qwen2_moe'"):
        moe_layers(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("flag", "value"), [("has_bias", True), ("has_post_expert_norm", True), ("is_concatenated", None)]
)
def test_a_layout_that_is_not_understood(tmp_path: Path, flag: str, value: Any) -> None:
    model = load_model(seeded_checkpoint(tmp_path / "model"))
    experts = moe_layers(model)[1].experts.module
    setattr(experts, flag, value)
    with pytest.raises(InputError) as caught:
        moe_layers(model)
    assert f"model.layers.1.mlp.experts (Qwen3MoeExperts): layout flag '{flag}'" in str(caught.value)
