import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.contracts import InputError
from tasks.moe.headers import DTYPE_BITS, INDEX, read_header, read_headers

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5, dtype=torch.int8)}


def written(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def sharded(folder: Path, shards: list[dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    names = [f"model-{number}.safetensors" for number in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        written(folder / name, tensors)
    found = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": index or found}))
    return folder


def test_a_header_says_where_every_tensor_is(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors")
    header, content = read_header(path), path.read_bytes()
    assert (header["a"].dtype, header["a"].shape, header["a"].size_bytes) == ("F32", (2, 3), 24)
    for name, tensor in TENSORS.items():
        stored = header[name]
        own = content[stored.start : stored.start + stored.size_bytes]
        assert own == tensor.numpy().tobytes()
    assert read_headers(tmp_path) == header


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
)])  # fmt: skip
def test_every_dtype_that_torch_saves_is_known(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=torch.uint8).to(dtype)
    stored = read_header(written(tmp_path / "one.safetensors", {"x": tensor}))["x"]
    assert DTYPE_BITS[stored.dtype] == 8 * tensor.itemsize


@pytest.mark.parametrize("cut", [1, 5, 40, 10_000])
def test_a_truncated_file_is_named_at_once(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "model.safetensors", {"x": torch.zeros(64, 64)})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=rf"{path.name}: .*truncated.*get it again"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 not safetensors at all", b"\x10" + bytes(7) + b"[1, 2, 3, 4, 5] "]
)
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"not a (complete )?safetensors file"):
        read_headers(tmp_path)


def test_a_file_that_is_too_long_and_a_header_that_does_not_fit(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole + b"more")
    with pytest.raises(InputError, match="longer than its header says"):
        read_headers(tmp_path)
    path.write_bytes(whole.replace(b"[2,3]", b"[2,4]"))
    with pytest.raises(InputError, match=r"'a' is F32 \[2, 4\] at bytes 0 to 24, which does not fit"):
        read_headers(tmp_path)


def test_shards_and_their_index(tmp_path: Path) -> None:
    one = {"a": torch.ones(2)}
    two = {"b": torch.ones(3)}
    assert {
        name: tensor.file for name, tensor in read_headers(sharded(tmp_path / "good", [one, two])).items()
    } == {
        "a": "model-0.safetensors",
        "b": "model-1.safetensors",
    }
    index = {"a": "model-0.safetensors", "b": "model-1.safetensors"}
    gone = sharded(tmp_path / "gone", [one, two], index | {"c": "model-9.safetensors"})
    with pytest.raises(InputError, match=r"1 of 3 shards .* are missing: model-9\.safetensors"):
        read_headers(gone)
    lost = sharded(tmp_path / "lost", [one, two], index | {"c": "model-1.safetensors"})
    with pytest.raises(InputError, match=r"model-1\.safetensors: 1 tensors .*missing there, first 'c'"):
        read_headers(lost)
    swapped = sharded(
        tmp_path / "swapped", [one, two], {"a": "model-1.safetensors", "b": "model-0.safetensors"}
    )
    with pytest.raises(InputError, match=r"model-1\.safetensors: 2 tensors .*first 'a'"):
        read_headers(swapped)
    extra = sharded(tmp_path / "extra", [one | {"d": torch.ones(1)}, two], index)
    with pytest.raises(InputError, match=rf"1 tensors are not in {INDEX}, first 'd'"):
        read_headers(extra)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "twice", [{"a": torch.ones(2), "c": torch.ones(1)}, {"a": torch.zeros(2)}])
    with pytest.raises(InputError, match=r"'a' is in model-0\.safetensors and in model-1\.safetensors"):
        read_headers(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match="expected a JSON object with a weight_map"):
        read_headers(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leaves_its_folder(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InputError, match="expected the name of a file beside the index"):
        read_headers(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        read_headers(tmp_path / "absent")
    with pytest.raises(InputError, match="expected a safetensors checkpoint"):
        read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        InputError, match=r"pickle files \(pytorch_model\.bin\).*can run code.*save_pretrained"
    ):
        read_headers(tmp_path)
