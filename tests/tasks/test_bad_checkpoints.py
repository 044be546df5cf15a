"""Checkpoints that cannot be used, and odd ones that can: a clear error before any work, or the right result."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tasks import quantize_instances
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.headers import INDEX
from tasks.moe.registry import moe_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.params import ParamsError, load_params
from tasks.quant.formats import REST_FILE, expert_files
from tests.seeded_models import seeded_checkpoint
from tests.stored_checkpoints import change, half, instance

ROOT = Path(__file__).parents[2]
IDS = torch.randint(2, 350, (2, 12), generator=torch.Generator().manual_seed(0))
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def quantize(reference: Path, out: Path, bits: int = 4, **changes: Any) -> dict[str, Any]:
    section = load_params(ROOT / "params.yaml").quantize_instances
    values = {"method": "rtn", "group_size": 32, "symmetric": False, **changes}
    return quantize_instances.run(reference, out, bits, section.model_copy(update=values))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return half(tmp_path_factory.mktemp("bad") / "whole")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A sound checkpoint in one file, to be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def sharded(whole: Path, tmp_path: Path) -> Path:
    """The same in several shards."""
    out = tmp_path / "model"
    load_model(whole, torch.bfloat16).save_pretrained(out, max_shard_size="150KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    return out


@pytest.fixture
def before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come before expensive work: with this, quantizing a single matrix fails the test."""

    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done before the error")

    monkeypatch.setattr("tasks.quant.rtn.quantize_groups", worked)


def refused(folder: Path, tmp_path: Path, message: str, load: bool = True, **changes: Any) -> None:
    """Both quantizing and loading end with `message`, and nothing is left behind."""
    with pytest.raises(InputError) as caught:
        quantize(folder, tmp_path / "out", **changes)
    assert re.search(message, str(caught.value)), caught.value
    assert not (tmp_path / "out").exists()
    if load:
        with pytest.raises(InputError) as caught:
            load_model(folder)
        assert re.search(message, str(caught.value)), caught.value


# --- sizes that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("before_work")
def test_a_group_size_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    message = r"group_size 48 does not divide the input width 64 of model\.layers\.0\..*use one of 8, 16, 32, 64, or 0"
    refused(folder, tmp_path, message, load=False, group_size=48)


@pytest.mark.usefixtures("before_work")
def test_a_group_size_that_fits_some_matrices_only(folder: Path, tmp_path: Path) -> None:
    """64 divides the inputs of gate and up, 64, but not those of down, 32."""
    message = r"width 32 of model\.layers\.0\.mlp\.experts\.0\.down_proj: use one of 8, 16, 32"
    refused(folder, tmp_path, message, load=False, group_size=64)


@pytest.mark.parametrize("bits", ["[5]", "[0]", "[16]", "[3.5]", "['4']", "[]", "[4, 4]"])
def test_bits_that_do_not_fit(tmp_path: Path, bits: str) -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    changed = re.sub(r"(?m)^  bits: \[.*\]", f"  bits: {bits}", text)
    assert changed != text
    (tmp_path / "params.yaml").write_text(changed, encoding="utf-8")
    with pytest.raises(ParamsError, match=r"quantize_instances.*(bits|width)"):
        load_params(tmp_path / "params.yaml")


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("before_work")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_a_pickle(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / name)
    refused(folder, tmp_path, rf"pickle files \({re.escape(name)}\).*convert them: .*save_pretrained")


def test_the_advice_for_a_pickle_works(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "converted")
    assert torch.equal(logits(load_model(tmp_path / "converted")), logits(model.float()))


@pytest.mark.usefixtures("before_work")
@pytest.mark.parametrize("cut", [1, 4000])
def test_a_truncated_shard(sharded: Path, tmp_path: Path, cut: int) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]  # the last one read
    shard.write_bytes(shard.read_bytes()[:-cut])
    refused(sharded, tmp_path, rf"{shard.name}: .*truncated; get it again")


@pytest.mark.usefixtures("before_work")
def test_an_index_that_names_a_missing_file(sharded: Path, tmp_path: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, tmp_path, rf"1 of \d+ shards that {INDEX} names are missing: {shard.name}")


@pytest.mark.usefixtures("before_work")
def test_an_index_that_names_a_tensor_which_its_shard_lacks(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = sharded / index["weight_map"][EXPERT]
    tensors = load_file(shard)
    del tensors[EXPERT]
    save_file(tensors, shard, metadata={"format": "pt"})
    refused(sharded, tmp_path, rf"{shard.name}: 1 tensors that .* missing there, first '{re.escape(EXPERT)}'")


@pytest.mark.usefixtures("before_work")
def test_a_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    own = json.loads((sharded / INDEX).read_text())["weight_map"][EXPERT]
    other = next(path for path in sorted(sharded.glob("*.safetensors")) if path.name != own)
    save_file(load_file(other) | {EXPERT: torch.zeros(32, 64)}, other, metadata={"format": "pt"})
    refused(sharded, tmp_path, rf"'{re.escape(EXPERT)}' is in .* and in .*which one counts is not said")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": 3}', "{}"])
def test_a_configuration_that_is_none(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, tmp_path, r"config\.json")


def test_a_truncated_instance_and_one_that_lost_a_shard(whole: Path, tmp_path: Path) -> None:
    folder = instance(whole, tmp_path / "W4")
    shard = expert_files(folder)[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(InputError, match=rf"{shard.name}: .*truncated"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        load_model(folder)
    shard.write_bytes(content)
    rest = folder / REST_FILE
    rest.write_bytes(rest.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"{REST_FILE}: .*truncated"):
        load_model(folder)


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("before_work")
@pytest.mark.parametrize("lost", ["up_proj", "down_proj", "gate_proj|up_proj", "gate_proj|up_proj|down_proj"])
def test_experts_that_are_not_there(folder: Path, tmp_path: Path, lost: str) -> None:
    """transformers would stack the seven that are left; a loaded model must not be one expert short."""

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for matrix in lost.split("|"):
            del tensors[f"model.layers.1.mlp.experts.3.{matrix}.weight"]

    change(folder, lose)
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.experts\.3\."):
        quantize(folder, tmp_path / "out")
    with pytest.raises(InputError, match=r"\d (missing|of another shape) \(.*model\.layers\.1\.mlp\.experts"):
        load_model(folder)


@pytest.mark.usefixtures("before_work")
@pytest.mark.parametrize("shape", [(0,), (0, 64), (32, 0)])
def test_tensors_without_values(folder: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    """What a model saved from the meta device, or an optimiser that had not gathered its parts, leaves."""
    change(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(shape)}))
    refused(folder, tmp_path, rf"'{re.escape(EXPERT)}' holds no values \(1 such tensors\): .*meta device")


@pytest.mark.usefixtures("before_work")
def test_an_expert_of_another_shape(folder: Path, tmp_path: Path) -> None:
    change(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(16, 64, dtype=torch.bfloat16)}))
    with pytest.raises(InputError, match=r"\[16, 64\]"):
        quantize(folder, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [EXPERT, "model.layers.2.mlp.gate.weight", "model.norm.weight"])
def test_weights_that_are_not_finite(folder: Path, tmp_path: Path, name: str, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[5] = value

    change(folder, spoil)
    with pytest.raises(InputError, match="holds NaN or infinity"):
        load_model(folder)
    if name == EXPERT:
        with pytest.raises(InputError, match=rf"'?{re.escape(EXPERT[:-7])}.*holds NaN or infinit"):
            quantize(folder, tmp_path / "out")


def test_large_weights_are_finite(folder: Path) -> None:
    """A sum that overflows is no NaN."""
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    load_model(folder)


@pytest.mark.usefixtures("before_work")
def test_a_quantized_checkpoint_is_no_reference(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop(EXPERT)
    tensors[EXPERT + "_packed"] = torch.zeros(32, 8, dtype=torch.int32)
    tensors[EXPERT + "_scale"] = weight[:, :2].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="quantized already"):
        quantize(folder, tmp_path / "out")


# --- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("before_work")
def test_a_configuration_without_experts(tmp_path: Path) -> None:
    dense = seeded_checkpoint(tmp_path / "dense", "qwen2_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(InputError, match=r"qwen2_moe, 3 layers.*no MoE layers"):
        quantize(dense, tmp_path / "out")


@pytest.mark.usefixtures("before_work")
def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=352, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(
        InputError, match=r"model type 'llama' is not a known MoE family: expected one of \['deepseek'"
    ):
        quantize(tmp_path / "llama", tmp_path / "out")


@pytest.mark.parametrize(
    ("flag", "value"), [("has_post_expert_norm", True), ("is_concatenated", None), ("has_gate", 2)]
)
def test_a_layout_that_is_not_understood(folder: Path, flag: str, value: Any) -> None:
    model = load_model(folder)
    setattr(model.model.layers[1].mlp.experts, flag, value)
    with pytest.raises(InputError, match=rf"model\.layers\.1\.mlp\.experts \(Qwen3MoeExperts\): .*'{flag}'"):
        moe_layers(model)


# --- odd but right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored_twice", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_tied_embeddings(tmp_path: Path, symmetric: bool, stored_twice: bool) -> None:
    reference = half(tmp_path / "reference", tie_word_embeddings=True)
    if stored_twice:  # some tools write lm_head too
        change(
            reference, lambda own: own.update({"lm_head.weight": own["model.embed_tokens.weight"].clone()})
        )
    quantize(reference, tmp_path / "W8", 8, symmetric=symmetric)
    model, original = load_model(tmp_path / "W8"), load_model(reference)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    drift = (torch.log_softmax(logits(model), -1) - torch.log_softmax(logits(original), -1)).abs()
    assert 0 < float(drift.mean()) < 0.05  # 8 bits lose next to nothing


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen2_moe"])
def test_a_dense_first_layer_of_any_width(tmp_path: Path, family: str) -> None:
    """108 is no multiple of 32; only routed experts are quantized, so it need not be."""
    reference = half(tmp_path / "reference", family, intermediate_size=108)
    name = "model.layers.0.mlp.down_proj.weight"
    assert CheckpointTensors(reference).entry(name)[1] == (64, 108)
    manifest = quantize(reference, tmp_path / "W4", 4)
    assert manifest["layers"] == 2
    model, original = load_model(tmp_path / "W4"), load_model(reference)
    assert torch.equal(
        model.model.layers[0].mlp.down_proj.weight, original.model.layers[0].mlp.down_proj.weight
    )
    assert torch.isfinite(logits(model)).all() and not torch.equal(logits(model), logits(original))


@pytest.mark.parametrize("order", [sorted, lambda names: sorted(names, reverse=True)])
def test_the_order_of_tensors_in_a_file_does_not_matter(
    folder: Path, tmp_path: Path, order: Callable[[list[str]], list[str]]
) -> None:
    quantize(folder, tmp_path / "one")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensors[name] for name in order(list(tensors))}, folder / "model.safetensors", {"format": "pt"}
    )
    quantize(folder, tmp_path / "two")
    for first, second in zip(expert_files(tmp_path / "one"), expert_files(tmp_path / "two"), strict=True):
        assert first.read_bytes() == second.read_bytes()
