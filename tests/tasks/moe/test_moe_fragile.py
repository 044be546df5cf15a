from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.moe import fragile
from tasks.moe.checkpoint import load_model, skeleton
from tasks.moe.fragile import Fragile, OutputErrors, by_place, most_fragile, output_errors
from tasks.moe.layerwise import walk_layers
from tasks.moe.quantizing import CalibratedWalk
from tasks.moe.registry import moe_layers
from tasks.moe.shards import Settings
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.seeded_models import VOCABULARY, seeded_checkpoint

GRID = Grid(2, 32, False)
BATCH = 40


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeded_checkpoint(tmp_path_factory.mktemp("fragile") / "reference", "qwen2_moe")


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 30, 2, 17)]


def errors_of(
    folder: Path, sequences: list[list[int]], scratch: Path, method: str = "rtn", limit: float = 1.0
) -> OutputErrors:
    layers = stored_layers(skeleton(folder), CheckpointTensors(folder))
    walk = CalibratedWalk(sequences, BATCH, "quantized", limit)
    scratch.mkdir(exist_ok=True)
    return output_errors(folder, layers, Settings(method, GRID, Gptq()), walk, map, scratch)


def by_hand(folder: Path, sequences: list[list[int]], quantized: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """[2, L, E] token by token: each sequence alone through the whole model, an expert as its formula says."""
    model = load_model(folder)
    layers = moe_layers(model)
    sums = np.zeros((2, len(layers), layers[0].num_experts))

    def mlp(matrices: dict[str, torch.Tensor], expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (matrices[name][expert].double() for name in ("gate_proj", "up_proj", "down_proj"))
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    entered: dict[int, tuple[torch.Tensor, ...]] = {}
    handles = [
        layer.experts.module.register_forward_pre_hook(
            lambda _module, args, options, place=place: entered.update(
                {place: layers[place].experts.entered(args, options)}
            ),
            with_kwargs=True,
        )
        for place, layer in enumerate(layers)
    ]
    for ids in sequences:
        with torch.inference_mode():
            model(torch.tensor([ids]), use_cache=False)
        for place, (hidden, index, weight) in entered.items():
            exact = layers[place].matrices()
            for token in range(len(ids)):
                for expert, share in zip(index[token].tolist(), weight[token].tolist(), strict=True):
                    x = hidden[token].double()
                    moved = mlp(quantized[place], expert, x) - mlp(exact, expert, x)
                    sums[0, place, expert] += share * float(moved.norm())
                    sums[1, place, expert] += share * float(moved.norm()) * (token > 0)
    for handle in handles:
        handle.remove()
    return sums


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_sums_are_those_by_hand(
    reference: Path, sequences: list[list[int]], tmp_path: Path, method: str
) -> None:
    quantized = []
    for step in walk_layers(reference, sequences, BATCH, "reference", "by hand"):
        hessians = step.hessians()
        own = {}
        for name, weights in step.matrices().items():
            inputs = hessians["inner" if name == "down_proj" else "hidden"]
            own[name] = quantize(method, weights, GRID, name, inputs, Gptq()).dequantize()
        quantized.append(own)
    errors = errors_of(reference, sequences, tmp_path, method)
    expected = by_hand(reference, sequences, quantized)
    assert errors.every.shape == (2, 8) and (expected[0] > expected[1]).any()
    np.testing.assert_allclose(errors.every, expected[0], rtol=2e-4)
    np.testing.assert_allclose(errors.without_first, expected[1], rtol=2e-4, atol=1e-9)


def test_position_zero_is_the_first_token_of_each_half(tmp_path: Path) -> None:
    """An encoder-decoder reads the first half with its encoder; of two tokens, each half is a position 0."""
    folder = seeded_checkpoint(tmp_path / "switch", "switch_transformers")
    pairs = errors_of(folder, [[5, 9], [7, 30], [200, 41]], tmp_path / "pairs", "rtn")
    assert pairs.every.sum() > 0 and not pairs.without_first.any()
    longer = errors_of(folder, [[5, 9, 40, 41, 42, 43]], tmp_path / "longer", "rtn")
    assert (longer.every.sum(axis=1) > longer.without_first.sum(axis=1)).all()
    assert (longer.without_first.sum(axis=1) > 0).all()


def test_single_tokens_are_all_position_zero(reference: Path, tmp_path: Path) -> None:
    errors = errors_of(reference, [[3], [4], [5]], tmp_path)
    assert errors.every.sum() > 0 and not errors.without_first.any()
    assert (errors.every == 0).any()  # 6 picks of 8 experts a layer: some have no token


@pytest.mark.parametrize(("place", "expert"), [(0, 6), (1, 3)])
def test_a_super_expert_is_found(
    reference: Path, sequences: list[list[int]], tmp_path: Path, place: int, expert: int
) -> None:
    """An expert whose output is 32 times as large errs 32 times as much."""
    before = errors_of(reference, sequences, tmp_path / "before")
    tensors = load_file(reference / "model.safetensors")
    tensors[f"model.layers.{place + 1}.mlp.experts.{expert}.down_proj.weight"] *= 32
    folder = tmp_path / "super"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((reference / "config.json").read_text())
    errors = errors_of(folder, sequences, tmp_path / "after")
    (top,) = most_fragile(errors, 1)
    assert (top.place, top.expert) == (place, expert)
    assert top.error > 3 * np.sort(errors.every[place])[-2]
    assert errors.every[place, expert] == pytest.approx(32 * before.every[place, expert], rel=1e-4)
    if place == 1:  # what lies before it is as it was
        assert np.array_equal(errors.every[0], before.every[0])


def test_threads_change_no_bit(reference: Path, sequences: list[list[int]], tmp_path: Path) -> None:
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            found.append(errors_of(reference, sequences, tmp_path / str(count), "gptq"))
        finally:
            torch.set_num_threads(threads)
    assert np.array_equal(found[0].every, found[1].every)
    assert np.array_equal(found[0].without_first, found[1].without_first)


def test_what_was_done_is_not_done_again(
    reference: Path, sequences: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = errors_of(reference, sequences, tmp_path / "whole")
    original, seen = fragile.quantize_unit, []

    def interrupted(unit: Any) -> Any:
        if unit.layer.layer == 2 and len(seen) == 1:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(unit.layer.layer)
        return original(unit)

    monkeypatch.setattr(fragile, "quantize_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        errors_of(reference, sequences, tmp_path / "half")
    again = errors_of(reference, sequences, tmp_path / "half")
    assert seen == [1, "killed", 2]
    assert np.array_equal(again.every, whole.every) and np.array_equal(
        again.without_first, whole.without_first
    )


def test_ranks() -> None:
    errors = OutputErrors(np.array([[1.0, 5.0, 0.0], [5.0, 2.0, 7.0]]), np.array([[1, 4, 0], [0, 2, 3.0]]))
    ranked = most_fragile(errors, 4)  # the two with 5 in the order of the layers
    assert ranked == [Fragile(1, 2, 7, 3), Fragile(0, 1, 5, 4), Fragile(1, 0, 5, 0), Fragile(1, 1, 2, 2)]
    assert by_place(ranked) == {0: (1,), 1: (0, 1, 2)}
    assert most_fragile(errors, 0) == [] and by_place([]) == {}
