import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.contracts import InputError, LayerPlan, ReplicationPlan, read_json
from tasks.moe.audit import audit
from tasks.moe.checkpoint import PHYSICAL_FILE, PLAN_FILE, load_model, skeleton
from tasks.moe.headers import INDEX
from tasks.moe.registry import moe_layers
from tasks.quant.formats import REST_FILE, packed_tensors
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests import stored_checkpoints as made

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.half(tmp_path_factory.mktemp("audit") / "reference")


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_moe",
        "mixtral",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "switch_transformers",
        "llama_moe",
        "deepseek",
    ],
)
def test_every_layout_of_experts_is_seen(tmp_path: Path, family: str) -> None:
    """Fused, in a ModuleList or a ModuleDict, under whichever names: all are seen, in 16 bits and quantized."""
    folder = made.half(tmp_path / "reference", family)
    plain = audit(folder)
    layers = moe_layers(skeleton(folder))
    matrices = sum(layer.num_experts * len(layer.matrices()) for layer in layers)
    values = sum(view.numel() for layer in layers for view in layer.matrices().values())
    assert (plain.missing, plain.unexpected, len(plain.problems())) == ([], [], 1)
    assert sum(found.storage.values for found in plain.unquantized) == values
    quantized = audit(made.instance(folder, tmp_path / "W3", 3), folder)
    assert quantized.problems() == []
    assert quantized.verdict == f"clean: all {matrices} matrices that should be quantized are, at 3 bits"


def test_zero_points_of_another_version_than_declared(reference: Path, tmp_path: Path) -> None:
    """In GPTQ's v1 a symmetric 4-bit zero point is stored as 7, in v2 as 8."""
    for number, (code, layout, right) in enumerate(
        [(7, "gptq", True), (8, "gptq_v2", True), (7, "gptq_v2", False), (8, "gptq", False)]
    ):
        declared = {"quant_method": "gptq", "bits": 4, "sym": True, "format": layout}
        folder = made.rewrite(reference, tmp_path / str(number), made.gptq(4, 32, code), **declared)
        problems = audit(folder).problems()
        assert (problems == []) == right
        if not right:
            other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[layout]
            assert f"zero points of format {other}: config.json says {layout}" in problems[0]


STORES: dict[str, tuple[made.Store, tuple[str, int], dict[str, Any]]] = {
    "pack-quantized": (
        made.compressed("pack-quantized", 3),
        ("pack-quantized", 3),
        {"quant_method": "compressed-tensors", "config_groups": {"experts": {"weights": {"num_bits": 3}}}},
    ),
    "int-quantized": (
        made.compressed("int-quantized", 8),
        ("int-quantized", 8),
        {"quant_method": "compressed-tensors"},
    ),
    "gptq": (made.gptq(3, 32, 3), ("gptq", 3), {"quant_method": "gptq", "bits": 3}),
    "awq": (made.awq, ("awq", 4), {"quant_method": "awq", "bits": 4}),
    "hqq": (made.hqq, ("hqq", 4), {"quant_method": "hqq"}),
    "quanto": (made.quanto, ("quanto", 4), {"quant_method": "quanto", "weights": "int4"}),
    "bitsandbytes": (made.nf4, ("bitsandbytes", 4), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp8": (made.block_fp8, ("fp8", 8), {"quant_method": "fp8"}),
}


@pytest.mark.parametrize("name", STORES)
def test_other_tools_checkpoints(reference: Path, tmp_path: Path, name: str) -> None:
    store, stored, declared = STORES[name]
    folder = made.rewrite(reference, tmp_path / "made", store, **declared)
    result = audit(folder, reference)
    assert (result.problems(), made.formats_found(result)["routed experts"]) == ([], {stored})
    everything = audit(folder, expect="all")
    assert everything.problems()[0].startswith(
        "12 of 84 matrices that should be quantized are in 16 bits: model.layers.0"
    )

    original = load_file(reference / "model.safetensors")[f"{EXPERT}.weight"]

    def restore(tensors: made.Parts) -> None:
        for part in [part for part in tensors if part.startswith(f"{EXPERT}.")]:
            del tensors[part]
        tensors[f"{EXPERT}.weight"] = original

    made.change(folder, restore)
    assert audit(folder).problems() == [f"1 of 72 matrices that should be quantized are in 16 bits: {EXPERT}"]


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    reference = made.half(tmp_path / "reference", "gpt_oss")
    folder = made.rewrite(
        reference, tmp_path / "mxfp4", made.mxfp4, r"experts\.(gate_up|down)_proj$", quant_method="mxfp4"
    )
    result = audit(folder, reference)
    assert (result.problems(), made.formats_found(result)["routed experts"]) == ([], {("mxfp4", 4)})

    def break_scale(tensors: made.Parts) -> None:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 0] = 255  # the NaN of powers of two

    made.change(folder, break_scale)
    assert audit(folder).problems() == [
        "1 tensors hold NaN or infinity: model.layers.1.mlp.experts.down_proj"
    ]


def test_experts_of_a_fused_family_split_by_a_tool(tmp_path: Path) -> None:
    reference = made.half(tmp_path / "reference", "gpt_oss")
    tensors = load_file(reference / "model.safetensors")
    for layer in moe_layers(load_model(reference)):
        for matrix, view in layer.matrices().items():
            quantized = quantize("rtn", view.bfloat16().contiguous(), Grid(4, 32, True))
            tensors |= packed_tensors(quantized, layer.keys(matrix))
            for key in layer.keys(matrix):
                tensors[f"{key}.bias"] = torch.zeros(view.shape[1], dtype=torch.bfloat16)
    fused = [
        name
        for name in tensors
        if "experts.gate_up_proj" in name or name.endswith(("down_proj", "down_proj_bias"))
    ]
    for name in fused:
        del tensors[name]
    folder = tmp_path / "split"
    folder.mkdir()
    (folder / "config.json").write_text((reference / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = audit(folder, reference)
    assert (result.problems(), made.formats_found(result)["routed experts"]) == ([], {("pack-quantized", 4)})


def test_nan_missing_unexpected_and_changed(reference: Path, tmp_path: Path) -> None:
    folder = made.instance(reference, tmp_path / "W4", 4, symmetric=True)
    rest = load_file(folder / REST_FILE)
    rest["model.layers.0.mlp.gate.weight"] += 1
    rest["model.layers.2.input_layernorm.weight"][0] = float("nan")
    rest["model.layers.9.extra.weight"] = rest.pop("model.norm.weight")
    save_file(rest, folder / REST_FILE, metadata={"format": "pt"})
    index = read_json(folder / INDEX)
    index["weight_map"]["model.layers.9.extra.weight"] = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    shard = sorted(folder.glob("model-experts-*"))[1]
    experts = load_file(shard)
    experts[f"{EXPERT}.weight_scale"][2, 1] = float("inf")
    save_file(experts, shard, metadata={"format": "pt"})
    result = audit(folder, reference)
    problems = result.problems()
    assert result.missing == ["model.norm"] and result.unexpected == ["model.layers.9.extra"]
    assert "2 tensors hold NaN or infinity: model.layers.1.mlp.experts.3.up_proj and 1 more" in problems
    assert any(
        "2 tensors that must stay as they were were changed: model.layers.0.mlp.gate and 1 more" in line
        for line in problems
    )
    assert problems[-2:] == ["1 keys are missing: model.norm", "1 keys are unexpected: model.layers.9.extra"]
    assert result.exit_status == 1
    without = audit(folder)  # without the reference, a router that was changed cannot be told from its own
    assert not any("changed" in line for line in without.problems())


def test_a_missing_expert_and_an_absent_scale(reference: Path, tmp_path: Path) -> None:
    folder = made.rewrite(reference, tmp_path / "made", made.compressed("pack-quantized", 4))

    def lose(tensors: made.Parts) -> None:
        for part in ("packed", "scale", "shape"):
            del tensors[f"model.layers.2.mlp.experts.7.down_proj.weight_{part}"]
        del tensors[f"{EXPERT}.weight_scale"]

    made.change(folder, lose)
    assert audit(folder).problems() == [
        f"1 tensors are not stored as they should be: {EXPERT} ('weight_scale' is absent)",
        "1 keys are missing: model.layers.2.mlp.experts.7.down_proj",
    ]


def test_tied_embeddings_are_no_missing_key(tmp_path: Path) -> None:
    tied = made.half(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert audit(tied).missing == []
    made.change(
        tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert audit(tied).unexpected == []


def test_a_model_without_experts(tmp_path: Path) -> None:
    dense = made.half(tmp_path / "dense", "qwen2_moe", mlp_only_layers=[0, 1, 2])
    result = audit(dense)
    assert (result.exit_status, result.problems()) == (0, [])
    assert "no routed experts" in result.verdict
    assert audit(dense, expect="all").exit_status == 1


def test_a_model_that_transformers_does_not_know(reference: Path, tmp_path: Path) -> None:
    folder = made.rewrite(reference, tmp_path / "made", made.compressed("pack-quantized", 4))
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "made_up_moe"}))
    result = audit(folder)
    assert (result.exit_status, result.model_type) == (0, "made_up_moe")
    assert "keys not checked" in result.notes[0]
    assert made.formats_found(result)["routed experts"] == {("pack-quantized", 4)}
    assert {found.name for found in result.findings if found.kind == "routers"} == {
        f"model.layers.{layer}.mlp.gate" for layer in range(3)
    }
    assert len([found for found in result.findings if found.kind == "attention"]) == 12


def test_a_variant(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "variant"
    folder.mkdir()
    layers, plans, packed = moe_layers(load_model(reference)), [], {}
    for layer in layers:  # one replica of expert 0; it and expert 5 are quantized, at 8 and 2 bits
        plans.append(LayerPlan(layer.layer, [*range(8), 0], [0, 0, 0, 0, 0, 2, 0, 0, 8]))
        for matrix, view in layer.matrices().items():
            for physical, logical, bits in ((5, 5, 2), (8, 0, 8)):
                quantized = quantize("rtn", view[[logical]].contiguous(), Grid(bits, 32, False))
                packed |= packed_tensors(quantized, [layer.key(physical, matrix)])
    ReplicationPlan("hash", 32, "round_robin", 0, plans).save(folder / PLAN_FILE)
    save_file(packed, folder / PHYSICAL_FILE)
    with pytest.raises(InputError, match="give the folder of its reference with --reference"):
        audit(folder)
    result = audit(folder, reference)
    assert result.verdict == "clean: all 18 matrices that should be quantized are, at 2, 8 bits"
    del packed["model.layers.1.mlp.experts.8.up_proj.weight_packed"]
    save_file(packed, folder / PHYSICAL_FILE)
    assert audit(folder, reference).exit_status == 1
