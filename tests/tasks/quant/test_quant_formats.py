from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.contracts import InputError
from tasks.quant.formats import TensorFile, packed_entries, packed_tensors, quantization_config, read_packed
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize


def test_a_streamed_file_reads_like_any_other(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3).half(),  # 6 bytes: what follows must still be aligned
        "long": torch.arange(2),
        "words": torch.arange(5, dtype=torch.int32),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(2, 3).T,
        "brain": torch.randn(2, 2).bfloat16(),
    }
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "streamed.safetensors"
    with TensorFile(path, entries) as file:
        for name in reversed(tensors):  # any order
            file.write(name, tensors[name])
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_streamed_file_must_be_complete(tmp_path: Path) -> None:
    entries = {"a": (torch.float32, (1,)), "b": (torch.float32, (1,))}
    never = pytest.raises(RuntimeError, match="1 tensors were never written, first b")
    with never, TensorFile(tmp_path / "half.safetensors", entries) as file:
        file.write("a", torch.zeros(1))
    undeclared = pytest.raises(ValueError, match="declared")
    with undeclared, TensorFile(tmp_path / "wrong.safetensors", entries) as file:
        file.write("a", torch.zeros(2))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 0])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_matrices_come_back(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    weights = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0))
    grid, keys = Grid(bits, group_size, symmetric), ["x.0.up", "x.1.up", "x.2.up"]
    quantized = quantize("rtn", weights, grid)
    tensors = packed_tensors(quantized, keys)
    assert packed_entries(keys, (4, 48), grid) == {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "packed.safetensors"
    )
    with safe_open(tmp_path / "packed.safetensors", "pt") as source:
        back = read_packed(source, keys, bits)
    assert back.grid == grid
    assert torch.equal(back.dequantize(), quantized.dequantize())


def test_packed_matrices_that_do_not_fit(tmp_path: Path) -> None:
    quantized = quantize("rtn", torch.randn(1, 4, 64), Grid(3, 32, symmetric=True))
    tensors = {name: tensor.contiguous() for name, tensor in packed_tensors(quantized, ["up"]).items()}
    save_file(tensors, tmp_path / "packed.safetensors")
    with safe_open(tmp_path / "packed.safetensors", "pt") as source:
        with pytest.raises(InputError, match=r"weight_packed is \[4, 6\], expected \[4, 8\]"):
            read_packed(source, ["up"], 4)
        with pytest.raises(InputError, match=r"down\.weight_shape"):
            read_packed(source, ["down"], 3)


def test_only_symmetric_grids_are_exported() -> None:
    with pytest.raises(ValueError, match="symmetric"):
        quantization_config(Grid(3, 64, symmetric=False), "experts")
    channel = quantization_config(Grid(3, 0, symmetric=True), "experts")
    assert channel["config_groups"]["experts"]["weights"]["strategy"] == "channel"
