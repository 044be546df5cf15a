from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tasks import quantize_instances
from tasks.contracts import InputError, ResumableError
from tasks.moe.checkpoint import load_model
from tasks.moe.layerwise import walk_layers
from tasks.moe.registry import moe_layers
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.parallel import IN_PROCESS
from tasks.quant.formats import expert_files
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.instances import half_precision, logits, packed, settings
from tests.seeded_models import seeded_checkpoint


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    return half_precision(seeded_checkpoint(root / "float32", request.param), root / "reference")


def calibration(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Random calibration tokens, written as prepare_requests writes them."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 350, (length,), generator=generator).tolist() for length in lengths]
    folder.mkdir()
    pd.DataFrame({"id": range(len(ids)), "ids": ids}).to_parquet(folder / "calibration.parquet")
    return ids


@pytest.mark.parametrize("inputs", ["quantized", "reference"])
def test_gptq_layer_after_layer(reference: Path, tmp_path: Path, inputs: Any) -> None:
    ids = calibration(tmp_path / "requests", [60, 40, 50])
    gptq = {"inputs": inputs, "shrinkage": 0.25, "damping": 0.01, "max_fallback_share": 0.1}
    params = settings(method="gptq", gptq=gptq)
    manifest = quantize_instances.run(reference, tmp_path / "W3", 3, params, tmp_path / "requests")

    # The same by hand: whole layers, gate and up apart, nothing written.
    model = load_model(reference)
    layers = {layer.layer: layer for layer in moe_layers(model)}
    stored = {own.layer: own for own in stored_layers(model, CheckpointTensors(reference))}
    tokens = []
    for step in walk_layers(reference, ids, IN_PROCESS.batch_tokens, inputs, "by hand"):
        hessians, layer = step.hessians(), layers[step.layer.layer]
        tokens.append(hessians["hidden"].tokens.tolist())
        made = {}
        for matrix in stored[layer.layer].matrices:
            own = hessians["inner" if matrix.name == "down_proj" else "hidden"]
            weights = matrix.read(reference, slice(0, layer.num_experts))
            quantized = quantize("gptq", weights, Grid(3, 32, False), matrix.name, own, Gptq(0.01, 0.25))
            made[matrix.name] = quantized.dequantize()
        step.replace(made)
        for matrix, view in layer.matrices().items():
            view.copy_(made[matrix])
    assert torch.equal(logits(load_model(tmp_path / "W3")), logits(model))

    assert manifest["expert_tokens"] == tokens
    assert [sum(own) for own in tokens] == [150 * 2] * manifest["layers"]  # top-2
    assert manifest["fallbacks"] == sum(own.count(0) for own in tokens)
    assert manifest["gptq"] == gptq
    assert manifest["extra_damped_matrices"] == 0


def test_what_the_inputs_of_a_layer_are_changes_later_layers_alone(reference: Path, tmp_path: Path) -> None:
    calibration(tmp_path / "requests", [60, 40])
    shards = {}
    for inputs in ("quantized", "reference"):
        gptq = settings().gptq.model_dump() | {"inputs": inputs, "max_fallback_share": 1.0}
        params = settings(method="gptq", gptq=gptq)
        quantize_instances.run(reference, tmp_path / inputs, 2, params, tmp_path / "requests")
        shards[inputs] = [path.read_bytes() for path in expert_files(tmp_path / inputs)]
    assert shards["quantized"][0] == shards["reference"][0]
    assert all(a != b for a, b in zip(shards["quantized"][1:], shards["reference"][1:], strict=True))


def test_experts_without_tokens_are_counted_and_limited(reference: Path, tmp_path: Path) -> None:
    """3 tokens reach at most 6 of a layer's 8 experts, so at least a quarter has none."""
    calibration(tmp_path / "requests", [3])

    def quantized(limit: float) -> dict[str, Any]:
        gptq = settings().gptq.model_dump() | {"max_fallback_share": limit}
        params = settings(method="gptq", gptq=gptq)
        return quantize_instances.run(reference, tmp_path / "W3", 3, params, tmp_path / "requests")

    with pytest.raises(
        ResumableError, match=r"experts get no calibration token.*max_fallback_share 0\.2 allows"
    ):
        quantized(0.2)
    assert not (tmp_path / "W3").exists()
    manifest = quantized(1.0)
    without = sum(own.count(0) for own in manifest["expert_tokens"])
    assert manifest["fallbacks"] == without >= 2 * manifest["layers"]
    assert manifest["fallback_share"] == without / manifest["blocks"]
    assert all(torch.isfinite(tensor).all() for tensor in packed(tmp_path / "W3").values())


def test_gptq_needs_calibration_tokens(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="method 'gptq' needs calibration tokens"):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings(method="gptq"))
    with pytest.raises(InputError, match="run prepare_requests first"):
        quantize_instances.run(reference, tmp_path / "W3", 3, settings(method="gptq"), tmp_path)
    assert not list(tmp_path.iterdir())
