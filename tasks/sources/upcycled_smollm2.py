"""`smollm2-moe`: SmolLM2-135M-Instruct upcycled to a Mixture of Experts, checked against its dense
original."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.console import timed
from tasks.contracts import InputError
from tasks.moe.prefill import next_token_nll, prefill
from tasks.params import SmolLM2MoE
from tasks.sources import packaged, smollm2
from tasks.sources.upcycle import upcycle

SEQUENCE = 256  # tokens of a text that are used, bos included
BATCH_TOKENS = 2048


def build(folder: Path, params: SmolLM2MoE, downloads: Path) -> dict[str, float | list[float]]:
    """Write the upcycled checkpoint (bfloat16), tokenizer, LICENSE and NOTICE to `folder`.

    Returns its losses beside those of the dense model on text that the fit has not seen, and the fit per MoE
    layer. Raises InputError when the weights cannot be had, when the shape does not fit, or when there is too
    little text.
    """
    dense, tokenizer, license_text = smollm2.load_dense(downloads)
    texts = (text for _, text in packaged.texts("upcycling"))
    fitted = take_sequences(tokenizer, texts, params.upcycling_tokens)
    unseen = take_sequences(tokenizer, texts, params.check_tokens)  # the rows after those of the fit
    model, fits = upcycle(dense, equal_batches(fitted), params)
    with timed("checking the losses on unseen text"):
        nll_dense, nll_upcycled = (mean_nll(each, unseen) for each in (dense, model))
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text(license_text, encoding="utf-8")
    (folder / "NOTICE").write_text(smollm2.NOTICE, encoding="utf-8")
    return {
        "nll_dense": nll_dense,
        "nll_upcycled": nll_upcycled,
        "check_tokens": sum(map(len, unseen)),
        "upcycling_tokens": sum(map(len, fitted)),
        "upcycling_router_recall": [fit.router_recall for fit in fits],
        "upcycling_error_split": [fit.error_split for fit in fits],
        "upcycling_error": [fit.error for fit in fits],
        "upcycling_lis": [fit.lis for fit in fits],
    }


def take_sequences(tokenizer: PreTrainedTokenizerBase, texts: Iterator[str], budget: int) -> list[list[int]]:
    """Token ids of the next texts, each behind the bos token and cut to SEQUENCE, `budget` tokens in all.

    Raises InputError when the texts end before the budget does.
    """
    sequences: list[list[int]] = []
    left = budget
    while left >= 2:
        text = next(texts, None)
        if text is None:
            raise InputError(
                f"the upcycling text ends {left} tokens before the {budget} asked for: "
                "lower smollm2_moe.upcycling_tokens or check_tokens"
            )
        sequence = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]][: min(SEQUENCE, left)]
        sequences.append(sequence)
        left -= len(sequence)
    return sequences


def equal_batches(sequences: Iterable[list[int]]) -> list[torch.Tensor]:
    """The sequences as tensors [B, S] of equal lengths without padding, at most BATCH_TOKENS each."""
    by_length: dict[int, list[list[int]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    batches: list[torch.Tensor] = []
    for length, rows in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // length)
        batches += [torch.tensor(rows[start : start + size]) for start in range(0, len(rows), size)]
    return batches


def mean_nll(model: PreTrainedModel, sequences: list[list[int]]) -> float:
    """Mean next-token loss in nats, but for the predictions made from position 0 alone."""
    losses: list[torch.Tensor] = []
    for batch in prefill(model, sequences, BATCH_TOKENS, "losses"):
        scored = batch.mask[:, 1:].clone()
        scored[:, 0] = False
        losses.append(next_token_nll(model, batch.hidden[:, :-1][scored], batch.ids[:, 1:][scored]))
    return float(torch.cat(losses).double().mean())
