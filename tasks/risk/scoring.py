"""Token losses of a model on requests, their exact divergence from the reference, the prompts' routing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError, PrefillRouting, TokenScores
from tasks.moe.prefill import HEAD_CHUNK_VALUES, PrefillBatch, head_logits, prefill
from tasks.moe.registry import moe_layers

# KL is at least 0; rounding of float32 logits may put it this far below.
KL_NOISE = 1e-6


@dataclass(frozen=True)
class Requests:
    """Token sequences prompt + response, and where the predictions and prompts of each lie in flat arrays."""

    frame: pd.DataFrame  # [R] id, class, split
    sequences: list[list[int]]  # [R] prompt_ids + response_ids
    prompt_length: np.ndarray  # [R] int64 tokens

    @property
    def ids(self) -> list[str]:
        return self.frame["id"].tolist()

    @property
    def offset(self) -> np.ndarray:
        """[R + 1] into the N predictions; a sequence of n tokens has n - 1."""
        return _offset(np.array([len(sequence) - 1 for sequence in self.sequences]))

    @property
    def splits(self) -> np.ndarray:
        """[R] tokens that an encoder reads: the first half of the prompt. The decoder gets the rest of it."""
        return self.prompt_length // 2

    @property
    def prompt_offset(self) -> np.ndarray:
        """[R + 1] into the T prompt tokens."""
        return _offset(self.prompt_length)


def read_requests(path: str | Path, vocabulary: int) -> Requests:
    """Read requests.parquet; raises InputError naming the first request that cannot be scored and why."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; run the stage prepare_requests first")
    frame = pd.read_parquet(path, columns=["id", "class", "split", "prompt_ids", "response_ids"])
    if frame.empty:
        raise InputError(f"{path}: holds no request; at least one is expected")
    if frame["id"].duplicated().any():
        raise InputError(
            f"{path}: id '{frame.loc[frame['id'].duplicated(), 'id'].iloc[0]}' stands there twice"
        )
    sequences, lengths = [], []
    columns = (frame[name].tolist() for name in ("id", "prompt_ids", "response_ids"))
    for name, prompt, response in zip(*columns, strict=True):
        prompt, response = list(prompt), list(response)
        if len(prompt) < 3:
            raise InputError(
                f"{path}: request '{name}' has a prompt of {len(prompt)} tokens; at least 3 are needed, "
                "since the prediction made from position 0 is never scored: give a longer prompt, or none"
            )
        if not response:
            raise InputError(
                f"{path}: request '{name}' has no response tokens; give a response or leave it out"
            )
        if not 0 <= min(prompt + response) <= max(prompt + response) < vocabulary:
            raise InputError(
                f"{path}: request '{name}' has token ids outside 0..{vocabulary - 1}, the model's "
                "vocabulary; run prepare_requests with this model's tokenizer"
            )
        sequences.append(prompt + response)
        lengths.append(len(prompt))
    return Requests(frame.loc[:, ["id", "class", "split"]], sequences, np.array(lengths, dtype=np.int64))


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    requests: Requests,
    name: str,
    batch_tokens: int,
    reference_hidden: torch.Tensor | None = None,
) -> tuple[TokenScores, PrefillRouting, torch.Tensor]:
    """One forward pass over all requests.

    `reference_hidden` [N, H] float32 are the reference's final hidden states; with them KL(reference ||
    model) is computed per prediction, without them TokenScores.kl is None. Also returns this model's own
    hidden states [N, H]. An encoder-decoder reads the first half of each prompt with its encoder; predictions
    that it therefore does not make are NaN, their hidden states 0. Raises InputError on a loss that is not a
    number.
    """
    layers = moe_layers(model)
    in_halves = bool(model.config.is_encoder_decoder)
    offset, prompt_offset = requests.offset, requests.prompt_offset
    nll, kl = (np.full(offset[-1], np.nan, dtype=np.float32) for _ in range(2))
    hidden = torch.zeros(int(offset[-1]), model.config.hidden_size)
    shape = (int(prompt_offset[-1]), len(layers), layers[0].top_k)
    index, weight, gate_prob = (
        np.empty(shape, np.uint16),
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
    )
    visited = np.ones(shape[:2], dtype=bool)
    label, splits = f"{name}: prefill", requests.splits.tolist()
    for batch in prefill(model, requests.sequences, batch_tokens, label, record=True, splits=splits):
        place, own, targets = _predictions(batch, offset)
        hidden[place] = own.float()
        other = None if reference_hidden is None else reference_hidden[place].to(own.dtype)
        nll[place], kl[place] = _losses(model, own, targets, other)
        if not np.isfinite(nll[place]).all():
            broken = np.searchsorted(offset, place[~np.isfinite(nll[place])][0], side="right") - 1
            raise InputError(
                f"{name}: the loss of request '{requests.ids[broken]}' is not a finite number; the "
                "checkpoint or its quantization is broken, or score_requests.compute_dtype is too narrow"
            )
        assert batch.routing is not None
        stacked = [
            torch.stack([getattr(layer, field) for layer in batch.routing], dim=2)
            .cpu()
            .numpy()  # [B, S, L, k]
            for field in ("index", "weight", "gate_prob")
        ]
        passed = torch.stack(batch.visited, dim=2).cpu().numpy()  # [B, S, L]
        for at, row in enumerate(batch.rows):
            length, to = requests.prompt_length[row], slice(prompt_offset[row], prompt_offset[row + 1])
            index[to], weight[to], gate_prob[to] = (array[at, :length] for array in stacked)
            visited[to] = passed[at, :length]
    norm = np.stack([layer.router_rows().float().norm(dim=1).cpu().numpy() for layer in layers])
    norm /= norm.mean(axis=1, keepdims=True)
    passes = visited if in_halves else None
    routing = PrefillRouting(prompt_offset, index, weight, gate_prob, norm, passes)
    known = None if reference_hidden is None else kl
    first = np.maximum(requests.splits - 1, 1) if in_halves else None
    return TokenScores(requests.ids, offset, requests.prompt_length, nll, known, first), routing, hidden


def _predictions(batch: PrefillBatch, offset: np.ndarray) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The batch's predictions [M]: place in the flat arrays, hidden state [M, H] and predicted token."""
    made = batch.predicted[:, 1:]  # a prediction is made where its target is predicted
    place = np.concatenate(
        [np.flatnonzero(own.numpy()) + offset[row] for row, own in zip(batch.rows, made, strict=True)]
    )
    return place, batch.hidden[:, :-1][made], batch.ids[:, 1:][made]


def _losses(
    model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """NLL [M] of the targets and KL(reference || model) [M] (zeros without `reference`), in chunks."""
    chunk = max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
    nll, kl = torch.empty(len(targets)), torch.zeros(len(targets))
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        log_model = head_logits(model, hidden[part]).log_softmax(dim=-1)
        nll[part] = -log_model.gather(1, targets[part, None])[:, 0]
        if reference is not None:
            kl[part] = divergence(head_logits(model, reference[part]).log_softmax(dim=-1), log_model)
    if reference is not None and float(kl.min()) < -KL_NOISE:
        raise RuntimeError(f"a KL of {float(kl.min())} nats is below 0 by more than rounding")
    return nll.numpy(), kl.clamp_(min=0).numpy()


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) [M] of log-probabilities [M, V], both overwritten.

    Summed as q - p + p (log p - log q): terms >= 0 whose sum is the KL, since p and q both sum to 1;
    the error that float32 leaves in a normaliser (1e-6 nats) cancels here to first order, in the plain sum
    it stays.
    """
    p = log_p.exp()
    log_p -= log_q
    log_p *= p
    log_p -= p
    log_p += log_q.exp_()
    return log_p.sum(dim=-1)


def _offset(count: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
