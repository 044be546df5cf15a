"""All shards of an instance: every layer on its own, or layer after layer behind the calibration tokens.

Who computes the units is the caller's: `spread(work, items)` gives results in the order of the items.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from tasks.console import track
from tasks.contracts import ResumableError
from tasks.moe.instance import read_experts_into
from tasks.moe.layerwise import walk_layers
from tasks.moe.shards import Packed, Settings, Shards, Unit, quantize_unit, write_hessians

Spread = Callable[[Callable[[Unit], Packed], Iterable[Unit]], Iterator[Packed]]


@dataclass(frozen=True)
class CalibratedWalk:
    """What sees the calibration tokens: a method that needs Hessians, and the search for fragile experts."""

    sequences: Sequence[Sequence[int]]  # token ids
    batch_tokens: int  # of one forward pass, padding included
    inputs: Literal["reference", "quantized"]  # the layers before a layer while its inputs are collected
    max_fallback_share: float  # of experts without a token


def write_shards(shards: Shards, reference: Path, settings: Settings, spread: Spread) -> None:
    """Write the shards that are not finished, as one stream of units over all layers.

    Raises InputError for weights that are not finite, and as `quantize` does.
    """
    missing = [place for place in range(len(shards.layers)) if not shards.finished(place)]
    pieces = [list(shards.units(reference, place, settings)) for place in missing]
    packed = spread(quantize_unit, chain.from_iterable(pieces))
    places = track(missing, f"W{settings.grid.num_bits} {settings.method}", len(missing))
    for place, own in zip(places, pieces, strict=True):
        shards.write(place, islice(packed, len(own)))


def write_calibrated_shards(
    shards: Shards, reference: Path, settings: Settings, spread: Spread, walk: CalibratedWalk
) -> None:
    """Write the shards that are not finished, one layer's Hessians at a time.

    Raises ResumableError before a layer is quantized when more experts than allowed have no token, and InputError as
    `write_shards` and `walk_layers` do.
    """
    places = range(len(shards.layers))
    blocks = sum(layer.experts for layer in shards.layers)
    fallbacks = sum(shards.counts(place)["tokens"].count(0) for place in places if shards.finished(place))
    check_fallbacks(fallbacks, blocks, walk.max_fallback_share)
    if all(map(shards.finished, places)):
        return
    label = f"W{settings.grid.num_bits} {settings.method}"
    steps = walk_layers(reference, walk.sequences, walk.batch_tokens, walk.inputs, label)
    for place, layer, step in zip(places, shards.layers, steps, strict=True):
        if step.layer.layer != layer.layer:
            raise RuntimeError(f"the walk is at layer {step.layer.layer}, expected {layer.layer}")
        if not shards.finished(place):
            hessians = step.hessians()
            tokens = hessians["hidden"].tokens
            fallbacks += int((tokens == 0).sum())
            check_fallbacks(fallbacks, blocks, walk.max_fallback_share)
            path = shards.folder / "hessians.safetensors"
            write_hessians(path, hessians)
            del hessians
            step.leave()  # the units read the file
            shards.write(place, spread(quantize_unit, shards.units(reference, place, settings, path)), tokens)
            path.unlink()
        if walk.inputs == "quantized":
            with safe_open(shards.path(place), "pt") as source:
                for matrix in layer.matrices:
                    weights, kept = torch.empty(matrix.shape), shards.protected(place)
                    read_experts_into(weights, source, matrix.keys, settings.grid.num_bits, kept)
                    step.replace({matrix.name: weights})


def check_fallbacks(fallbacks: int, blocks: int, limit: float) -> None:
    """Raise ResumableError when more than `limit` of the `blocks` experts get no token."""
    if fallbacks > limit * blocks:
        raise ResumableError(
            f"at least {fallbacks} of the model's {blocks} experts get no calibration token and would share their "
            f"layer's Hessian: more than quantize_instances.gptq.max_fallback_share {limit} allows; raise "
            "prepare_requests.calibration_tokens, or the limit"
        )


def digest_of(reference: Path, settings: Settings, walk: CalibratedWalk | None, protect: int = 0) -> str:
    """sha256 over everything that a shard's bytes depend on: settings, tokens, code and, by size and time, the
    reference."""
    here = Path(__file__).parent
    sources = sorted([*here.rglob("*.py"), *(here.parent / "quant").rglob("*.py")])
    stats = [(path, path.stat()) for path in sorted(reference.glob("*.safetensors"))]
    everything = {
        "settings": asdict(settings),
        "protect": protect,
        "walk": None if walk is None else [walk.sequences, walk.batch_tokens, walk.inputs],
        "reference": [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        "config": (reference / "config.json").read_text(encoding="utf-8"),
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources],
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()
