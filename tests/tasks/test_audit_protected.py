"""The audit knows protected experts, and fails on what nobody declared."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks import quantize_instances
from tasks.audit_checkpoint import run as run_audit
from tasks.audit_checkpoint import state
from tasks.contracts import InputError, read_json
from tasks.moe.checkpoint import load_model
from tasks.quant.formats import MANIFEST_FILE
from tests.instances import settings
from tests.protected import SUPER, kept_of, supered, written_calibration


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return supered(tmp_path_factory.mktemp("protect"))


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_calibration(tmp_path_factory.mktemp("calibration") / "requests")


@pytest.fixture(scope="module")
def protected(reference: Path, requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts protected."""
    folder = tmp_path_factory.mktemp("protected") / "W3"
    quantize_instances.run(reference, folder, 3, settings(protect=3), requests)
    return folder


def edited(source: Path, folder: Path, layer: int, edit: Any) -> Path:
    """A copy of an instance with the shard of a layer changed."""
    shutil.copytree(source, folder)
    shard = folder / next(
        own["file"] for own in read_json(folder / MANIFEST_FILE)["experts"] if own["layer"] == layer
    )
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def test_the_audit_knows_protected_experts(reference: Path, protected: Path) -> None:
    result = run_audit(protected, reference)
    assert (result.problems(), result.exit_status) == ([], 0)
    assert result.verdict == (
        "clean: all 39 matrices that should be quantized are, at 3 bits; 9 more are protected, as declared"
    )
    assert "3 experts protected" in result.declared
    kept = [found for found in result.findings if found.protected]
    assert len(kept) == 9 and {state(found) for found in kept} == {"protected, as in the reference"}
    assert {state(found) for found in run_audit(protected).findings if found.protected} == {"protected"}
    rows = {own["name"]: own for own in result.as_json()["tensors"]}
    name = f"model.layers.{SUPER[0]}.mlp.experts.{SUPER[1]}.up_proj"
    assert rows[name]["protected"] and not rows[name]["should_be_quantized"]
    assert sum("protected" in own for own in rows.values()) == 9


def test_the_audit_fails_on_what_is_not_declared(reference: Path, protected: Path, tmp_path: Path) -> None:
    layer, kept = SUPER[0], kept_of(protected)
    other = next(expert for expert in range(8) if (layer, expert) not in kept)
    key = f"model.layers.{layer}.mlp.experts.{other}.down_proj"
    exact = f"model.layers.{layer}.mlp.experts.{SUPER[1]}.down_proj"
    weights = load_file(reference / "model.safetensors")

    def undeclared(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{key}.")]:
            del tensors[name]
        tensors[f"{key}.weight"] = weights[f"{key}.weight"]

    folder = edited(protected, tmp_path / "undeclared", layer, undeclared)
    assert run_audit(folder).problems() == [
        f"1 of 39 matrices that should be quantized are in 16 bits: {key}"
    ]
    with pytest.raises(InputError, match=re.escape(f"1 unexpected ({key}.weight)")):
        load_model(folder)

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{exact}.weight"][0, 0] += 1

    folder = edited(protected, tmp_path / "changed", layer, changed)
    assert run_audit(folder).problems() == []  # without the reference nobody can know
    assert run_audit(folder, reference).problems() == [
        f"1 tensors that must stay as they were were changed: {exact}"
    ]

    def lost(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{exact}.weight"]

    folder = edited(protected, tmp_path / "lost", layer, lost)
    assert run_audit(folder).problems() == [f"1 keys are missing: {exact}"]
    with pytest.raises(InputError, match=r"protected experts: .*down_proj\.weight"):
        load_model(folder)

    def packed_after_all(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"):
            tensors[f"{exact}.{part}"] = tensors[f"{key}.{part}"].clone()
        del tensors[f"{exact}.weight"]

    folder = edited(protected, tmp_path / "packed", layer, packed_after_all)
    assert run_audit(folder).problems() == [
        f"1 tensors are not stored as they should be: {exact} (quantized, but declared to be protected)"
    ]


def test_a_tool_that_ignored_every_expert_protected_none(reference: Path, tmp_path: Path) -> None:
    """Some tools write every module that they passed over into `ignore`."""
    folder = tmp_path / "ignored"
    shutil.copytree(reference, folder)
    config = read_json(folder / "config.json")
    names = [
        name.removesuffix(".weight")
        for name in load_file(reference / "model.safetensors")
        if ".experts." in name
    ]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [*names, "lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    result = run_audit(folder)
    assert result.exit_status == 1 and not any(found.protected for found in result.findings)
    assert result.problems()[0].startswith("48 of 48 matrices that should be quantized are in 16 bits")


# --- bad input ----------------------------------------------------------------------------------------------------
