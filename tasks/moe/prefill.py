"""Prefill of many sequences in length-sorted, right-padded batches, and the lm_head in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe.record import LayerRouting, record_routing
from tasks.moe.tokens import real_tokens

HEAD_CHUNK_VALUES = 2**24  # logits held at once by `next_token_nll`: 64 MiB in float32


@dataclass(frozen=True)
class PrefillBatch:
    """One forward pass. Padding is at the end of a row, where `mask` is False."""

    rows: list[int]  # [B] indices into the given sequences
    ids: torch.Tensor  # [B, S] int64
    mask: torch.Tensor  # [B, S] bool, True at real tokens
    hidden: torch.Tensor  # [B, S, H] after the final norm, before the lm_head
    routing: list[LayerRouting] | None  # per MoE layer, arrays [B, S, k]


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
) -> Iterator[PrefillBatch]:
    """Run every sequence of token ids once and yield the batches; with `record`, with their token routing.

    Attention is causal and padding stands after a row's tokens, so no real token sees it and no mask is
    passed. Raises InputError on an empty sequence.
    """
    lengths = [len(sequence) for sequence in sequences]
    if 0 in lengths:
        raise InputError(f"{label}: sequence {lengths.index(0)} is empty, expected at least one token id")
    batches = plan_batches(lengths, batch_tokens)
    with record_routing(model) if record else nullcontext() as recorder, torch.inference_mode():
        for rows in track(batches, label, len(batches)):
            width = lengths[rows[0]]
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros(len(rows), width, dtype=torch.bool)
            for place, row in enumerate(rows):
                ids[place, : lengths[row]] = torch.as_tensor(sequences[row], dtype=torch.int64)
                mask[place, : lengths[row]] = True
            with real_tokens(mask):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            routing = None
            if recorder is not None:
                routing = [layer.reshaped(*ids.shape) for layer in recorder.pop()]
            yield PrefillBatch(rows, ids, mask, hidden, routing)


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The lm_head on `hidden` [T, H]: logits [T, V] float32."""
    head: Any = model.get_output_embeddings()
    with torch.inference_mode():
        return head(hidden).float()


def next_token_nll(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss in nats of `targets` [T], token ids predicted from `hidden` [T, H]: [T] float32, in chunks of
    tokens."""
    chunk = max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
    losses = [
        functional.cross_entropy(head_logits(model, part), ids, reduction="none")
        for part, ids in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses) if losses else torch.zeros(0)
