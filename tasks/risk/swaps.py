"""The loss N(X, routes) of requests on a real model, for `tasks/risk/decomposition.py`, and their affinity.

A run is one forward pass over the requests. The reference's own comes first: it records the routes and keeps
what enters every MoE layer, so that a swap's run computes from its lowest swapped layer upwards only, to the
bit what the whole pass would give; a pair's run begins where it leaves that of its lower block.
`forward_tokens` counts what was paid, in tokens through the whole model. Memory: 2 L T H values for T tokens.
The vocabulary's logits are made of scored predictions only.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.frozen import Inputs, Routes, SwappableModel
from tasks.moe.prefill import HEAD_CHUNK_VALUES, PrefillBatch, plan_batches, prefill
from tasks.moe.registry import family_of
from tasks.risk.damage import DAMAGES
from tasks.risk.decomposition import Loss
from tasks.risk.scoring import Requests

Level = Literal["expert", "layer"]

# Probabilities of the reference that are kept between runs, in float64; beyond, they are made anew in each.
KEPT_VALUES = 2**25


class SwapLosses:
    """Losses of `requests` under swaps between a reference and an instance, both loaded in the dtype that the
    terms are wanted in (float64 where differences of losses near rounding matter).

    `part`: which predictions are scored; "prompt" leaves the responses out of the passes. `spare_first`:
    position 0 keeps the reference's experts under every swap, and is no part of the affinity. `skip` False:
    every run computes all layers. Raises InputError as `SwappableModel` does, and on a loss that is no number.
    """

    def __init__(
        self,
        reference: PreTrainedModel,
        instance: PreTrainedModel,
        requests: Requests,
        batch_tokens: int,
        level: Level,
        part: Literal["response", "prompt"] = "response",
        spare_first: bool = False,
        skip: bool = True,
    ) -> None:
        self._models = SwappableModel(reference, instance)
        self._batch_tokens, self._spare_first, self._skip = batch_tokens, spare_first, skip
        self.level = level
        self._ids, prompt = requests.ids, requests.prompt_length.tolist()
        self.sequences = requests.sequences
        if part == "prompt":
            self.sequences = [own[:end] for own, end in zip(requests.sequences, prompt, strict=True)]
        # Scored predictions of each request; prediction 0 never is, and j is made from the tokens 0..j.
        self._scored = [
            slice(1 if part == "prompt" else max(end - 1, 1), len(own) - 1)
            for own, end in zip(self.sequences, prompt, strict=True)
        ]
        self._hidden: dict[int, torch.Tensor] = {}  # request -> the reference's [n, H] at scored predictions
        self._known: dict[
            tuple[int, int], tuple[torch.Tensor, torch.Tensor]
        ] = {}  # (request, start of chunk)
        scored = sum(own.stop - own.start for own in self._scored)
        self._keep_known = scored * reference.config.vocab_size <= KEPT_VALUES
        self._cache: dict[tuple[frozenset[int], str], dict[str, np.ndarray]] = {}
        layers, experts = self._models.size
        self.blocks: list[tuple[int, slice]] = (
            [(layer, slice(expert, expert + 1)) for layer in range(layers) for expert in range(experts)]
            if level == "expert"
            else [(layer, slice(None)) for layer in range(layers)]
        )
        self._layer_tokens = 0
        self._routes: Routes | None = None
        self._kept: list[
            tuple[np.ndarray, Inputs]
        ] = []  # (swapped [L, E], inputs): reference's, last block's
        self._cache[frozenset(), "free"] = self._run(frozenset(), "free")

    def of(self, instance: PreTrainedModel, spare_first: bool = False) -> SwapLosses:
        """The losses of the same requests under swaps with another instance, or with position 0 spared; the
        reference's run is shared, and not counted again."""
        other = copy.copy(self)
        other._models = SwappableModel(self._models.reference, instance)
        other._spare_first, other._layer_tokens, other._kept = spare_first, 0, self._kept[:1]
        other._cache = {key: own for key, own in self._cache.items() if not key[0]}
        return other

    @property
    def forward_tokens(self) -> float:
        """Tokens through the whole model; a run that skips layers counts by the layers that it computes."""
        return self._layer_tokens / self._models.depth

    def run_tokens(self, block: int | None) -> float:
        """What a run with `block` swapped alone costs, None: the reference's own."""
        models = self._models
        work = models.depth if block is None else models.work(self.blocks[block][0])
        return sum(map(len, self.sequences)) * work / models.depth

    def loss(self, damage: str) -> Loss:
        """N [R] as damage is measured: "dnll" the mean loss, "kl" the mean divergence from the reference."""
        if damage not in DAMAGES:
            raise ValueError(f"damage is '{damage}', expected one of {DAMAGES}")
        return lambda blocks, routes: self.losses(blocks, routes)[damage]

    def losses(self, blocks: frozenset[int], routes: Literal["frozen", "free"]) -> dict[str, np.ndarray]:
        """Both damages [R] with `blocks` swapped, one pass for the two, run once each."""
        key = (blocks, routes)
        if key not in self._cache:
            self._cache[key] = self._run(blocks, routes)
        return self._cache[key]

    def affinity(self) -> np.ndarray:
        """A [B, R]: the mean over a request's tokens, those that its loss depends on, of the reference's
        routing weight on each block. Its last token predicts nothing and does not count."""
        assert self._routes is not None
        layers, experts = self._models.size
        weights = np.zeros((layers, experts, len(self.sequences)))
        lengths = [len(sequence) for sequence in self.sequences]
        for call, rows in enumerate(plan_batches(lengths, self._batch_tokens)):
            for place in range(layers):
                index, weight = self._routes[place][call]
                spread = torch.zeros(len(index), experts + 1, dtype=torch.float64)  # the last is no expert
                spread.scatter_add_(1, index.cpu(), weight.double().cpu())
                by_row = spread[:, :experts].view(len(rows), -1, experts)
                for at, row in enumerate(rows):
                    used = slice(1 if self._spare_first else 0, lengths[row] - 1)
                    weights[place, :, row] = by_row[at, used].sum(dim=0).numpy() / (lengths[row] - 1)
        return np.stack([weights[layer, own].sum(axis=0) for layer, own in self.blocks])

    @torch.inference_mode()
    def _run(self, blocks: frozenset[int], routes: Literal["frozen", "free"]) -> dict[str, np.ndarray]:
        chosen = np.zeros(self._models.size, dtype=bool)
        for block in blocks:
            layer, own = self.blocks[block]
            chosen[layer, own] = True
        model, found = self._models.reference, np.full((2, len(self.sequences)), np.nan)
        given = self._routes if routes == "frozen" else None
        resume = self._nearest(chosen, routes)
        with ExitStack() as stack:
            taken = stack.enter_context(self._models.swapped(chosen, given, self._spare_first))
            kept = stack.enter_context(self._models.keeping(self._to_keep(blocks, routes)))
            if resume is not None:
                stack.enter_context(self._models.resuming(*resume))
            computed = self._models.depth if resume is None else self._models.work(resume[0])
            for batch in prefill(model, self.sequences, self._batch_tokens, "swap", progress=False):
                self._layer_tokens += int(batch.mask.sum()) * computed
                for at, row in enumerate(batch.rows):
                    found[:, row] = self._means(batch, at, row)
        if not np.isfinite(found).all():
            broken = int(np.flatnonzero(~np.isfinite(found).all(axis=0))[0])
            raise InputError(
                f"the loss of request '{self._ids[broken]}' with {len(blocks)} of {len(self.blocks)} blocks "
                "swapped is not a finite number; the checkpoint or its quantization is broken"
            )
        if kept:
            self._kept = [*self._kept[:1], (chosen, kept)]
        if self._routes is None:
            self._routes = taken
        return dict(zip(DAMAGES, found, strict=True))

    def _to_keep(self, blocks: frozenset[int], routes: str) -> range:
        """MoE layers whose inputs later runs may begin from: of the reference all, of one block those above."""
        places = range(self._models.size[0])
        if not self._skip or len(blocks) > 1 or (blocks and routes == "free"):
            return places[:0]
        if blocks:
            return places[self.blocks[min(blocks)][0] + 1 :]
        return places if self._routes is None else places[:0]

    def _nearest(self, chosen: np.ndarray, routes: str) -> tuple[int, Inputs] | None:
        """Of the runs that were kept, the one that this run differs from last, and the MoE layer where it does.
        Free routes take other ways above a swap, so that only the reference's run leads to them."""
        best = None
        for other, inputs in self._kept if routes == "frozen" else self._kept[:1]:
            differing = np.flatnonzero((other != chosen).any(axis=1))
            if len(differing) and differing[0] in inputs and (best is None or differing[0] > best[0]):
                best = int(differing[0]), inputs
        return best

    def _means(self, batch: PrefillBatch, at: int, row: int) -> tuple[float, float]:
        """Mean loss and mean divergence of a request's scored predictions, in the order of DAMAGES.

        KL(p || q) = sum p (log p - log q), in float64, where its rounding is far below any damage: with
        logits z and their log-sum-exp s it is (p . z_p - s_p) - (p . z_q - s_q).
        """
        scored = self._scored[row]
        hidden = batch.hidden[at, scored]
        targets = batch.ids[at, scored.start + 1 : scored.stop + 1].to(hidden.device)
        is_reference = row not in self._hidden  # the first run is the reference's
        if is_reference:
            self._hidden[row] = hidden.clone()
        model = self._models.reference
        chunk = max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
        nll = kl = 0.0
        for start in range(0, len(targets), chunk):
            own = slice(start, start + chunk)
            logits = self._logits(hidden[own])
            normaliser = logits.logsumexp(dim=-1)
            nll += float((normaliser - logits.gather(1, targets[own, None])[:, 0]).sum())
            if not is_reference:
                probability, constant = self._reference(row, start, own)
                kl += float((constant - _dot(probability, logits) + normaliser).sum())
        return nll / len(targets), kl / len(targets)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self._models.reference
        return family_of(model.config).head(model, hidden).double()

    def _reference(self, row: int, start: int, own: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's p [n, V] at a chunk of predictions, and p . z_p - s_p [n]."""
        if (row, start) in self._known:
            return self._known[row, start]
        logits = self._logits(self._hidden[row][own])
        normaliser = logits.logsumexp(dim=-1)
        probability = (logits - normaliser[:, None]).exp_()
        found = probability, _dot(probability, logits) - normaliser
        if self._keep_known:
            self._known[row, start] = found
        return found


def _dot(probability: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vecdot(probability, logits)
