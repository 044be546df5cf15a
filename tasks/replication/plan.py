"""Which experts get a replica, and which are quantized to pay for it (R&Q, arXiv 2602.19938).

Per layer the r heaviest experts get a replica, stored quantized; their originals stay as they are. The least
important of the others are quantized, as few as bring the bytes back to what they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.contracts import ExpertStatistics, InputError, LayerPlan, ReplicationPlan
from tasks.params import Variant


@dataclass(frozen=True)
class ExpertBytes:
    """Stored bytes of one expert of a layer in each of its forms, every tensor counted."""

    original: int  # in the reference's own dtype
    replica: int  # packed at `replica_bits`, scales and zero points included
    quantized: int  # packed at `least_important_bits`

    def of_layer(self, experts: int, replicas: int, quantized: int) -> int:
        """A layer's expert bytes with `replicas` added and `quantized` originals replaced."""
        return (experts - quantized) * self.original + replicas * self.replica + quantized * self.quantized


def plan_variant(
    statistics: ExpertStatistics, sizes: list[ExpertBytes], variant: Variant, model_hash: str
) -> ReplicationPlan:
    """Plan every MoE layer of a variant, within the layer's bytes of before.

    Args:
        statistics: load and importance [L, E].
        sizes: [L] bytes of an expert in each form.
        variant: replicas, widths, group size, dispatch rule and its seed.
        model_hash: of the reference's configuration; a plan is refused by any other model.

    Raises:
        InputError: more replicas than experts, or nothing pays for the replicas; the layer is named.
    """
    layers = [
        plan_layer(int(layer), load, importance, size, variant)
        for layer, load, importance, size in zip(
            statistics.layers, statistics.load, statistics.importance, sizes, strict=True
        )
    ]
    return ReplicationPlan(model_hash, variant.group_size, variant.dispatch, variant.seed, layers)


def plan_layer(
    layer: int, load: np.ndarray, importance: np.ndarray, size: ExpertBytes, variant: Variant
) -> LayerPlan:
    """Plan one layer from load [E] and importance [E]; ties go to the lower expert index."""
    experts, replicas = len(load), variant.replicas
    if replicas > experts:
        raise InputError(
            f"layer {layer}: {replicas} replicas for {experts} experts: each gets at most one, "
            f"expected replicas <= {experts}"
        )
    heavy = np.argsort(-load, kind="stable")[:replicas].tolist()
    light = [expert for expert in np.argsort(importance, kind="stable").tolist() if expert not in heavy]
    quantized = _experts_to_quantize(layer, experts, replicas, size)
    bits = [0] * experts + [variant.replica_bits] * replicas
    for expert in light[:quantized]:
        bits[expert] = variant.least_important_bits
    return LayerPlan(layer, [*range(experts), *heavy], bits)


def _experts_to_quantize(layer: int, experts: int, replicas: int, size: ExpertBytes) -> int:
    """The fewest experts whose quantization saves what the replicas cost."""
    cost, saving = replicas * size.replica, size.original - size.quantized
    if cost == 0:
        return 0
    needed = -(-cost // saving) if saving > 0 else experts + 1
    if needed > experts - replicas:
        raise InputError(
            f"layer {layer}: nothing fits: {replicas} replicas cost {cost:,} bytes, and quantizing all "
            f"{experts - replicas} other experts saves {(experts - replicas) * saving:,}; "
            "lower replicas, replica_bits or least_important_bits, or take a larger group_size"
        )
    return needed
