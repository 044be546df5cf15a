"""lm-eval over a loaded model: its tasks, prompts and scores, our forward passes.

lm-eval pads without a mask, which would count padding as expert load and send it through replicas. The
language model below keeps its tokenization, windows and generation, and runs log-likelihoods through
`prefill`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import pandas as pd
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.evaluation.definitions import Benchmark
from tasks.moe.prefill import PrefillBatch, head_logits, prefill
from tasks.moe.record import LayerRouting, record_routing
from tasks.moe.registry import moe_layers


@dataclass(frozen=True)
class Results:
    """What a model did on the benchmarks.

    `tables` has one row a question or text, and columns by the benchmark's kind:
    multiple_choice: row, correct, log_prob_right (log of the right choice's probability among the choices),
    log_probs (of every choice, nats), and correct_norm where the definition asks for acc_norm;
    loglikelihood_rolling: row, nll (nats, summed over the text), tokens;
    generate_until: row, correct, answer.
    `load` [L, E]: tokens that the routers sent to each expert, padding not counted.
    `forward_tokens`: tokens run.
    """

    tables: dict[str, pd.DataFrame]
    load: np.ndarray
    forward_tokens: int


_HFLM: Any = HFLM  # its registration decorator hides the type


class MoELanguageModel(_HFLM):
    """lm-eval's model over a loaded Mixture of Experts; counts tokens and expert load."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, batch_size: int) -> None:
        self._in_halves = bool(model.config.is_encoder_decoder)
        backend = "seq2seq" if self._in_halves else "causal"
        # Generation runs row by row, so that no padding enters it.
        super().__init__(pretrained=model, tokenizer=tokenizer, backend=backend, batch_size=1)
        layers = moe_layers(model)
        self._rows = batch_size
        self._label = "benchmarks"
        self._top_k = layers[0].top_k
        self.load = np.zeros((len(layers), layers[0].num_experts), dtype=np.int64)
        self._picks = np.zeros(len(layers), dtype=np.int64)  # that reached an expert
        self.forward_tokens = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # `prefill` shows the progress

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        # All windows in one call; they are batched below.
        self._label, self.batch_size_per_gpu = "held-out text", 10**9
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)
        finally:
            self._label, self.batch_size_per_gpu = "benchmarks", 1

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of each continuation; requests that differ in the last token share a
        pass.

        The encoder of an encoder-decoder reads the context, its decoder the continuation.
        """
        unread = 0 if self._in_halves else 1  # tokens at the end that `prefill` need not get
        waiting: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for place, (_, context, continuation) in enumerate(requests):
            tokens = (*context, *continuation)[: len(context) + len(continuation) - unread]
            if len(tokens) > self.max_length:
                raise InputError(
                    f"a benchmark row has {len(tokens)} tokens, but the model reads at most "
                    f"{self.max_length}: leave it out of the file"
                )
            waiting.setdefault((tokens, len(context) if self._in_halves else 0), []).append(place)
        keys = list(waiting)
        sequences = [tokens for tokens, _ in keys]
        splits = [split for _, split in keys] if self._in_halves else None
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        budget = self._rows * max(map(len, sequences))
        for batch in prefill(self.model, sequences, budget, self._label, record=True, splits=splits):
            self._count_batch(batch)
            for line, row in enumerate(batch.rows):
                length = len(sequences[row]) - 1 + unread
                places = waiting[keys[row]]
                longest = max(len(requests[place][2]) for place in places)
                log_probs = head_logits(
                    self.model, batch.hidden[line, length - longest : length]
                ).log_softmax(-1)
                for place in places:
                    answers[place] = _score(log_probs, requests[place][2])
        return answers

    def _model_generate(self, context: torch.Tensor, **options: Any) -> torch.Tensor:
        if context.shape[0] != 1:
            raise RuntimeError(f"generation got {context.shape[0]} rows, expected one")

        def count(_module: Any, _inputs: Any, output: Any) -> None:
            routing = recorder.pop()
            mask = torch.ones(output.last_hidden_state.shape[1], dtype=torch.bool)
            self._count(mask, routing, [mask] * len(routing))

        with record_routing(self.model) as recorder, torch.inference_mode():
            handle = self.model.base_model.register_forward_hook(count)
            try:
                return super()._model_generate(context, **options)
            finally:
                handle.remove()

    def _count_batch(self, batch: PrefillBatch) -> None:
        assert batch.routing is not None
        self._count(batch.mask, batch.routing, batch.visited)

    def _count(
        self, mask: torch.Tensor, routing: Sequence[LayerRouting], visited: Sequence[torch.Tensor]
    ) -> None:
        """Add the load of the real tokens; mask and visited [B, S] or [S], routing indices [..., k]."""
        experts = self.load.shape[1]
        for layer, (chosen, passed) in enumerate(zip(routing, visited, strict=True)):
            picks = chosen.reached(experts).reshape(*mask.shape, -1)[passed].flatten()
            counts = torch.bincount(picks, minlength=experts + 1).numpy()  # the last: dropped
            self.load[layer] += counts[:-1]
            self._picks[layer] += int(passed.sum()) * self._top_k - counts[-1] * self._in_halves
        self.forward_tokens += int(mask.sum())

    def check_load(self) -> None:
        """Every real token takes top_k experts in every layer that it passes, and nothing else counts; only an
        encoder-decoder's experts drop any."""
        if (self.load.sum(axis=1) != self._picks).any():
            raise RuntimeError(
                f"expert load {self.load.sum(axis=1).tolist()}, expected {self._picks.tolist()}"
            )


def run_benchmarks(
    model: PreTrainedModel, tokenizer: Any, benchmarks: Sequence[Benchmark], batch_size: int
) -> Results:
    """Run every benchmark once; deterministic for the same model, rows and thread count."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    language_model = MoELanguageModel(model, tokenizer, batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = {item.name: _task(item, Path(scratch)) for item in benchmarks}
        everything: Any = {"tasks": tasks}
        with _without_bars():
            found: Any = evaluate(language_model, everything, bootstrap_iters=0, log_samples=True)
        samples = found["samples"]
        tables = {
            item.name: _table(item, tasks[item.name], samples[item.name], language_model)
            for item in benchmarks
        }
    language_model.check_load()
    return Results(tables, language_model.load, language_model.forward_tokens)


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval's bar over the building of requests, instant work, knows no switch."""
    module: Any = lm_eval.api.task
    bar = module.tqdm
    module.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar


def _task(benchmark: Benchmark, scratch: Path) -> ConfigurableTask:
    """lm-eval's task over the rows, written to `scratch` with the data set's cache, so that nothing
    outlives it.
    """
    path = scratch / f"{benchmark.name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in benchmark.rows), encoding="utf-8")
    files = {"data_files": {"test": str(path)}, "cache_dir": str(scratch / "cache")}
    return ConfigurableTask(config={**benchmark.config, "num_fewshot": 0, "dataset_kwargs": files})


def _table(
    benchmark: Benchmark, task: Any, samples: list[dict[str, Any]], model: MoELanguageModel
) -> pd.DataFrame:
    rows = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        row: dict[str, Any] = {"row": sample["doc"]["row"]}
        if benchmark.kind == "loglikelihood_rolling":
            text = task.doc_to_target(sample["doc"])
            row |= {"nll": -float(sample["filtered_resps"][0]), "tokens": len(model.tok_encode(text))}
        elif benchmark.kind == "multiple_choice":
            right = (
                task.doc_to_text(sample["doc"]) if task.multiple_input else task.doc_to_target(sample["doc"])
            )
            log_probs = np.array([answer[0] for answer in sample["filtered_resps"]])
            row |= {
                "correct": bool(sample["acc"]),
                "log_prob_right": float(log_probs[right] - np.logaddexp.reduce(log_probs)),
                "log_probs": log_probs.tolist(),
            }
            if "acc_norm" in sample:
                row["correct_norm"] = bool(sample["acc_norm"])
        else:
            row |= {"correct": bool(sample["exact_match"]), "answer": str(sample["filtered_resps"][0])}
        rows.append(row)
    return pd.DataFrame(rows)


def _score(log_probs: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a continuation from the last rows of log_probs [T, V], and whether it is the greedy
    one.
    """
    own = log_probs[-len(continuation) :]
    target = torch.tensor(continuation)
    likelihood = own.double().gather(-1, target[:, None]).sum()
    return float(likelihood), bool((own.argmax(-1) == target).all())
