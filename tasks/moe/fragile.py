"""Which experts lose most when they are quantized: the output error of every expert on the calibration tokens.

    error[l, e] = sum over tokens t of g[l, e](t) · || e's output after quantization - e's output ||

g is the routing weight, and a layer's inputs are the reference's own. A unit of error is taken to hurt alike in every
layer, so that experts of all layers can be ranked, and no gradient is needed. Where the attention sink sits, at
position 0, a few experts have outputs far larger than on any other token: so sums without that position stand beside.

One layer at a time is in memory: its weights, its quantized experts a few at a time, and the hidden states of the
calibration tokens twice. Costs the quantizing of every expert, two forward passes, and the experts' outputs twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from tasks.contracts import read_json, write_json
from tasks.moe.experts import Experts
from tasks.moe.instance import read_experts_into
from tasks.moe.layerwise import LayerStep, Routed, sums_of, walk_layers
from tasks.moe.quantizing import CalibratedWalk, Spread, check_fallbacks
from tasks.moe.shards import Settings, quantize_unit, units, write_hessians
from tasks.moe.stored_experts import StoredLayer
from tasks.quant.methods import NEEDS_HESSIANS
from tasks.quant.threads import side_by_side


@dataclass(frozen=True)
class OutputErrors:
    """Sums [L, E] over the calibration tokens; 0 for an expert without a token."""

    every: np.ndarray
    without_first: np.ndarray  # position 0 of each sequence left out


@dataclass(frozen=True)
class Fragile:
    """One expert with its sums."""

    place: int  # of its layer among the MoE layers
    expert: int
    error: float
    error_without_first: float


def most_fragile(errors: OutputErrors, count: int) -> list[Fragile]:
    """The `count` experts with the largest sum, largest first; of equals the shallower, then the lower number."""
    order = np.argsort(-errors.every, axis=None, kind="stable")[:count]
    places, experts = np.unravel_index(order, errors.every.shape)
    return [
        Fragile(place, expert, float(errors.every[place, expert]), float(errors.without_first[place, expert]))
        for place, expert in zip(places.tolist(), experts.tolist(), strict=True)
    ]


def by_place(fragile: Iterable[Fragile]) -> dict[int, tuple[int, ...]]:
    """Place -> experts in order."""
    found: dict[int, list[int]] = {}
    for own in fragile:
        found.setdefault(own.place, []).append(own.expert)
    return {place: tuple(sorted(experts)) for place, experts in sorted(found.items())}


def output_errors(
    reference: Path,
    layers: Sequence[StoredLayer],
    settings: Settings,
    walk: CalibratedWalk,
    spread: Spread,
    folder: Path,
) -> OutputErrors:
    """Quantize every expert as an instance would, and sum the errors of its output.

    A method that needs Hessians gets those of the reference's own inputs. What is done is kept in `folder` layer by
    layer, for a run that carries on. Raises as `write_calibrated_shards` does.
    """
    label = f"W{settings.grid.num_bits} {settings.method}, fragile experts"
    limit, blocks, fallbacks = walk.max_fallback_share, sum(layer.experts for layer in layers), 0
    rows = []
    for place, (layer, step) in enumerate(
        zip(
            layers, walk_layers(reference, walk.sequences, walk.batch_tokens, "reference", label), strict=True
        )
    ):
        done = folder / f"fragile-{place + 1:05d}.json"
        if not done.is_file():
            batches, hessians = list(step.routed()), None
            if settings.method in NEEDS_HESSIANS:
                sums = sums_of(step.layer, batches).hessians()
                fallbacks += int((sums["hidden"].tokens == 0).sum())
                check_fallbacks(fallbacks, blocks, limit)
                hessians = folder / "hessians.safetensors"
                write_hessians(hessians, sums)
                del sums
            write_json(
                done, _layer_errors(reference, layer, step, settings, batches, spread, hessians), digits=17
            )
            if hessians is not None:
                hessians.unlink()
        rows.append(read_json(done))
    return OutputErrors(*(np.array([row[key] for row in rows]) for key in ("every", "without_first")))


def _layer_errors(
    reference: Path,
    layer: StoredLayer,
    step: LayerStep,
    settings: Settings,
    batches: Sequence[Routed],
    spread: Spread,
    hessians: Path | None,
) -> dict[str, list[float]]:
    """The row [E] of each of OutputErrors' sums."""
    pieces = list(units(reference, layer, settings, hessians))
    sums: list[tuple[float, float]] = []
    for unit, packed in zip(pieces, spread(quantize_unit, pieces), strict=True):
        source, own = _Tensors(load(packed.tensors)), unit.experts
        quantized = {}
        for matrix in layer.matrices:
            keys = matrix.keys[own]
            quantized[matrix.name] = torch.empty(len(keys), *matrix.shape[1:])
            read_experts_into(quantized[matrix.name], source, keys, settings.grid.num_bits)
        sums += expert_errors(step.layer.experts, own.start, quantized, batches)
    return {"every": [error for error, _ in sums], "without_first": [error for _, error in sums]}


def expert_errors(
    experts: Experts, first: int, quantized: Mapping[str, torch.Tensor], batches: Sequence[Routed]
) -> list[tuple[float, float]]:
    """Of the experts from number `first` on, whose quantized matrices are name -> [e, out, in]: the sum over tokens of
    routing weight x norm of the output's error, and the same without position 0."""
    views = experts.matrices()

    @torch.inference_mode()
    def sums(own: int) -> tuple[float, float]:
        expert = first + own
        hits = [(batch.index == expert).nonzero(as_tuple=True) for batch in batches]  # token, pick
        pairs = list(zip(batches, hits, strict=True))
        hidden = torch.cat([batch.hidden[token] for batch, (token, _) in pairs])
        if not len(hidden):
            return 0.0, 0.0
        weight = torch.cat([batch.weight[hit] for batch, hit in pairs]).double()
        later = ~torch.cat([batch.first[token] for batch, (token, _) in pairs])
        exact = experts.output(expert, experts.inner(expert, hidden))
        before = {name: view[expert].clone() for name, view in views.items()}
        for name, view in views.items():
            view[expert].copy_(quantized[name][own])
        error = experts.output(expert, experts.inner(expert, hidden)).double() - exact.double()
        for name, view in views.items():
            view[expert].copy_(before[name])
        moved = weight * error.norm(dim=1)
        return float(moved.sum()), float(moved[later].sum())

    return side_by_side(sums, range(len(next(iter(quantized.values())))))


class _Tensors:
    """Packed tensors in memory, read as from a file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]
