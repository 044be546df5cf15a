"""Packed physical experts of a variant, and its bytes: every tensor counted as it is stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError, ReplicationPlan
from tasks.moe.family import MoELayer
from tasks.moe.registry import moe_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.params import Variant
from tasks.quant.formats import packed_entries, packed_tensors
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tasks.replication.plan import ExpertBytes


def expert_bytes(
    model: PreTrainedModel, layer: MoELayer, checkpoint: CheckpointTensors, variant: Variant
) -> ExpertBytes:
    """Stored bytes of one expert of a layer: in the reference's files, as a replica, and quantized.

    Raises InputError for a group size that does not divide a matrix, with the sizes that do.
    """
    views = layer.matrices()
    originals = set()
    for expert in range(layer.num_experts):
        size = 0
        for matrix, view in views.items():
            names = layer.tensors(matrix)  # one per expert, or one of them all
            dtype, _ = checkpoint.entry(names[expert] if len(names) > 1 else names[0])
            size += dtype.itemsize * view[expert].numel()
        originals.add(size)
    if len(originals) != 1:
        raise InputError(
            f"layer {layer.layer}: experts of {sorted(originals)} bytes, expected experts of one size"
        )

    def packed(bits: int) -> int:
        grid = Grid(bits, variant.group_size, symmetric=False)
        total = 0
        for matrix, view in views.items():
            grid.groups(view.shape[2], f"{layer.name} {matrix}")
            entries = packed_entries([matrix], (view.shape[1], view.shape[2]), grid)
            total += sum(dtype.itemsize * math.prod(shape) for dtype, shape in entries.values())
        return total

    return ExpertBytes(originals.pop(), packed(variant.replica_bits), packed(variant.least_important_bits))


def pack_physical_experts(model: PreTrainedModel, plan: ReplicationPlan) -> dict[str, torch.Tensor]:
    """Tensors of every physical expert with a width of its own, by rounding; keyed by physical number."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, own in zip(moe_layers(model), plan.layers, strict=True):
        for bits in sorted(set(own.bits) - {0}):
            physical = [expert for expert, width in enumerate(own.bits) if width == bits]
            logical = [own.physical_to_logical[expert] for expert in physical]
            grid = Grid(bits, plan.group_size, symmetric=False)
            for matrix, view in layer.matrices().items():
                quantized = quantize("rtn", view[logical], grid, f"{layer.name} {matrix}")
                keys = [layer.key(expert, matrix) for expert in physical]
                tensors |= packed_tensors(quantized, keys)
    # safetensors refuses tensors that share memory, as slices of one stack do.
    return {key: tensor.clone().contiguous() for key, tensor in tensors.items()}


def count_bytes(
    plan: ReplicationPlan, sizes: list[ExpertBytes], packed: dict[str, torch.Tensor], reference_bytes: int
) -> dict[str, Any]:
    """Bytes before and after, from the stored tensors; RuntimeError unless as planned and within."""
    before = after = replicas = quantized = dropped = 0
    for own, size in zip(plan.layers, sizes, strict=True):
        experts = len(set(own.physical_to_logical))
        added, lowered = len(own.bits) - experts, sum(bits > 0 for bits in own.bits[:experts])
        before += experts * size.original
        after += size.of_layer(experts, added, lowered)
        dropped += lowered * size.original
        replicas, quantized = replicas + added, quantized + lowered
    packed_bytes = sum(tensor.nbytes for tensor in packed.values())
    if after != before - dropped + packed_bytes or after > before:
        raise RuntimeError(f"planned {after} expert bytes, packed {packed_bytes}, of {before} before")
    return {
        "size_bytes": reference_bytes - before + after,
        "size_bytes_before": reference_bytes,
        "expert_bytes": after,
        "expert_bytes_before": before,
        "packed_bytes": packed_bytes,
        "replicas": replicas,
        "quantized_originals": quantized,
    }
