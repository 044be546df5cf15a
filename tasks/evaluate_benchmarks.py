"""Benchmarks of one model -> accuracy, loss on held-out text and LIS while they ran, paired with the
reference.

In: the reference, an instance or a variant; the questions and held-out text of artifacts/requests, or the
files of `data_dir`; the reference's results, to pair with. All benchmarks are zero-shot.
Out: artifacts/benchmarks/<name> (one row a question) and metrics/benchmarks/<name>.json. Costs one forward
pass of every question and text: `forward_tokens` in the metrics.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tasks.console import run_step, timed
from tasks.contracts import InputError, project_root, replacing_folder, write_json
from tasks.evaluation.definitions import Benchmark, read_benchmarks
from tasks.evaluation.paired import accuracy, compare_accuracy, compare_mean
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.moe.replicas import physical_load
from tasks.moe.tensors import read_config
from tasks.params import EvaluateBenchmarks, Params, load_params
from tasks.replication.load import lis

VERSION = 1


def run(
    name: str, model_folder: Path, reference: Path, requests: Path, results: Path, params: EvaluateBenchmarks
) -> dict[str, Any]:
    """Evaluate model `name` and write `results`/<name>; returns the metrics.

    Any model but "reference" is paired with what stands in `results`/reference. Raises InputError before the
    model is loaded for an unknown benchmark, a missing file, and results of the reference on other rows.
    """
    data = None if params.data_dir is None else project_root() / params.data_dir
    folders = {"requests": requests, "data": data}
    benchmarks = read_benchmarks(params.tasks, folders, params.limit, params.seed)
    check_kinds(benchmarks, reference)
    partners = {} if name == "reference" else {item.name: _partner(item, results) for item in benchmarks}
    from tasks.evaluation.harness import run_benchmarks  # lm-eval takes seconds: only once the input is good

    with timed(f"loading {name}"):
        model = load_model(model_folder, reference=reference)
        tokenizer = load_tokenizer(reference)
    found = run_benchmarks(model, tokenizer, benchmarks, params.batch_size)
    with replacing_folder(results / name) as new:
        for task, table in found.tables.items():
            table.to_parquet(new / f"{task}.parquet", index=False)
    experts = found.load.shape[1]
    replicated = (model_folder / "plan.json").is_file()
    load = np.stack(physical_load(model)) if replicated else found.load
    if load.sum() != found.load.sum():
        raise RuntimeError(f"copies computed {load.sum()} tokens, but the routers sent {found.load.sum()}")
    scores = lis(load, experts)
    return {
        "name": name,
        "tasks": {task: summary(table, partners.get(task)) for task, table in found.tables.items()},
        "lis": scores,
        "lis_mean": float(scores.mean()),
        **({"lis_physical": lis(load)} if replicated else {}),
        "forward_tokens": found.forward_tokens,
        "version": VERSION,
    }


def check_kinds(benchmarks: list[Benchmark], reference: Path) -> None:
    """Raise InputError for a benchmark that the reference's architecture cannot run here."""
    generated = [item.name for item in benchmarks if item.kind == "generate_until"]
    if generated and read_config(reference).is_encoder_decoder:
        raise InputError(
            f"benchmark '{generated[0]}' generates text, which is not evaluated for an encoder-decoder "
            "(its expert load could not be counted): leave it out of evaluate_benchmarks.tasks; choices and "
            "held-out text run"
        )


def summary(table: pd.DataFrame, partner: pd.DataFrame | None) -> dict[str, float]:
    """The metrics of one benchmark; with `partner`, the reference's table on the same rows, also the
    differences.
    """
    if "nll" in table:
        losses, tokens = table["nll"].to_numpy(), table["tokens"].to_numpy()
        values = {"nll": float(losses.sum() / tokens.sum()), "tokens": int(tokens.sum()), "texts": len(table)}
        if partner is not None:
            values |= compare_mean(losses, partner["nll"].to_numpy(), tokens)
        return values
    correct = table["correct"].to_numpy()
    values = accuracy(correct)
    if partner is not None:
        values |= compare_accuracy(correct, partner["correct"].to_numpy())
    if "log_prob_right" in table:
        right = table["log_prob_right"].to_numpy()
        values["log_prob_right"] = float(right.mean())
        if partner is not None:
            paired = compare_mean(right, partner["log_prob_right"].to_numpy(), np.ones(len(right)))
            values |= {f"log_prob_right_{key}": value for key, value in paired.items()}
    if "correct_norm" in table:
        values["accuracy_norm"] = float(table["correct_norm"].to_numpy().mean())
    return values


def _partner(benchmark: Benchmark, results: Path) -> pd.DataFrame:
    """The reference's results on the same rows."""
    path = results / "reference" / f"{benchmark.name}.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing: run `python -m tasks.evaluate_benchmarks reference` first")
    table = pd.read_parquet(path)
    if table["row"].tolist() != [row["row"] for row in benchmark.rows]:
        raise InputError(
            f"{path} holds other rows: run `python -m tasks.evaluate_benchmarks reference` again"
        )
    return table


def folder_of(name: str, params: Params) -> Path:
    """Where a model of the run is. Raises InputError for a name that is not in the run."""
    if name == "reference":
        return Path("artifacts/reference")
    if name in params.quantize_instances.names:
        return Path("artifacts/instances") / name
    if name in params.build_variants.variants:
        return Path("artifacts/variants") / name
    near = difflib.get_close_matches(name, params.model_names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise InputError(f"no model '{name}' in this run{hint} There are {', '.join(params.model_names)}")


def main(name: str) -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    reference, requests, results = (
        Path("artifacts") / part for part in ("reference", "requests", "benchmarks")
    )
    metrics = run(name, folder_of(name, params), reference, requests, results, params.evaluate_benchmarks)
    write_json(f"metrics/benchmarks/{name}.json", metrics)


if __name__ == "__main__":
    run_step(main)
