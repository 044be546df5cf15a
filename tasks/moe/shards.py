"""The packed experts of an instance, made piece by piece: one shard per MoE layer, units of a few experts.

A unit is computed by whoever runs it (`tasks/parallel.py`): it reads its own weights, and its Hessians, from files
and gives back packed tensors. The driver writes a layer's units into the layer's shard. Neither ever holds more
than EXPERTS_PER_UNIT experts of a layer for each unit in flight.

A protected expert's matrices stand in the shard as the reference stores them, `<key>.weight` [out, in] in its type, in
place of the packed tensors; every other expert's tensors are those that they would be without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save

from tasks.contracts import InputError, ResumableError, read_json, replacing_file, write_json
from tasks.moe.stored_experts import StoredLayer, StoredMatrix
from tasks.quant.formats import (
    Entry,
    TensorFile,
    experts_file,
    file_sha256,
    packed_entries,
    packed_tensors,
    plain_name,
)
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid, QuantizedMatrix, scale_dtype
from tasks.quant.hessian import Hessians
from tasks.quant.methods import NEEDS_HESSIANS, quantize
from tasks.quant.size import ideal_bytes, relative_error_parts

EXPERTS_PER_UNIT = 16  # a constant: a layer's units, and so their sums, are the same on any machine


@dataclass(frozen=True)
class Settings:
    """How every expert is quantized."""

    method: str
    grid: Grid
    gptq: Gptq


@dataclass(frozen=True)
class Unit:
    """Some experts of one layer, as a worker gets them: names, no weights."""

    folder: Path  # of the reference
    layer: StoredLayer
    first: int  # expert
    settings: Settings
    hessians: Path | None  # of the layer, as `write_hessians` wrote them
    protected: tuple[int, ...] = ()  # of the layer: experts that stay as they are

    @property
    def experts(self) -> slice:
        return slice(self.first, min(self.first + EXPERTS_PER_UNIT, self.layer.experts))


@dataclass(frozen=True)
class Packed:
    """A quantized unit."""

    tensors: bytes  # a safetensors file: `packed_tensors` of its matrices, the weights of protected experts
    error: float  # squared Frobenius norm of weights - dequantized, without protected experts
    total: float  # of weights
    damped: int  # expert matrices whose Hessian took more damping than was asked for


def units(
    folder: Path,
    layer: StoredLayer,
    settings: Settings,
    hessians: Path | None = None,
    protected: tuple[int, ...] = (),
) -> Iterator[Unit]:
    """The pieces of a layer, in order."""
    for first in range(0, layer.experts, EXPERTS_PER_UNIT):
        yield Unit(folder, layer, first, settings, hessians, protected)


def quantize_unit(unit: Unit) -> Packed:
    """Read, quantize and pack. Raises InputError for weights that are not finite and as `quantize` does."""
    settings, experts = unit.settings, unit.experts
    kept = [expert - unit.first for expert in unit.protected if experts.start <= expert < experts.stop]
    tensors: dict[str, torch.Tensor] = {}
    error = total = 0.0
    damped = 0
    for together in _together(unit.layer, settings.method):
        weights = torch.cat([matrix.read(unit.folder, experts) for matrix in together], dim=1)
        hessians = None
        if unit.hessians is not None:
            hessians = read_hessians(unit.hessians, _inputs(together[0]), experts)
        name = together[0].keys[unit.first]
        quantized = quantize(settings.method, weights, settings.grid, name, hessians, settings.gptq)
        own_error, own_total = relative_error_parts(weights, quantized, kept)
        error, total = error + own_error, total + own_total
        if quantized.damping is not None:
            more = quantized.damping > settings.gptq.damping * (1 + 1e-6)  # stored as float32
            more[kept] = False
            damped += int(more.sum()) * len(together)
        start = 0
        for matrix in together:
            rows, keys = slice(start, start + matrix.shape[1]), matrix.keys[experts]
            own = packed_tensors(_rows(quantized, rows), keys)
            exact = {keys[expert]: weights[expert, rows] for expert in kept}
            own = {name: tensor for name, tensor in own.items() if name.rpartition(".")[0] not in exact}
            own |= {plain_name(key): weight for key, weight in exact.items()}
            tensors.update(own)
            start = rows.stop
    return Packed(save({name: tensor.contiguous() for name, tensor in tensors.items()}), error, total, damped)


def _together(layer: StoredLayer, method: str) -> list[list[StoredMatrix]]:
    """Matrices that are quantized in one call: those that share a Hessian, else each on its own."""
    if method not in NEEDS_HESSIANS:
        return [[matrix] for matrix in layer.matrices]
    groups: dict[str, list[StoredMatrix]] = {}
    for matrix in layer.matrices:
        groups.setdefault(_inputs(matrix), []).append(matrix)
    return list(groups.values())


def _inputs(matrix: StoredMatrix) -> str:
    """Which Hessians belong to a matrix."""
    return "inner" if matrix.name == "down_proj" else "hidden"


def _rows(quantized: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    zero_point = None if quantized.zero_point is None else quantized.zero_point[:, rows]
    return replace(
        quantized, codes=quantized.codes[:, rows], scale=quantized.scale[:, rows], zero_point=zero_point
    )


# --- Hessians, from the driver to the units -----------------------------------------------------------------------


def write_hessians(path: Path, hessians: Mapping[str, Hessians]) -> None:
    """Write a layer's Hessians "hidden" and "inner" with their pools."""
    tensors: dict[str, torch.Tensor] = {}
    for name, own in hessians.items():
        tensors |= {f"{name}.tokens": own.tokens, f"{name}.total": own.total, f"{name}.pool": own.pooled()}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(path, entries) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)


def read_hessians(path: Path, name: str, experts: slice) -> Hessians:
    """Those of some experts, shrunk to the whole layer's pool still."""
    with safe_open(path, "pt") as source:
        tokens = source.get_tensor(f"{name}.tokens")[experts]
        total = source.get_slice(f"{name}.total")[experts]
        return Hessians(tokens, total, source.get_tensor(f"{name}.pool"))


# --- shards -------------------------------------------------------------------------------------------------------


class Shards:
    """A folder of finished shards. Each has a sidecar `<shard>.json` that tells what was counted and is written last:
    a shard with one is whole."""

    def __init__(
        self,
        folder: Path,
        layers: Sequence[StoredLayer],
        grid: Grid,
        protected: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """`protected`: place among the MoE layers -> experts that stay as the reference stores them."""
        self.folder, self.layers, self.grid = folder, layers, grid
        self._protected = protected or {}

    def protected(self, place: int) -> tuple[int, ...]:
        """Experts of the layer at `place` that stay as they are."""
        return self._protected.get(place, ())

    def units(
        self, reference: Path, place: int, settings: Settings, hessians: Path | None = None
    ) -> Iterator[Unit]:
        """The pieces of the layer at `place`, in order."""
        return units(reference, self.layers[place], settings, hessians, self.protected(place))

    def path(self, place: int) -> Path:
        return self.folder / experts_file(place + 1, len(self.layers))

    def entries(self, place: int) -> dict[str, Entry]:
        """Names, dtypes and shapes of a shard's tensors."""
        kept, entries = self.protected(place), {}
        for matrix in self.layers[place].matrices:
            packed = [key for expert, key in enumerate(matrix.keys) if expert not in kept]
            entries |= packed_entries(packed, matrix.shape[1:], self.grid, scale_dtype(matrix.dtype))
            for expert in kept:
                entries[plain_name(matrix.keys[expert])] = (matrix.dtype, matrix.shape[1:])
        return entries

    def finished(self, place: int) -> bool:
        return self._counts(place).is_file()

    def counts(self, place: int) -> dict[str, Any]:
        """What was counted of a finished shard."""
        return read_json(self._counts(place))

    def _counts(self, place: int) -> Path:
        return self.path(place).with_suffix(".json")

    def write(self, place: int, packed: Iterable[Packed], tokens: torch.Tensor | None = None) -> None:
        """Write the shard of the MoE layer at `place` from its units, in order. `tokens` [E] are noted with it."""
        layer, path = self.layers[place], self.path(place)
        error = total = 0.0
        damped = stored = 0
        with replacing_file(path) as temporary:
            with TensorFile(temporary, self.entries(place)) as file:
                for unit in packed:
                    for name, tensor in load(unit.tensors).items():
                        file.write(name, tensor)
                        stored += tensor.nbytes
                    error, total, damped = error + unit.error, total + unit.total, damped + unit.damped
            sha256 = file_sha256(temporary)
        shapes = [matrix.shape for matrix in layer.matrices]
        kept = self.protected(place)
        plain = sum(
            len(kept) * torch.Size(matrix.shape[1:]).numel() * matrix.dtype.itemsize
            for matrix in layer.matrices
        )
        counts: dict[str, Any] = {
            "layer": layer.layer,
            "file": path.name,
            "sha256": sha256,
            "size_bytes": path.stat().st_size,
            "matrices": sum(shape[0] for shape in shapes),
            "parameters": sum(torch.Size(shape).numel() for shape in shapes),
            "stored_bytes": stored,
            "ideal_bytes": plain
            + sum(ideal_bytes((shape[0] - len(kept), *shape[1:]), self.grid) for shape in shapes),
            "error": error,
            "total": total,
        }
        if kept:
            counts |= {"protected": list(kept), "protected_bytes": plain}
        if tokens is not None:
            counts |= {"tokens": tokens.tolist(), "damped": damped}
        write_json(self._counts(place), counts, digits=17)


@contextmanager
def unfinished(output: Path, digest: str) -> Iterator[Path]:
    """A folder beside `output` for shards, removed when the block succeeds or the input cannot be used. After any other
    end a later run with the same digest finds it again. Folders with other digests are removed at once."""
    folder = output.with_name(f".{output.name}.{digest[:16]}.shards")
    for stale in output.parent.glob(f".{output.name}.*.shards"):
        if stale != folder:
            shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException as error:
        useless = isinstance(error, InputError) and not isinstance(error, ResumableError)
        if useless or not any(folder.glob("*.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
