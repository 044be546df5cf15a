"""Packed experts on disk: compressed-tensors' `pack-quantized` tensors per expert, in streamed safetensors
files.

A matrix `model.layers.1.mlp.experts.0.gate_proj` becomes

    .weight_packed      [out, words] int32
    .weight_scale       [out, G] float16 or bfloat16
    .weight_shape       [2] int64: out, in
    .weight_zero_point  [out, G] float16, on an asymmetric grid only; engines of the format ignore it, so such
    files
                        are not for export

and one that is protected, which no codes are made of, into `.weight` [out, in] in the reference's own type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError

from tasks.contracts import InputError, read_json
from tasks.quant.grid import ZERO_POINT_DTYPE, Grid, QuantizedMatrix
from tasks.quant.pack import pack, packed_words, unpack
from tasks.quant.threads import side_by_side

REST_FILE = "model-rest.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "manifest.json"
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip

Entry = tuple[torch.dtype, tuple[int, ...]]


def experts_file(number: int, count: int) -> str:
    """Name of the shard with the experts of the MoE layer at place `number` of `count`, from 1 on."""
    return f"model-experts-{number:05d}-of-{count:05d}.safetensors"


def expert_files(folder: Path) -> list[Path]:
    """An instance's shards of experts, one per MoE layer in depth order, as its manifest lists them.

    Raises InputError when one is absent.
    """
    paths = [folder / shard["file"] for shard in read_json(folder / MANIFEST_FILE)["experts"]]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise InputError(
            f"{folder}: {len(absent)} of {len(paths)} shards that {MANIFEST_FILE} names are absent, first {absent[0]}: "
            "quantize again"
        )
    return paths


class TensorFile:
    """A safetensors file written tensor by tensor, in any order, so that the whole is never in memory.

    Equal tensors give equal bytes. Leaving the context raises RuntimeError if a declared tensor was not
    written.
    """

    def __init__(self, path: str | Path, entries: Mapping[str, Entry]) -> None:
        """Declare `entries`, name -> (dtype, shape). Wide dtypes come first, which keeps every tensor
        aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        self._entries = dict(entries)
        end = 0
        for name in sorted(entries, key=lambda name: -entries[name][0].itemsize):
            dtype, shape = entries[name]
            start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._offsets[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._waiting = set(entries)
        self._file = Path(path).open("wb")  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one declared tensor; raises ValueError when its dtype or shape is not the declared one."""
        if (tensor.dtype, tuple(tensor.shape)) != self._entries[name]:
            raise ValueError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, declared {self._entries[name]}"
            )
        self._file.seek(self._base + self._offsets[name])
        if tensor.numel():
            self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._waiting.discard(name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._waiting:
            raise RuntimeError(f"{len(self._waiting)} tensors were never written, first {min(self._waiting)}")


def plain_name(key: str) -> str:
    """The tensor of a matrix that is not packed."""
    return f"{key}.weight"


def packed_entries(
    keys: Sequence[str], shape: tuple[int, int], grid: Grid, scale: torch.dtype = torch.float16
) -> dict[str, Entry]:
    """Entries of matrices [out, in] of one shape, one per key (a module path without `.weight`)."""
    rows, width = shape
    groups = grid.groups(width)
    entries: dict[str, Entry] = {}
    for key in keys:
        entries[f"{key}.weight_packed"] = (torch.int32, (rows, packed_words(width, grid.num_bits)))
        entries[f"{key}.weight_scale"] = (scale, (rows, groups))
        entries[f"{key}.weight_shape"] = (torch.int64, (2,))
        if not grid.symmetric:
            entries[f"{key}.weight_zero_point"] = (ZERO_POINT_DTYPE, (rows, groups))
    return entries


def packed_tensors(quantized: QuantizedMatrix, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of `packed_entries` for the E matrices of a stack, one key each, in order."""
    words = side_by_side(lambda codes: pack(codes, quantized.grid.num_bits), quantized.codes)
    tensors: dict[str, torch.Tensor] = {}
    for expert, key in enumerate(keys):
        tensors[f"{key}.weight_packed"] = words[expert]
        tensors[f"{key}.weight_scale"] = quantized.scale[expert]
        tensors[f"{key}.weight_shape"] = torch.tensor(quantized.codes.shape[1:], dtype=torch.int64)
        if quantized.zero_point is not None:
            tensors[f"{key}.weight_zero_point"] = quantized.zero_point[expert]
    return tensors


def read_packed(source: Any, keys: Sequence[str], num_bits: int) -> QuantizedMatrix:
    """Read matrices of one shape as a stack from `source`, anything with safe_open's keys() and get_tensor().

    Whether the grid is symmetric, and its group size, follow from what is stored. Raises InputError naming a
    tensor that is absent or whose shape disagrees.
    """

    def stacked(suffix: str) -> torch.Tensor:
        try:
            return torch.stack([source.get_tensor(f"{key}.{suffix}") for key in keys])
        except SafetensorError as error:
            raise InputError(f"packed experts: {keys[0]}.{suffix}: {error}") from None

    shapes = stacked("weight_shape")
    rows, width = (int(size) for size in shapes[0])
    if (shapes != shapes[0]).any():
        raise InputError(
            f"packed experts beside {keys[0]} differ in shape: expected {rows} x {width} for each"
        )
    words, scale = stacked("weight_packed"), stacked("weight_scale")
    if tuple(words.shape[1:]) != (rows, packed_words(width, num_bits)):
        raise InputError(
            f"{keys[0]}.weight_packed is {list(words.shape[1:])}, expected "
            f"{[rows, packed_words(width, num_bits)]} for {rows} x {width} at {num_bits} bits"
        )
    asymmetric = f"{keys[0]}.weight_zero_point" in source.keys()  # noqa: SIM118 (not a dict)
    groups = scale.shape[-1]
    grid = Grid(num_bits, 0 if groups == 1 else width // groups, not asymmetric)
    zero_point = stacked("weight_zero_point") if asymmetric else None
    return QuantizedMatrix(grid, unpack(words, num_bits, width), scale, zero_point)


def read_plain(source: Any, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix [out, in] that is not packed; raises InputError as `read_packed` does."""
    name = plain_name(key)
    try:
        weight = source.get_tensor(name)
    except SafetensorError as error:
        raise InputError(f"protected experts: {name}: {error}") from None
    if tuple(weight.shape) != shape:
        raise InputError(f"{name} is {list(weight.shape)}, expected {list(shape)}")
    return weight


def quantization_config(grid: Grid, target: str, kept: Sequence[str] = ()) -> dict[str, Any]:
    """config.json's `quantization_config` of a symmetric instance; `target` is a regular expression for its
    matrices, `kept` are the module paths of those that are not packed."""
    if not grid.symmetric:
        raise ValueError("only symmetric grids can be exported")
    strategy = (
        {"strategy": "group", "group_size": grid.group_size} if grid.group_size else {"strategy": "channel"}
    )
    weights = {"num_bits": grid.num_bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *kept],
        "config_groups": {"experts": {"targets": [f"re:{target}"], "weights": weights}},
    }


def file_sha256(path: str | Path) -> str:
    """sha256 of a file's bytes, hexadecimal."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
