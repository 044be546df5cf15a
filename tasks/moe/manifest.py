"""What an instance's manifest counts: from its shards' sidecars (tasks/moe/shards.py), checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from tasks.moe.fragile import Fragile
from tasks.moe.registry import moe_layers


def expert_counts(model: PreTrainedModel, counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the shards; raises RuntimeError unless what was written is all that the modules hold."""
    layers = moe_layers(model)
    found = {
        key: sum(own[key] for own in counts)
        for key in ("matrices", "parameters", "stored_bytes", "ideal_bytes")
    }
    expected = (
        sum(layer.num_experts * len(layer.matrices()) for layer in layers),
        sum(parameter.numel() for layer in layers for parameter in layer.experts.parameters()),
    )
    if (found["matrices"], found["parameters"]) != expected:
        raise RuntimeError(f"quantized (matrices, parameters) {found}, expected {expected}")
    error, total = (sum(own[key] for own in counts) for key in ("error", "total"))
    # Protected experts count like all others, with the bytes that they take in the reference's type and no error.
    return {
        "layers": len(layers),
        "blocks": sum(layer.num_experts for layer in layers),
        "matrices": found["matrices"],
        "expert_parameters": found["parameters"],
        "expert_bytes": found["stored_bytes"],
        "ideal_expert_bytes": found["ideal_bytes"],
        "stored_bits": 8 * found["stored_bytes"] / found["parameters"],
        "relative_error": (error / total) ** 0.5 if total else 0.0,  # Frobenius, over all experts
    }


def protected_counts(
    fragile: Sequence[Fragile], model: PreTrainedModel, counts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The experts that stay as the reference stores them, most fragile first; raises RuntimeError unless the shards
    hold exactly these."""
    layers = moe_layers(model)
    held = [(place, expert) for place, own in enumerate(counts) for expert in own.get("protected", ())]
    if held != sorted((own.place, own.expert) for own in fragile):
        raise RuntimeError(f"protected (place, expert) {held}, expected {fragile}")
    rows = []
    for own in fragile:
        layer, shard = layers[own.place], counts[own.place]
        rows.append({
            "layer": layer.layer,
            "expert": own.expert,
            "matrices": [layer.key(own.expert, matrix) for matrix in layer.matrices()],
            "output_error": own.error,
            "output_error_without_first": own.error_without_first,
            "size_bytes": shard["protected_bytes"] // len(shard["protected"]),
        })  # fmt: skip
    return {
        "protect": len(rows),
        "protected": rows,
        "protected_matrices": sum(len(row["matrices"]) for row in rows),
        "protected_bytes": sum(row["size_bytes"] for row in rows),
    }


def calibration_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What gptq saw of each expert [L][E], and how often it fell back."""
    tokens = [own["tokens"] for own in counts]
    fallbacks = sum(own.count(0) for own in tokens)
    return {
        "expert_tokens": tokens,
        "fallbacks": fallbacks,  # experts without a token, which use their layer's pooled Hessian
        "fallback_share": fallbacks / sum(map(len, tokens)),
        "extra_damped_matrices": sum(own["damped"] for own in counts),
    }


def seen_by_optimum(model: PreTrainedModel) -> int:
    """Routed expert matrices that optimum's GPTQ quantizer finds. It looks for Linear modules, so it passes
    over experts fused into one parameter without a word."""
    from optimum.gptq.utils import get_layers  # seconds to import, and only needed here

    prefixes = tuple(f"{layer.name}.{layer.family.experts}." for layer in moe_layers(model))
    return sum(name.startswith(prefixes) for name in get_layers(model))
