"""What EXPORT.md promises, family by family: plain transformers loads a symmetric instance, and computes the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, PreTrainedModel

from tasks import quantize_instances
from tasks.contracts import read_json
from tasks.moe.checkpoint import load_model
from tasks.moe.headers import read_headers
from tasks.moe.registry import FAMILIES, family_of, moe_layers
from tasks.moe.tensors import CheckpointTensors, auto_class, read_config
from tasks.params import load_params
from tasks.quant.formats import INDEX_FILE, REST_FILE, expert_files
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.seeded_models import seeded_checkpoint
from tests.stored_checkpoints import half

ROOT = Path(__file__).parents[2]
EXPORTED = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "switch_transformers")
NOT_EXPORTED = ("gpt_oss", "granitemoe", "llama_moe", "deepseek")
IDS = torch.randint(2, 350, (2, 20), generator=torch.Generator().manual_seed(0))


def export(reference: Path, out: Path, bits: int, **changes: Any) -> dict[str, Any]:
    section = load_params(ROOT / "params.yaml").quantize_instances
    values = {"method": "rtn", "group_size": 32, "symmetric": True, **changes}
    return quantize_instances.run(reference, out, bits, section.model_copy(update=values))


def plain(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The folder in transformers alone, as EXPORT.md says; nothing of this project is installed in the model."""
    cls = auto_class(read_config(folder))
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits [2, S, V]; an encoder-decoder reads the first half and answers with the second."""
    inputs = (
        {"input_ids": IDS[:, :10], "decoder_input_ids": IDS[:, 10:]}
        if model.config.is_encoder_decoder
        else {"input_ids": IDS}
    )
    with torch.inference_mode():
        return model(**inputs).logits


def in_memory(reference: Path, dtype: torch.dtype, grid: Grid) -> PreTrainedModel:
    """The reference in transformers alone, its experts quantized in memory: nothing was written or packed."""
    return quantized_experts(plain(reference, dtype), grid)


def quantized_experts(model: PreTrainedModel, grid: Grid) -> PreTrainedModel:
    for layer in moe_layers(model):
        for view in layer.matrices().values():
            view.copy_(quantize("rtn", view.contiguous(), grid).dequantize())
    return model


@pytest.fixture(scope="module", params=EXPORTED)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return half(tmp_path_factory.mktemp(request.param) / "reference", request.param)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (3, 0), (4, 32), (8, 32)])
def test_plain_transformers_computes_the_same(
    reference: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    assert export(reference, tmp_path / "W", bits, group_size=group_size)["exportable"]
    expected = logits(in_memory(reference, torch.bfloat16, Grid(bits, group_size, True)))
    exported = plain(
        tmp_path / "W", torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert float((logits(exported) - expected).abs().max()) == 0.0
    if bits == 4:
        if not exported.config.is_encoder_decoder:  # the configuration in config.json does as well
            assert torch.equal(logits(plain(tmp_path / "W", torch.bfloat16)), expected)
        original = logits(plain(reference, torch.bfloat16))
        assert not torch.equal(expected, original) and torch.isfinite(expected).all()
    ours = load_model(tmp_path / "W", torch.bfloat16)
    ours.set_experts_implementation(exported.config._experts_implementation)
    assert float((logits(ours) - expected).abs().max()) == 0.0


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_nothing_but_the_routed_experts_is_packed(reference: Path, tmp_path: Path) -> None:
    export(reference, tmp_path / "W", 3)
    stored, original = read_headers(tmp_path / "W"), CheckpointTensors(reference)
    model = load_model(reference)
    routed = {key for layer in moe_layers(model) for matrix in layer.matrices() for key in layer.keys(matrix)}
    packed = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_packed")}
    assert packed == routed
    kept = {name for name in stored if not name.rpartition(".")[2].startswith("weight_")}
    assert kept == original.files.keys() - {
        name for layer in moe_layers(model) for matrix in layer.matrices() for name in layer.tensors(matrix)
    }
    rest = load_file(tmp_path / "W" / REST_FILE)
    assert all(torch.equal(rest[name], original.get(name)) for name in kept)
    # The regular expression by which engines know what is quantized: every routed matrix, and no other module.
    config = read_json(tmp_path / "W" / "config.json")["quantization_config"]
    (target,) = config["config_groups"]["experts"]["targets"]
    assert target.startswith("re:") and config["ignore"] == ["lm_head"]
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    names = routed | linear | {name.removesuffix(".weight") for name in original.files}
    assert {name for name in names if re.match(target[3:], name)} == routed


def test_the_index_names_every_tensor_of_every_shard(reference: Path, tmp_path: Path) -> None:
    export(reference, tmp_path / "W", 4)
    shards = {path.name for path in expert_files(tmp_path / "W")}
    assert len(shards) == len(moe_layers(load_model(reference))) > 1
    index = read_json(tmp_path / "W" / INDEX_FILE)
    assert set(index["weight_map"].values()) == shards | {REST_FILE}
    assert index["metadata"]["total_size"] == sum(
        tensor.size_bytes for tensor in read_headers(tmp_path / "W").values()
    )


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_references_in_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """Scales of float32 and float16 weights are float16, and transformers leaves the experts in that type whatever
    `dtype` asks for. So a float32 model is exact after `.float()`, as EXPORT.md says, and not before."""
    folder = seeded_checkpoint(tmp_path / "reference", "deepseek_v2")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for bits in (2, 3, 8):
        export(folder, tmp_path / f"W{bits}", bits)
        loading = CompressedTensorsConfig(dequantize=True)
        exported = plain(tmp_path / f"W{bits}", dtype, quantization_config=loading)
        experts = moe_layers(exported)[0].matrices()["up_proj"]
        assert experts.dtype == torch.float16 and exported.lm_head.weight.dtype == dtype
        if dtype == torch.float32:
            exported = exported.float()
        expected = in_memory(folder, dtype, Grid(bits, 32, True))
        assert float((logits(exported) - logits(expected)).abs().max()) == 0.0


def test_one_scale_changed_changes_the_logits(tmp_path: Path) -> None:
    """The comparison above can fail."""
    reference = half(tmp_path / "reference", "olmoe")
    export(reference, tmp_path / "W", 4)
    shard = expert_files(tmp_path / "W")[0]
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale"] *= 2
    save_file(tensors, shard, metadata={"format": "pt"})
    changed = logits(plain(tmp_path / "W", torch.bfloat16))
    assert not torch.equal(changed, logits(in_memory(reference, torch.bfloat16, Grid(4, 32, True))))


@pytest.mark.parametrize("family", NOT_EXPORTED)
def test_a_family_without_a_loader_says_so(tmp_path: Path, family: str) -> None:
    reference = half(tmp_path / "reference", family)
    manifest = export(reference, tmp_path / "W", 4)
    reason = family_of(read_config(reference)).not_exportable
    assert reason and not manifest["exportable"] and manifest["export"] == f"not for export: {reason}"
    assert "quantization_config" not in read_json(tmp_path / "W" / "config.json")
    assert not (tmp_path / "W" / INDEX_FILE).exists()
    with pytest.raises(
        OSError, match="no file named"
    ):  # plain transformers refuses it, rather than invent experts
        auto_class(read_config(tmp_path / "W")).from_pretrained(tmp_path / "W")
    ours = load_model(tmp_path / "W", torch.bfloat16)  # and this project runs it
    expected = quantized_experts(load_model(reference, torch.bfloat16), Grid(4, 32, True))
    assert torch.equal(logits(ours), logits(expected))


def test_every_family_is_one_or_the_other() -> None:
    assert sorted(FAMILIES) == sorted((*EXPORTED, *NOT_EXPORTED))
    assert {name for name, family in FAMILIES.items() if family.not_exportable is None} == set(EXPORTED)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_the_code_of_export_md(tmp_path: Path) -> None:
    export(half(tmp_path / "reference"), tmp_path / "W3", 3)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "EXPORT.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("artifacts/instances/W3", str(tmp_path / "W3")), names)
    assert torch.equal(logits(names["model"].eval()), logits(plain(tmp_path / "W3", torch.bfloat16)))
    assert names["tokenizer"]("one two").input_ids
