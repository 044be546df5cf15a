"""Sums over a token's picks, added up layer by layer while a prefill runs: what FWP and affinity need of the
routing, without keeping it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from tasks.contracts import InputError
from tasks.moe.halves import in_decoder
from tasks.moe.record import PickObserver
from tasks.moe.registry import MoELayer


@dataclass(frozen=True)
class PickValues:
    """What is summed over the layers that a token passes; every entry is one column of the sums.

    `gate_prob`: the mean over a layer's k picks of the router's score (`LayerRouting.gate_prob`).
    `chosen`: name -> [L, E]; the mean over a layer's k picks of the chosen expert's value.
    `weighted`: name -> [L, E]; the sum over a layer's picks of routing weight x the expert's value.
    A pick that reached no expert counts in the first two, for it is the router's choice; its weight is 0.
    """

    gate_prob: bool = False
    chosen: Mapping[str, np.ndarray] = field(default_factory=dict)
    weighted: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """[n] names of the sums, in their order."""
        return [*(["gate_prob"] if self.gate_prob else []), *self.chosen, *self.weighted]


class PickSums(PickObserver):
    """Running sums [B*S, n] float64 of the latest forward pass, until they are popped.

    One array a stack of layers: an encoder's tokens are not its decoder's. Raises InputError when a table is
    not of the model's layers and experts.
    """

    def __init__(self, layers: list[MoELayer], values: PickValues) -> None:
        self._layers, self._values = layers, values
        columns = values.columns
        if not columns or len(set(columns)) < len(columns):
            raise ValueError(f"the sums {columns} need names of their own, at least one")
        expected = (len(layers), layers[0].num_experts)
        for name, table in (*values.chosen.items(), *values.weighted.items()):
            if table.shape != expected:
                raise InputError(
                    f"{name} has values for {table.shape} (MoE layers, experts), the model has {expected}: they are "
                    "of different models"
                )
        self._chosen, self._weighted = (
            _tables(layers, list(tables.values())) for tables in (values.chosen, values.weighted)
        )
        self._running: dict[bool, torch.Tensor] = {}
        self._seen = 0

    def see(
        self,
        position: int,
        logits: torch.Tensor,
        index: torch.Tensor,
        weight: torch.Tensor,
        routed: torch.Tensor,
    ) -> None:
        layer, parts = self._layers[position], []
        if self._values.gate_prob:
            chosen = layer.gate_probabilities(logits).gather(-1, index)
            parts.append(chosen.mean(dim=-1, keepdim=True, dtype=torch.float64))
        if self._chosen:
            parts.append(functional.embedding_bag(index, self._chosen[position], mode="mean"))
        if self._weighted:
            own = {"mode": "sum", "per_sample_weights": weight.double()}
            parts.append(functional.embedding_bag(index, self._weighted[position], **own))
        added = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        stack = in_decoder(layer)
        self._running[stack] = self._running[stack].add_(added) if stack in self._running else added
        self._seen += 1

    def pop(self) -> dict[bool, torch.Tensor]:
        """The sums [B*S, n] of the latest forward pass by stack, True for an encoder-decoder's decoder; then
        forgotten."""
        if self._seen != len(self._layers):
            raise RuntimeError(f"{self._seen} of {len(self._layers)} MoE layers ran since the last pop")
        running, self._running, self._seen = self._running, {}, 0
        return running


def _tables(layers: list[MoELayer], tables: list[np.ndarray]) -> list[torch.Tensor]:
    """[L] tables [E, n] float64, each where its layer is."""
    if not tables:
        return []
    stacked = torch.from_numpy(np.stack(tables, axis=-1).astype(np.float64))  # [L, E, n]
    return [
        own.contiguous().to(layer.router_rows().device) for own, layer in zip(stacked, layers, strict=True)
    ]
