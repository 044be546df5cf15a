import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tasks import quantize_instances
from tasks.contracts import InputError, read_json
from tasks.moe import quantizing
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.moe.registry import moe_layers
from tasks.moe.stored_experts import consumed, stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.parallel import IN_PROCESS
from tasks.params import QuantizeInstances
from tasks.quant.formats import INDEX_FILE, MANIFEST_FILE, REST_FILE, expert_files
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.instances import half_precision, logits, packed, settings
from tests.seeded_models import seeded_checkpoint


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    return half_precision(seeded_checkpoint(root / "float32", request.param), root / "reference")


def by_hand(reference: Path, bits: int, params: QuantizeInstances) -> Any:
    """The reference with its experts quantized in memory, nothing written."""
    model = load_model(reference)
    grid = Grid(bits, params.group_size, params.symmetric)
    stored = stored_layers(model, CheckpointTensors(reference))
    for layer, own in zip(moe_layers(model), stored, strict=True):
        views = layer.matrices()
        for matrix in own.matrices:
            weights = matrix.read(reference, slice(0, own.experts))
            views[matrix.name].copy_(quantize(params.method, weights, grid).dequantize())
    return model


@pytest.mark.parametrize(("bits", "method"), [(2, "hqq"), (3, "hqq"), (8, "hqq"), (3, "rtn")])
def test_an_asymmetric_instance(reference: Path, tmp_path: Path, bits: int, method: str) -> None:
    params, folder = settings(method=method), tmp_path / f"W{bits}"
    manifest = quantize_instances.run(reference, folder, bits, params)
    model = load_model(folder)
    assert torch.equal(logits(model), logits(by_hand(reference, bits, params)))
    assert not torch.equal(logits(model), logits(load_model(reference)))
    assert load_tokenizer(folder)("one two").input_ids == load_tokenizer(reference)("one two").input_ids
    assert (folder / "NOTICE").read_text() == "where the weights come from\n"
    assert not manifest["exportable"] and "not for export" in manifest["export"]
    # Plain transformers would ignore zero points, or invent experts: without an index it refuses instead.
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (3, 0), (4, 32), (8, 32)])
def test_a_symmetric_instance_loads_in_plain_transformers(
    reference: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    params, folder = settings(symmetric=True, group_size=group_size), tmp_path / f"W{bits}"
    assert quantize_instances.run(reference, folder, bits, params)["exportable"]
    expected = logits(by_hand(reference, bits, params))
    assert torch.equal(logits(load_model(folder)), expected)
    plain, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = load_model(folder, torch.bfloat16)
    ours.set_experts_implementation(plain.config._experts_implementation)
    assert torch.equal(logits(plain.eval()), logits(ours))  # not one bit apart


def test_the_manifest_counts_what_is_there(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "W3"
    manifest = quantize_instances.run(reference, folder, 3, settings())
    layers = 2 if "qwen2" in str(reference) else 3
    # 8 experts a layer, 3 matrices of 32 x 64 each
    assert manifest["blocks"] == layers * 8
    assert manifest["matrices"] == layers * 8 * 3
    assert manifest["expert_parameters"] == layers * 8 * 3 * 2048
    assert manifest["ideal_expert_bytes"] == manifest["expert_parameters"] * (3 + 32 / 32) / 8
    tensors = packed(folder)
    assert manifest["expert_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert manifest["stored_bits"] == pytest.approx(
        8 * manifest["expert_bytes"] / manifest["expert_parameters"]
    )
    assert manifest["rest_bytes"] == sum(tensor.nbytes for tensor in load_file(folder / REST_FILE).values())
    assert manifest["expert_matrices_seen_by_optimum_gptq"] == 0  # they are fused
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert abs(on_disk - manifest["size_bytes"]) <= 0.01 * manifest["size_bytes"]
    assert read_json(folder / MANIFEST_FILE).keys() == manifest.keys()


def test_relative_error_is_that_of_the_loaded_weights(reference: Path, tmp_path: Path) -> None:
    manifest = quantize_instances.run(reference, tmp_path / "W2", 2, settings())
    error = total = 0.0
    pairs = zip(moe_layers(load_model(reference)), moe_layers(load_model(tmp_path / "W2")), strict=True)
    for original, quantized in pairs:
        for matrix, view in original.matrices().items():
            error += float((view - quantized.matrices()[matrix]).double().square().sum())
            total += float(view.double().square().sum())
    assert manifest["relative_error"] == pytest.approx((error / total) ** 0.5)


def test_no_floating_copy_of_a_routed_expert(reference: Path, tmp_path: Path) -> None:
    quantize_instances.run(reference, tmp_path / "W4", 4, settings())
    source = CheckpointTensors(reference)
    routed = consumed(stored_layers(load_model(reference), source))
    shapes = {source.entry(name)[1] for name in routed}
    for file in (tmp_path / "W4").glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            assert not routed & set(stored.keys())
            if file.name != REST_FILE:
                for name in stored.keys():  # noqa: SIM118
                    tensor = stored.get_tensor(name)
                    assert not (tensor.is_floating_point() and tuple(tensor.shape) in shapes)
    rest = load_file(tmp_path / "W4" / REST_FILE)
    assert rest.keys() == set(source.files) - routed
    assert all(torch.equal(tensor, source.get(name)) for name, tensor in rest.items())


def test_one_flipped_bit_changes_the_logits(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "W3"
    quantize_instances.run(reference, folder, 3, settings())
    before = logits(load_model(folder))
    shard = expert_files(folder)[0]
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight_packed"))
    words = tensors[name].numpy().copy()
    words[0, 0] ^= np.int32(1 << 2)  # the top bit of the first code
    tensors[name] = torch.from_numpy(words)
    save_file(tensors, shard, metadata={"format": "pt"})
    assert not torch.equal(logits(load_model(folder)), before)


def test_runs_are_byte_for_byte_equal_and_share_the_rest(reference: Path, tmp_path: Path) -> None:
    for name, bits in (("a", 3), ("b", 3), ("c", 2)):
        quantize_instances.run(reference, tmp_path / name, bits, settings())
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert (tmp_path / "a" / REST_FILE).read_bytes() == (tmp_path / "c" / REST_FILE).read_bytes()


def test_fewer_bits_lose_more(reference: Path, tmp_path: Path) -> None:
    losses = [
        quantize_instances.run(reference, tmp_path / f"W{bits}", bits, settings())["relative_error"]
        for bits in (2, 3, 4)
    ]
    assert losses[0] > 1.5 * losses[1] > 2.25 * losses[2]
    target = torch.softmax(logits(load_model(reference)), -1)
    divergences = [
        float(
            (target * (target.log() - torch.log_softmax(logits(load_model(tmp_path / f"W{b}")), -1)))
            .sum(-1)
            .mean()
        )
        for b in (2, 3, 4)
    ]
    assert divergences[0] > divergences[1] > divergences[2] > 0


def test_a_sharded_reference_gives_the_same_instance(reference: Path, tmp_path: Path) -> None:
    load_model(reference, torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    quantize_instances.run(reference, tmp_path / "whole_W4", 4, settings())
    quantize_instances.run(tmp_path / "sharded", tmp_path / "sharded_W4", 4, settings())
    for name in (*(shard.name for shard in expert_files(tmp_path / "whole_W4")), REST_FILE):
        assert (tmp_path / "whole_W4" / name).read_bytes() == (tmp_path / "sharded_W4" / name).read_bytes()
    assert not (tmp_path / "sharded_W4" / INDEX_FILE).exists()


def test_bad_input_ends_before_any_work(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        quantize_instances.run(reference, tmp_path / "W4", 4, settings(group_size=48))
    assert "group_size 48 does not divide the input width 64 of model.layers." in str(caught.value)
    assert "8, 16, 32, 64" in str(caught.value)
    dense = seeded_checkpoint(tmp_path / "dense", "qwen2_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(InputError, match="no MoE layers"):
        quantize_instances.run(dense, tmp_path / "W4", 4, settings())
    assert not (tmp_path / "W4").exists()


def test_broken_experts(tmp_path: Path) -> None:
    folder = seeded_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight' holds NaN"):
        quantize_instances.run(folder, tmp_path / "W4", 4, settings())
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"no 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight' \(1 of"):
        quantize_instances.run(folder, tmp_path / "W4", 4, settings())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # nothing half-written


def test_an_instance_that_lost_a_tensor(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "W4"
    quantize_instances.run(reference, folder, 4, settings())
    rest = load_file(folder / REST_FILE)
    del rest["model.norm.weight"]
    save_file(rest, folder / REST_FILE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 missing \(model\.norm\.weight\)"):
        load_model(folder)


def test_the_configuration_of_an_exported_instance(reference: Path, tmp_path: Path) -> None:
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(symmetric=True))
    config = json.loads((tmp_path / "W3" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((reference / "config.json").read_text())
    assert quantization["format"] == "pack-quantized"
    assert quantization["config_groups"]["experts"]["weights"]["num_bits"] == 3
    index = read_json(tmp_path / "W3" / INDEX_FILE)
    shards = [shard.name for shard in expert_files(tmp_path / "W3")]
    assert set(index["weight_map"].values()) == {*shards, REST_FILE}
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes
        for file in (*shards, REST_FILE)
        for tensor in load_file(tmp_path / "W3" / file).values()
    )


# --- fused checkpoints, workers, interruptions --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_a_checkpoint_with_fused_experts(tmp_path: Path, family: str) -> None:
    reference = half_precision(seeded_checkpoint(tmp_path / "float32", family), tmp_path / "reference")
    params, folder = settings(symmetric=True), tmp_path / "W3"
    manifest = quantize_instances.run(reference, folder, 3, params)
    assert torch.equal(logits(load_model(folder)), logits(by_hand(reference, 3, params)))
    rest = load_file(folder / REST_FILE)
    fused = ("gate_up_proj", "down_proj", "input_linear.weight", "output_linear.weight")
    assert not [name for name in rest if name.endswith(fused)]
    biases = [name for name in rest if "experts" in name and name.endswith("_bias")]
    assert len(biases) == (2 * manifest["layers"] if family == "gpt_oss" else 0)
    # No loader reads quantized experts of these families: no index, so that none invents them.
    assert not manifest["exportable"] and not (folder / INDEX_FILE).exists()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_two_workers_write_the_same_folder(tmp_path: Path) -> None:
    reference = seeded_checkpoint(tmp_path / "reference", num_hidden_layers=2)
    quantize_instances.run(reference, tmp_path / "one", 3, settings())
    runtime = IN_PROCESS.model_copy(update={"workers": 2})
    quantize_instances.run(reference, tmp_path / "two", 3, settings(), runtime=runtime)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_killed_run_is_carried_on(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize_instances.run(reference, tmp_path / "whole", 3, settings())
    done: list[int] = []

    def interrupted(unit: Any) -> Any:
        if len(done) == whole["layers"] - 1:
            raise KeyboardInterrupt
        done.append(unit.layer.layer)
        return quantize_unit(unit)

    quantize_unit = quantizing.quantize_unit
    output = tmp_path / "W3"
    quantize_instances.run(reference, output, 4, settings())  # what was published before
    before = files(output)
    monkeypatch.setattr(quantizing, "quantize_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_instances.run(reference, output, 3, settings())
    assert files(output) == before
    (kept,) = tmp_path.glob(".W3.*.shards")
    assert len(list(kept.glob("*.json"))) == whole["layers"] - 1

    def counting(unit: Any) -> Any:
        done.append(unit.layer.layer)
        return quantize_unit(unit)

    monkeypatch.setattr(quantizing, "quantize_unit", counting)
    assert quantize_instances.run(reference, output, 3, settings()) == whole | {"name": "W3"}
    assert len(done) == len(set(done)) == whole["layers"]  # each layer once, over both runs
    assert files(output) == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".W3.*"))


def test_shards_of_other_parameters_are_not_carried_on(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_unit, left = quantizing.quantize_unit, [1]

    def interrupted(unit: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return quantize_unit(unit)

    monkeypatch.setattr(quantizing, "quantize_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings())
    monkeypatch.setattr(quantizing, "quantize_unit", quantize_unit)
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(group_size=16))
    quantize_instances.run(reference, tmp_path / "whole", 3, settings(group_size=16))
    assert files(tmp_path / "W3") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".W3.*"))


def test_an_instance_whose_shards_are_not_its_own(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "W4"
    quantize_instances.run(reference, folder, 4, settings())
    first, second = expert_files(folder)[:2]
    tensors = load_file(first)
    save_file({**tensors, "foreign.weight_packed": torch.zeros(1)}, first, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 unexpected \(foreign\.weight_packed\)"):
        load_model(folder)
    save_file(tensors, first, metadata={"format": "pt"})
    second.unlink()
    with pytest.raises(
        InputError, match=r"1 of \d shards that manifest\.json names are absent, first model-e"
    ):
        load_model(folder)
    manifest = read_json(folder / MANIFEST_FILE)
    del manifest["experts"][1]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"\d shards of experts, but the model of config.json has \d MoE"):
        load_model(folder)


# --- gptq ---------------------------------------------------------------------------------------------------------
