"""Responses sampled from the reference itself: as long as wanted, for prompts that come without a long one.

Tokens are drawn from the reference's whole distribution (temperature 1, nothing cut off), so that a response's expected
damage in ΔNLL is its KL. End-of-text tokens are not drawn: every response has the wanted length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.sources.tokens import TokenRow, Tokens

SEQUENCES = 16  # decoded side by side


def with_room(rows: Sequence[TokenRow], length: int) -> list[TokenRow]:
    """The rows with responses of `length` tokens yet to be drawn, for choosing rows by their size."""
    return [replace(row, response="", response_ids=[0] * length) for row in rows]


def sampled_rows(
    rows: Sequence[TokenRow], reference: Path, tokens: Tokens, length: int, seed: int
) -> list[TokenRow]:
    """The rows with a response of `length` tokens that the reference drew after each prompt, seeded.

    Raises InputError for an encoder-decoder, whose rows are split otherwise, and for a prompt that leaves no room for
    the response in the model's context.
    """
    model: Any = load_model(reference)
    if model.config.is_encoder_decoder:
        raise InputError(
            "prepare_requests.responses is 'sampled', but the reference is an encoder-decoder: use 'given'"
        )
    context = getattr(model.config, "max_position_embeddings", None)
    longest = max(rows, key=lambda row: len(row.prompt_ids))
    if context is not None and len(longest.prompt_ids) + length > context:
        raise InputError(
            f"request '{longest.id}' has {len(longest.prompt_ids)} prompt tokens, with {length} of response more than "
            f"the model's context of {context}: lower prepare_requests.response_tokens or prompt_tokens"
        )
    found: list[TokenRow | None] = [None] * len(rows)
    # prompts of one length go together, and so need no padding
    order = sorted(range(len(rows)), key=lambda place: (len(rows[place].prompt_ids), place))
    batches: list[list[int]] = []
    for place in order:
        alike = batches and len(rows[batches[-1][0]].prompt_ids) == len(rows[place].prompt_ids)
        if alike and len(batches[-1]) < SEQUENCES:
            batches[-1].append(place)
        else:
            batches.append([place])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for batch in track(batches, "sampling responses", len(batches)):
            drawn = _draw(model, [rows[place].prompt_ids for place in batch], length)
            for place, ids in zip(batch, drawn, strict=True):
                found[place] = replace(rows[place], response=tokens.text(ids), response_ids=ids)
    return [row for row in found if row is not None]


def _draw(model: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """One response [length] after each prompt [P], all prompts of one length; from torch's seeded generator."""
    ids = torch.tensor(prompts)
    whole = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length, max_new_tokens=length,
        eos_token_id=model.generation_config.eos_token_id or model.config.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=whole)[
            :, ids.shape[1] :
        ].tolist()
