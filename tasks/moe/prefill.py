"""Prefill of many sequences in length-sorted, right-padded batches, and the lm_head in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe import halves
from tasks.moe.family import plain_head
from tasks.moe.record import LayerRouting, RoutingRecorder, observe_picks
from tasks.moe.registry import FAMILIES, MoELayer, moe_layers
from tasks.moe.strength import PickSums, PickValues
from tasks.moe.tokens import real_tokens

HEAD_CHUNK_VALUES = 2**24  # logits held at once by `next_token_nll`: 64 MiB in float32


@dataclass(frozen=True)
class PrefillBatch:
    """One forward pass. Padding is at the end of a row, where `mask` is False.

    An encoder-decoder's arrays are laid on the same places (`tasks/moe/halves.py`).
    """

    rows: list[int]  # [B] indices into the given sequences
    ids: torch.Tensor  # [B, S] int64
    mask: torch.Tensor  # [B, S] bool, True at real tokens
    predicted: torch.Tensor  # [B, S] bool, True at tokens that `hidden` one place before predicts
    hidden: torch.Tensor  # [B, S, H] after the final norm, before the lm_head
    routing: list[LayerRouting] | None  # per MoE layer, arrays [B, S, k]
    visited: list[
        torch.Tensor
    ]  # per MoE layer [B, S] bool, True where a real token passes it; with `routing` or `sums`
    sums: torch.Tensor | None  # [B, S, n] float64, columns of PickValues; 0 where no layer is passed

    def picks(self) -> tuple[np.ndarray, np.ndarray]:
        """[L] picks of each MoE layer that reached an expert, and [L] that were dropped."""
        assert self.routing is not None
        made = [own.routed[at] for own, at in zip(self.routing, self.visited, strict=True)]
        routed = np.array([int(own.sum()) for own in made], dtype=np.int64)
        return routed, np.array([own.numel() for own in made], dtype=np.int64) - routed


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Rows of each batch, longest first (so memory peaks at once), ties by index; padding counts as tokens.

    A sequence longer than `batch_tokens` makes a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def prefill(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    batch_tokens: int,
    label: str,
    record: bool = False,
    splits: Sequence[int] | None = None,
    progress: bool = True,
    values: PickValues | None = None,
) -> Iterator[PrefillBatch]:
    """Run every sequence of token ids once and yield the batches; with `record`, with their token routing;
    with `values`, with the sums of these over each token's picks alone, which needs no memory per layer.

    `splits`: for an encoder-decoder, the tokens of each sequence that the encoder reads, by default half.
    `progress` False: the caller shows its own.
    Other models read them all; their attention is causal and padding stands after a row's tokens, so no real
    token sees it and no mask is passed. Raises InputError on an empty sequence, or half.
    """
    lengths = [len(sequence) for sequence in sequences]
    if 0 in lengths:
        raise InputError(f"{label}: sequence {lengths.index(0)} is empty, expected at least one token id")
    in_halves = bool(model.config.is_encoder_decoder)
    own_splits = halves.check_splits(lengths, splits, label) if in_halves else []
    if record and values is not None:
        raise ValueError("routing is either recorded or summed")
    layers = moe_layers(model) if record or values is not None else []
    observer = RoutingRecorder(layers) if record else None if values is None else PickSums(layers, values)
    batches = plan_batches(lengths, batch_tokens)
    observing = nullcontext() if observer is None else observe_picks(layers, observer)
    with observing, torch.inference_mode():
        for rows in track(batches, label, len(batches)) if progress else batches:
            width = lengths[rows[0]]
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros(len(rows), width, dtype=torch.bool)
            for place, row in enumerate(rows):
                ids[place, : lengths[row]] = torch.as_tensor(sequences[row], dtype=torch.int64)
                mask[place, : lengths[row]] = True
            if in_halves:
                parts = [lengths[row] for row in rows], [own_splits[row] for row in rows]
                run = _run_halves(model, halves.cut(ids, *parts, halves.start_token(model)), layers, observer)
            else:
                run = _run_whole(model, ids, mask, layers, observer)
            yield PrefillBatch(rows, ids, mask, *run)


# predicted, hidden, routing, visited, sums of a PrefillBatch
_Run = tuple[torch.Tensor, torch.Tensor, list[LayerRouting] | None, list[torch.Tensor], torch.Tensor | None]
_Observer = RoutingRecorder | PickSums | None


def _run_whole(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, layers: list[MoELayer], observer: _Observer
) -> _Run:
    with real_tokens(mask):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    predicted = mask.clone()
    predicted[:, 0] = False
    routing, sums = None, None
    if isinstance(observer, RoutingRecorder):
        routing = [own.reshaped(*ids.shape) for own in observer.pop()]
    elif observer is not None:
        (running,) = observer.pop().values()
        sums = running.view(*ids.shape, -1) * mask[..., None]
    return predicted, hidden, routing, [mask] * len(layers), sums


def _run_halves(model: Any, batch: halves.Halves, layers: list[MoELayer], observer: _Observer) -> _Run:
    hidden = halves.run(model, batch)
    predicted = batch.at_decoder.roll(1, dims=1)  # a row's last place is never the decoder's
    routing, sums = None, None
    if isinstance(observer, RoutingRecorder):
        pairs = zip(observer.pop(), layers, strict=True)
        routing = [halves.placed_routing(own, layer, batch) for own, layer in pairs]
    elif observer is not None:
        sums = halves.placed_sums(observer.pop(), batch)
    return predicted, hidden, routing, [halves.visited(layer, batch) for layer in layers], sums


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] float32 from final hidden states `hidden` [T, H]: the lm_head, and what the family does
    after it. A dense model of another family, the source of upcycling, has nothing after it."""
    family = FAMILIES.get(model.config.model_type)
    head = plain_head if family is None else family.head
    with torch.inference_mode():
        return head(model, hidden).float()


def next_token_nll(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss in nats of `targets` [T], token ids predicted from `hidden` [T, H]: [T] float32, in chunks of
    tokens."""
    chunk = max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
    losses = [
        functional.cross_entropy(head_logits(model, part), ids, reduction="none")
        for part, ids in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses) if losses else torch.zeros(0)
