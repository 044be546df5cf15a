"""Routed experts as a checkpoint stores them: which tensors of which shards make up each layer's matrices.

Everything is told from headers and the model's configuration, before any weight is read; some experts of a layer
are then read without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.family import Fused, MoELayer, check_stored
from tasks.moe.registry import moe_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.quant.threads import side_by_side

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix of all experts of one layer."""

    name: str  # gate_proj, up_proj or down_proj
    keys: list[str]  # [E] module paths under which an instance stores it
    shape: tuple[int, int, int]  # E, out, in
    dtype: torch.dtype
    tensors: list[tuple[str, str]]  # name and file of the checkpoint's tensors: [E], or one if fused
    fused: Fused | None  # where it lies in the one tensor

    def read(self, folder: Path, experts: slice) -> torch.Tensor:
        """[e, out, in] weights of some experts in the stored dtype. Raises InputError, naming the tensor, for
        weights that are not finite."""
        with ExitStack() as stack:
            wanted = self.tensors if self.fused else self.tensors[experts]
            files = {file: stack.enter_context(safe_open(folder / file, "pt")) for _, file in wanted}
            tensors = [files[file].get_tensor(name) for name, file in wanted]  # mapped: nothing is read yet
            weights = self.fused.of(tensors[0])[experts].contiguous() if self.fused else torch.stack(tensors)
        finite = side_by_side(lambda weight: bool(torch.isfinite(weight).all()), weights)
        if not all(finite):
            broken = finite.index(False)
            where = (
                f"expert {experts.start + broken} of '{wanted[0][0]}'"
                if self.fused
                else f"'{wanted[broken][0]}'"
            )
            raise InputError(f"{folder}: {where} holds NaN or infinity: expected finite weights")
        return weights


@dataclass(frozen=True)
class StoredLayer:
    """The routed experts of one MoE layer."""

    layer: int  # as MoELayer counts
    matrices: list[StoredMatrix]

    @property
    def experts(self) -> int:
        """E."""
        return self.matrices[0].shape[0]


def stored_layers(model: PreTrainedModel, source: CheckpointTensors) -> list[StoredLayer]:
    """The MoE layers of a checkpoint in depth order; `model` may be on the meta device.

    Raises InputError when the model has no MoE layers, and for an expert's tensor that the checkpoint lacks, has
    in another shape than config.json says, or does not hold in floating point.
    """
    check_stored(source.files, str(source.folder))
    return [
        StoredLayer(layer.layer, [_stored(layer, matrix, source) for matrix in layer.matrices()])
        for layer in moe_layers(model)
    ]


def _stored(layer: MoELayer, matrix: str, source: CheckpointTensors) -> StoredMatrix:
    experts, rows, width = layer.matrices()[matrix].shape
    names, fused = layer.tensors(matrix), layer.family.fused
    lacking = [name for name in names if name not in source.headers]
    if lacking:
        raise InputError(
            f"{source.folder}: the checkpoint has no '{lacking[0]}' ({len(lacking)} of the layer's {len(names)} "
            f"{matrix} tensors are absent): expected {'one of all experts' if fused else 'one tensor per expert'}"
        )
    for name in names:
        header = source.headers[name]
        if header.dtype not in DTYPES or header.dtype != source.headers[names[0]].dtype:
            raise InputError(
                f"{source.folder}: '{name}' is {header.dtype}: expected one of {', '.join(DTYPES)}, the same for all "
                "experts of a layer"
            )
        stored = torch.empty(header.shape, device="meta")
        fits = len(header.shape) == (3 if fused else 2)
        got = (fused[matrix].of(stored) if fused else stored[None]).shape if fits else stored.shape
        if tuple(got) != ((experts if fused else 1), rows, width):
            expected = [experts, rows, width] if fused else [rows, width]
            raise InputError(
                f"{source.folder}: '{name}' is {list(header.shape)}, config.json says {expected} for {matrix}"
            )
    return StoredMatrix(
        matrix, layer.keys(matrix), (experts, rows, width), DTYPES[source.headers[names[0]].dtype],
        [(name, source.headers[name].file) for name in names], fused[matrix] if fused else None,
    )  # fmt: skip


def consumed(layers: Sequence[StoredLayer]) -> set[str]:
    """Names of the checkpoint's tensors that hold routed experts' matrices."""
    return {name for layer in layers for matrix in layer.matrices for name, _ in matrix.tensors}
