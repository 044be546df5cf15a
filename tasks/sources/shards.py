"""What a checkpoint folder holds, read from the headers of its safetensors files: no tensor is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.contracts import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; raises InputError when it is absent or no configuration."""
    values = _read_object(folder, "config.json")
    if not isinstance(values.get("model_type"), str):
        raise InputError(f"{folder}/config.json has no model_type: not a transformers configuration")
    return values


def weight_files(names: list[str], index: dict[str, Any] | None, where: str) -> list[str]:
    """The safetensors files of a checkpoint whose top level holds `names`; `index` is its index file, if it
    has one.

    Raises InputError when there are only pickle files, no weights, or when a shard that the index names is
    missing.
    """
    if index is not None:
        shards = sorted(set(index.get("weight_map", {}).values()))
        missing = [shard for shard in shards if shard not in names]
        if missing or not shards:
            raise InputError(
                f"{where}: {len(missing)} of {len(shards)} shards that {INDEX} names are missing: "
                f"{', '.join(missing[:5])}; get the complete checkpoint"
            )
        return shards
    if SINGLE in names:
        return [SINGLE]
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise InputError(
            f"{where}: the weights are pickle files ({', '.join(pickles[:3])}), which can run code when "
            "loaded; expected safetensors. If you trust them, convert them: load the model with transformers "
            "and call save_pretrained"
        )
    raise InputError(f"{where}: no weights: expected {SINGLE}, or {INDEX} with its shards")


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a checkpoint of several shards; None where there is none."""
    return _read_object(folder, INDEX) if (folder / INDEX).is_file() else None


def list_weights(folder: Path) -> list[str]:
    """The names of the weight files of a checkpoint folder; raises InputError as `weight_files` does."""
    return weight_files([path.name for path in folder.iterdir()], read_index(folder), str(folder))


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name.

    Raises InputError for a missing, truncated or foreign file, and for a tensor that is not where the index
    says.
    """
    index = read_index(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in list_weights(folder):
        found = _read_header(folder / file)
        if index is not None:
            promised = [name for name, shard in index["weight_map"].items() if shard == file]
            absent = sorted(set(promised) - set(found))
            if absent:
                raise InputError(
                    f"{folder / file}: {len(absent)} tensors that {INDEX} names are missing: {absent[0]}"
                )
        tensors |= found
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(f"{path}: not a complete safetensors file ({size} bytes): get it again")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise InputError(
                f"{path}: not a safetensors file: its header cannot be read; get it again"
            ) from None
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != size:
        raise InputError(f"{path}: {size} bytes, expected {8 + length + end}: truncated; get it again")
    return {
        name: StoredTensor(tuple(tensor["shape"]), tensor["data_offsets"][1] - tensor["data_offsets"][0])
        for name, tensor in header.items()
    }


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no {name} there: expected the folder of a transformers checkpoint"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
