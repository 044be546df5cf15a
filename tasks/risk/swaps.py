"""The loss N(X, routes) of requests on a real model, for `tasks/risk/decomposition.py`, and their affinity.

A run is one forward pass over the requests; `forward_tokens` counts what was paid. Losses of the reference's
own routes come first and record them. The vocabulary's logits are made of scored predictions only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.frozen import Routes, SwappableModel
from tasks.moe.prefill import HEAD_CHUNK_VALUES, PrefillBatch, plan_batches, prefill
from tasks.moe.registry import family_of
from tasks.risk.damage import DAMAGES
from tasks.risk.decomposition import Loss
from tasks.risk.scoring import Requests, divergence

Level = Literal["expert", "layer"]


class SwapLosses:
    """Losses of `requests` under swaps between a reference and an instance, both loaded in the dtype that the
    terms are wanted in (float64 where differences of losses near rounding matter).

    `part`: which predictions are scored; "prompt" leaves the responses out of the passes. `spare_first`:
    position 0 keeps the reference's experts under every swap, and is no part of the affinity.
    Raises InputError as `SwappableModel` does.
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
    ) -> None:
        self._models = SwappableModel(reference, instance)
        self._batch_tokens, self._spare_first, self.level = batch_tokens, spare_first, level
        prompt = requests.prompt_length.tolist()
        self.sequences = requests.sequences
        if part == "prompt":
            self.sequences = [own[:end] for own, end in zip(requests.sequences, prompt, strict=True)]
        # Scored predictions of each request; prediction 0 never is, and j is made from the tokens 0..j.
        self._scored = [
            slice(1 if part == "prompt" else max(end - 1, 1), len(own) - 1)
            for own, end in zip(self.sequences, prompt, strict=True)
        ]
        self.forward_tokens = 0
        self._hidden: dict[int, torch.Tensor] = {}  # request -> the reference's [n, H] at scored predictions
        self._cache: dict[tuple[frozenset[int], str], dict[str, np.ndarray]] = {}
        layers, experts = self._models.size
        self.blocks: list[tuple[int, slice]] = (
            [(layer, slice(expert, expert + 1)) for layer in range(layers) for expert in range(experts)]
            if level == "expert"
            else [(layer, slice(None)) for layer in range(layers)]
        )
        self._routes: Routes | None = None
        with torch.inference_mode():
            self._cache[frozenset(), "free"], self._routes = self._run(frozenset(), None)

    def loss(self, damage: str) -> Loss:
        """N [R] as damage is measured: "dnll" the mean loss, "kl" the mean divergence from the reference."""
        if damage not in DAMAGES:
            raise ValueError(f"damage is '{damage}', expected one of {DAMAGES}")
        return lambda blocks, routes: self.losses(blocks, routes)[damage]

    def losses(self, blocks: frozenset[int], routes: Literal["frozen", "free"]) -> dict[str, np.ndarray]:
        """Both damages [R] with `blocks` swapped, one pass for the two, run once each."""
        key = (blocks, routes)
        if key not in self._cache:
            with torch.inference_mode():
                self._cache[key], _ = self._run(blocks, self._routes if routes == "frozen" else None)
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

    def _run(self, blocks: frozenset[int], routes: Routes | None) -> tuple[dict[str, np.ndarray], Routes]:
        chosen = np.zeros(self._models.size, dtype=bool)
        for block in blocks:
            layer, own = self.blocks[block]
            chosen[layer, own] = True
        model, found = self._models.reference, np.full((2, len(self.sequences)), np.nan)
        with self._models.swapped(chosen, routes, self._spare_first) as taken:
            for batch in prefill(model, self.sequences, self._batch_tokens, "swap", progress=False):
                self.forward_tokens += int(batch.mask.sum())
                for at, row in enumerate(batch.rows):
                    found[:, row] = self._means(batch, at, row)
        if not np.isfinite(found).all():
            raise InputError(
                f"the loss of request {int(np.flatnonzero(~np.isfinite(found).all(axis=0))[0])} with {len(blocks)} "
                "blocks swapped is not a finite number; the checkpoint or its quantization is broken"
            )
        return dict(zip(DAMAGES, found, strict=True)), taken

    def _means(self, batch: PrefillBatch, at: int, row: int) -> tuple[float, float]:
        """Mean loss and mean divergence of a request's scored predictions, in the order of DAMAGES."""
        scored = self._scored[row]
        hidden = batch.hidden[at, scored]
        targets = batch.ids[at, scored.start + 1 : scored.stop + 1].to(hidden.device)
        reference = self._hidden.get(row)
        if reference is None:  # the first run is the reference's
            self._hidden[row] = hidden.clone()
        model = self._models.reference
        head, chunk = family_of(model.config).head, max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
        nll = kl = 0.0
        for start in range(0, len(targets), chunk):
            own = slice(start, start + chunk)
            log_model = head(model, hidden[own]).double().log_softmax(dim=-1)
            nll -= float(log_model.gather(1, targets[own, None]).sum())
            if reference is not None:
                log_reference = head(model, reference[own]).double().log_softmax(dim=-1)
                kl += float(divergence(log_reference, log_model).sum())
        return nll / len(targets), kl / len(targets)
