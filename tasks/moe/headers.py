"""What a checkpoint's safetensors files hold, read from their headers alone: cheap, whatever the checkpoint's size.

Every fault that headers and file lengths can show ends here, before any expensive work. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.contracts import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "which can run code when loaded; expected safetensors. If you trust them, convert them: load the model with "
    "transformers' from_pretrained and write it with save_pretrained"
)
# Bits of a value, by the names that safetensors gives to dtypes.
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: str  # its name in the checkpoint's folder
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard of a checkpoint of several files; None where there is no index.

    Raises InputError for an index that cannot be read, is empty, or names a file outside the folder.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict) or not found:
        raise InputError(
            f"{path}: expected a JSON object with a weight_map, tensor name -> shard; get it again"
        )
    for name, shard in found.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise InputError(
                f"{path}: '{name}' is in '{shard}': expected the name of a file beside the index"
            )
    return found


def weight_files(names: Sequence[str], index: Mapping[str, str] | None, where: str) -> list[str]:
    """The safetensors files of a checkpoint whose top level holds `names`; `index` is what its index file
    says, if it has one.

    Raises InputError when there are only pickle files, no weights, or when a shard that the index names is
    missing.
    """
    if index is not None:
        shards = sorted(set(index.values()))
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise InputError(
                f"{where}: {len(missing)} of {len(shards)} shards that {INDEX} names are missing: "
                f"{', '.join(missing[:5])}; get the complete checkpoint"
            )
        return shards
    if SINGLE in names:
        return [SINGLE]
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise InputError(f"{where}: the weights are pickle files ({', '.join(pickles[:3])}), {CONVERT}")
    raise InputError(
        f"{where}: no weights: expected a safetensors checkpoint, {SINGLE} or {INDEX} with its shards"
    )


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name.

    Raises InputError for weights that are not safetensors, for a shard that is missing, truncated, foreign
    or not as the index says, and for a tensor that is in two shards.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder: expected the folder of a checkpoint")
    index = read_index(folder)
    files = weight_files(sorted(path.name for path in folder.iterdir()), index, str(folder))
    tensors = merge_headers([folder / file for file in files])
    if index is not None:
        lost = sorted(
            name for name, shard in index.items() if name not in tensors or tensors[name].file != shard
        )
        if lost:
            raise InputError(
                f"{folder / index[lost[0]]}: {len(lost)} tensors that {INDEX} names are missing there, first "
                f"'{lost[0]}'; get the checkpoint again"
            )
        extra = sorted(tensors.keys() - index.keys())
        if extra:
            raise InputError(
                f"{folder / tensors[extra[0]].file}: {len(extra)} tensors are not in {INDEX}, first '{extra[0]}': "
                "index and shards are of different checkpoints; get both again"
            )
    return tensors


def merge_headers(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of several safetensors files by name; raises InputError when two hold the same one."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        found = read_header(path)
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise InputError(
                f"{path.parent}: '{twice[0]}' is in {tensors[twice[0]].file} and in {path.name} ({len(twice)} such "
                "tensors): which one counts is not said; remove the shards that do not belong here"
            )
        tensors |= found
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises InputError unless the file is as long as its header says and every tensor as large as its shape.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file: get the complete checkpoint")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(
                f"{path}: not a complete safetensors file ({size} bytes): truncated or foreign; get it again"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f"{path}: not a safetensors file: its header cannot be read; get it again"
            ) from None
    base, end = 8 + length, 0
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        bits = DTYPE_BITS.get(dtype)
        if start != end or stop < start or (bits and 8 * (stop - start) != bits * math.prod(shape)):
            raise InputError(
                f"{path}: '{name}' is {dtype} {list(shape)} at bytes {start} to {stop}, which does not fit; "
                "get it again"
            )
        end = stop
    if base + end != size:
        fault = "truncated" if size < base + end else "longer than its header says"
        raise InputError(f"{path}: {size} bytes, expected {base + end}: {fault}; get it again")
    return {
        name: StoredTensor(path.name, dtype, shape, base + start, stop - start)
        for name, (dtype, shape, start, stop) in entries.items()
    }
