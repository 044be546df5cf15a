"""`quantize_instances.protect`: the most fragile experts stay in the reference's own type, whole and exact."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, CompressedTensorsConfig

from tasks import quantize_instances
from tasks.audit_checkpoint import run as run_audit
from tasks.contracts import InputError, read_json
from tasks.moe import fragile as fragile_module
from tasks.moe import shards
from tasks.moe.checkpoint import load_model
from tasks.moe.headers import INDEX
from tasks.moe.layerwise import walk_layers
from tasks.moe.registry import moe_layers
from tasks.parallel import IN_PROCESS
from tasks.params import ParamsError, check_params
from tasks.quant.formats import MANIFEST_FILE, REST_FILE, expert_files
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.instances import half_precision, logits, packed, settings
from tests.protected import SUPER, kept_of, supered, written_calibration
from tests.seeded_models import seeded_checkpoint


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return supered(tmp_path_factory.mktemp("protect"))


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_calibration(tmp_path_factory.mktemp("calibration") / "requests")


@pytest.fixture(scope="module")
def plain(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing protected."""
    folder = tmp_path_factory.mktemp("plain") / "W3"
    quantize_instances.run(reference, folder, 3, settings())
    return folder


@pytest.fixture(scope="module")
def protected(reference: Path, requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts protected."""
    folder = tmp_path_factory.mktemp("protected") / "W3"
    quantize_instances.run(reference, folder, 3, settings(protect=3), requests)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_exactly_the_protected_experts_are_those_of_the_reference(reference: Path, protected: Path) -> None:
    kept = kept_of(protected)
    assert kept[0] == SUPER and len(set(kept)) == 3
    originals, layers = moe_layers(load_model(reference)), moe_layers(load_model(protected))
    for original, layer in zip(originals, layers, strict=True):
        for matrix, view in layer.matrices().items():
            for expert in range(8):
                same = torch.equal(view[expert], original.matrices()[matrix][expert])
                assert same == ((layer.layer, expert) in kept), (layer.layer, expert, matrix)


def test_the_other_experts_are_stored_as_without_it(plain: Path, protected: Path) -> None:
    before, after = packed(plain), packed(protected)
    exact = {name for name in after if name.endswith(".weight")}
    assert len(exact) == 3 * 3
    gone = {name.removesuffix(".weight") for name in exact}
    assert after.keys() - exact == {name for name in before if name.rpartition(".")[0] not in gone}
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - exact)
    assert files(plain)[REST_FILE] == files(protected)[REST_FILE]


def test_the_manifest_says_what_is_kept_and_counts_its_bytes(
    reference: Path, plain: Path, protected: Path
) -> None:
    before, after = (read_json(folder / MANIFEST_FILE) for folder in (plain, protected))
    assert not {key for key in before if "protect" in key}
    for key in ("blocks", "matrices", "expert_parameters"):  # all experts, protected or not
        assert after[key] == before[key]
    assert after["protect"] == 3 and after["protected_matrices"] == 9
    assert after["protected_bytes"] == 9 * 32 * 64 * 2
    for own in after["protected"]:
        stem = f"model.layers.{own['layer']}.mlp.experts.{own['expert']}"
        assert own["matrices"] == [f"{stem}.{name}_proj" for name in ("gate", "up", "down")]
        assert own["size_bytes"] == 3 * 32 * 64 * 2
        assert own["output_error"] >= own["output_error_without_first"] > 0
    errors = [own["output_error"] for own in after["protected"]]
    assert errors == sorted(errors, reverse=True) and errors[0] > 3 * errors[1]
    assert after["expert_bytes"] == sum(tensor.nbytes for tensor in packed(protected).values())
    assert after["stored_bits"] == pytest.approx(8 * after["expert_bytes"] / after["expert_parameters"])
    # 39 of 48 matrices at 3 bits with two 16-bit sides for 32 weights: 4 bits a weight
    assert after["ideal_expert_bytes"] == 39 * 2048 * 4 / 8 + after["protected_bytes"]
    size = sum(path.stat().st_size for path in protected.iterdir() if path.name != MANIFEST_FILE)
    assert after["size_bytes"] == size
    error = total = 0.0
    for original, layer in zip(
        moe_layers(load_model(reference)), moe_layers(load_model(protected)), strict=True
    ):
        for matrix, view in original.matrices().items():
            error += float((view - layer.matrices()[matrix]).double().square().sum())
            total += float(view.double().square().sum())
    assert after["relative_error"] == pytest.approx((error / total) ** 0.5)
    assert after["relative_error"] < before["relative_error"] / 2  # the large expert had most of it


def test_protecting_the_large_expert_mends_most_of_the_damage(
    reference: Path, plain: Path, protected: Path
) -> None:
    target = torch.log_softmax(logits(load_model(reference)), -1)
    far = [
        float((target.exp() * (target - torch.log_softmax(logits(load_model(folder)), -1))).sum(-1).mean())
        for folder in (plain, protected)
    ]
    assert far[1] < far[0] / 2


def test_nothing_protected_is_the_instance_as_ever(
    reference: Path, requests: Path, plain: Path, tmp_path: Path
) -> None:
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=0), requests)
    assert files(tmp_path / "W3") == files(plain)


def test_runs_write_the_same_bytes(reference: Path, requests: Path, protected: Path, tmp_path: Path) -> None:
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=3), requests)
    assert files(tmp_path / "W3") == files(protected)
    assert [path.name for path in tmp_path.iterdir()] == ["W3"]


def test_a_killed_search_is_carried_on(
    reference: Path, requests: Path, protected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, done = fragile_module.quantize_unit, []

    def interrupted(unit: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(unit.layer.layer)
        return original(unit)

    monkeypatch.setattr(fragile_module, "quantize_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=3), requests)
    (kept,) = tmp_path.glob(".W3.*.shards")
    assert [path.name for path in kept.iterdir()] == ["fragile-00001.json"]
    monkeypatch.setattr(
        fragile_module, "quantize_unit", lambda unit: (done.append(unit.layer.layer), original(unit))[1]
    )
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=3), requests)
    assert done == [1, 2] and files(tmp_path / "W3") == files(protected)


def test_layers_of_several_units(
    reference: Path, requests: Path, protected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 experts, 3 a unit: the numbers of protected experts are the layer's, not the unit's."""
    monkeypatch.setattr(shards, "EXPERTS_PER_UNIT", 3)
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=3), requests)
    assert kept_of(tmp_path / "W3") == kept_of(protected)
    ours, others = packed(tmp_path / "W3"), packed(protected)
    assert ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize("inputs", ["quantized", "reference"])
def test_gptq_sees_protected_experts_in_the_layers_before(
    reference: Path, requests: Path, tmp_path: Path, inputs: Any
) -> None:
    gptq = {"inputs": inputs, "shrinkage": 0.25, "damping": 0.01, "max_fallback_share": 0.1}
    params = settings(method="gptq", gptq=gptq, protect=2)
    manifest = quantize_instances.run(reference, tmp_path / "W3", 3, params, requests)
    kept = kept_of(tmp_path / "W3")
    assert kept[0] == SUPER and manifest["extra_damped_matrices"] == 0
    model = load_model(reference)
    layers = {layer.layer: layer for layer in moe_layers(model)}
    ids = [own.tolist() for own in pd.read_parquet(requests / "calibration.parquet")["ids"]]
    for step in walk_layers(reference, ids, IN_PROCESS.batch_tokens, inputs, "by hand"):
        hessians, layer, made = step.hessians(), layers[step.layer.layer], {}
        for name, weights in step.matrices().items():
            own = hessians["inner" if name == "down_proj" else "hidden"]
            stored = weights.bfloat16()
            quantized = quantize("gptq", stored, Grid(3, 32, False), name, own, Gptq(0.01, 0.25)).dequantize()
            for number, expert in kept:
                if number == layer.layer:
                    quantized[expert] = weights[expert]
            made[name] = quantized
        step.replace(made)
        for matrix, view in layer.matrices().items():
            view.copy_(made[matrix])
    assert torch.equal(logits(load_model(tmp_path / "W3")), logits(model))


def test_experts_that_the_checkpoint_keeps_fused(requests: Path, tmp_path: Path) -> None:
    reference = half_precision(seeded_checkpoint(tmp_path / "float32", "gpt_oss"), tmp_path / "reference")
    quantize_instances.run(reference, tmp_path / "W2", 2, settings(protect=2), requests)
    pairs = zip(moe_layers(load_model(reference)), moe_layers(load_model(tmp_path / "W2")), strict=True)
    exact = {
        (layer.layer, expert)
        for original, layer in pairs
        for expert in range(8)
        if all(
            torch.equal(view[expert], original.matrices()[name][expert])
            for name, view in layer.matrices().items()
        )
    }
    assert exact == set(kept_of(tmp_path / "W2"))
    assert run_audit(tmp_path / "W2", reference).exit_status == 0


# --- export -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_symmetric_instance_of_separate_experts_loads_in_plain_transformers(
    requests: Path, tmp_path: Path
) -> None:
    """Switch, where transformers keeps an expert as a module: `ignore` names the protected ones."""
    reference = half_precision(
        seeded_checkpoint(tmp_path / "s", "switch_transformers"), tmp_path / "reference"
    )
    folder = tmp_path / "W3"
    manifest = quantize_instances.run(reference, folder, 3, settings(symmetric=True, protect=2), requests)
    names = [name for own in manifest["protected"] for name in own["matrices"]]
    config = read_json(folder / "config.json")["quantization_config"]
    assert manifest["exportable"] and config["ignore"] == ["lm_head", *names] and len(names) == 4
    index = read_json(folder / INDEX)["weight_map"]
    original = load_file(reference / "model.safetensors")
    for name in names:
        assert f"{name}.weight_packed" not in index
        stored = load_file(folder / index[f"{name}.weight"])[f"{name}.weight"]
        assert torch.equal(stored, original[f"{name}.weight"])
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(2, 350, (2, 20), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids[:, :10], "decoder_input_ids": ids[:, 10:]}
    with torch.inference_mode():
        ours = load_model(folder, torch.bfloat16)
        assert torch.equal(loaded.eval()(**inputs).logits, ours(**inputs).logits)
        assert not torch.equal(load_model(reference, torch.bfloat16)(**inputs).logits, ours(**inputs).logits)
    # Without the manifest it is a checkpoint like any other: its configuration says what is protected.
    (folder / MANIFEST_FILE).unlink()
    assert run_audit(folder, reference).problems() == []


@pytest.fixture(scope="module")
def symmetric(reference: Path, requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symmetric") / "W3"
    quantize_instances.run(reference, folder, 3, settings(symmetric=True, protect=1), requests)
    return folder


def test_where_transformers_fuses_experts_nothing_is_exported(symmetric: Path, tmp_path: Path) -> None:
    manifest = read_json(symmetric / MANIFEST_FILE)
    assert (
        not manifest["exportable"]
        and "engines read the experts of a layer in one format" in manifest["export"]
    )
    assert not (symmetric / INDEX).exists()
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(symmetric)
    # What EXPORT.md advises instead: the same model, dequantized, as a plain checkpoint.
    ours = load_model(symmetric, torch.bfloat16)
    ours.save_pretrained(tmp_path / "dense")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.bfloat16, output_loading_info=True
    )
    dense, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours.set_experts_implementation(dense.config._experts_implementation)
    assert torch.equal(logits(dense.eval()), logits(ours))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_the_reason_for_that_is_true(reference: Path, symmetric: Path, tmp_path: Path) -> None:
    """With the index and the `ignore` list that the format provides for, transformers stacks the packed experts alone.
    The day that this test fails, such instances can be exported."""
    folder = tmp_path / "exported"
    shutil.copytree(symmetric, folder)
    quantize_instances.run(reference, tmp_path / "W3", 3, settings(symmetric=True))
    config = read_json(tmp_path / "W3" / "config.json")
    config["quantization_config"]["ignore"] += read_json(folder / MANIFEST_FILE)["protected"][0]["matrices"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    index = {name: file for file, own in tensors.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / MANIFEST_FILE).unlink()
    assert run_audit(folder, reference).problems() == []  # complete and declared: nothing is wrong with it
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
        )


# --- audit --------------------------------------------------------------------------------------------------------


def test_bad_input_ends_before_any_work(reference: Path, requests: Path, tmp_path: Path) -> None:
    values = {"quantize_instances": settings().model_dump() | {"protect": -1}}
    with pytest.raises(
        ParamsError, match=r"'quantize_instances\.protect': .*greater than or equal to 0, got -1"
    ):
        check_params(values)
    for count in (16, 17):
        with pytest.raises(
            InputError, match=rf"protect is {count}, but the model has 16 routed experts: expected few"
        ):
            quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=count), requests)
    with pytest.raises(
        InputError, match="protect 1 needs calibration tokens: give the folder of the requests"
    ):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=1))
    with pytest.raises(InputError, match="no such file: run prepare_requests first"):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings(protect=1), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_protects_what_is_not_there(protected: Path, tmp_path: Path) -> None:
    for number, (layer, expert) in enumerate([(2, 8), (0, 1)]):  # layer 0 is dense
        folder = tmp_path / str(number)
        shutil.copytree(protected, folder)
        manifest = read_json(folder / MANIFEST_FILE)
        manifest["protected"][0] |= {"layer": layer, "expert": expert}
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
        with pytest.raises(
            InputError, match=rf"protects expert {expert} of layer {layer}: expected one of the"
        ):
            load_model(folder)
    assert len(expert_files(protected)) == 2
