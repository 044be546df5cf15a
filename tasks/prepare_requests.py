"""A source -> requests with a fit/holdout split, calibration tokens, held-out text and benchmark questions.

In: the tokenizer of artifacts/reference; rows of the source: `packaged` (worked examples and text of
installed packages), `synthetic` (made-up domains, for the tiny model), `jsonl` (a file) or `hub` (a data
set). A jsonl or hub source gives requests alone; the rest is packaged, less what its requests hold.
Out: artifacts/requests (contracts.py) and metrics/requests.json. Costs seconds and runs no model, unless responses are
to be sampled from the reference: that many decoded tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tasks.console import run_step, timed
from tasks.contracts import REQUEST_COLUMNS, project_root, replacing_folder, write_json
from tasks.moe.checkpoint import load_tokenizer
from tasks.params import PrepareRequests, load_params
from tasks.sources import companions, hub_rows, jsonl, packaged, sampled, split, synthetic_rows
from tasks.sources.rows import Corpus, Row
from tasks.sources.selection import choose, merge_small_classes, split_fit_holdout
from tasks.sources.tokens import TokenRow, Tokens

VERSION = 1


def run(reference: Path, params: PrepareRequests, folder: Path) -> dict[str, Any]:
    """Write the requests folder; returns the metrics. Raises InputError before anything is written."""
    tokens = Tokens(load_tokenizer(reference), params.bos, params.chat_template)
    with timed(f"reading source {params.source}"):
        corpus = read_corpus(params)
    left_out: Counter[str] = Counter()
    with timed("choosing requests"):
        usable = usable_rows(corpus.requests, tokens, params, left_out)
        if params.responses == "sampled":
            usable = sampled.with_room(usable, params.response_tokens)
        groups, merged = merge_small_classes(usable, params.count, params.min_class_size)
        requests = choose(groups, params)
        splits = split_fit_holdout(requests, params)
    for small, into in merged.items():
        print(f"  class {small} has too few rows for {params.min_class_size} requests: merged into {into}")
    if params.responses == "sampled":
        requests = sampled.sampled_rows(requests, reference, tokens, params.response_tokens, params.seed)
    calibration_rows, text_rows, question_rows = (
        _disjoint(rows, requests, left_out) for rows in (corpus.calibration, corpus.text, corpus.questions)
    )
    calibration = companions.calibration(calibration_rows, tokens, params.calibration_tokens)
    texts, text_tokens = companions.held_out_text(text_rows, tokens, params.perplexity_tokens)
    questions = companions.questions(question_rows, tokens, params)
    metrics = {
        "source": params.source,
        "responses": params.responses,
        "requests": len(requests),
        "fit": splits.count("fit"),
        "holdout": splits.count("holdout"),
        "classes": _classes(requests, splits),
        "merged": merged,
        "left_out": dict(left_out),
        "long_share": float(np.mean([len(row.prompt_ids) >= params.long_prompt_tokens for row in requests])),
        "mean_tokens": float(np.mean([row.tokens for row in requests])),
        "request_tokens": sum(row.tokens for row in requests),
        "first_token": tokens.first_token,
        "calibration_tokens": sum(len(ids) for _, ids in calibration),
        "perplexity_tokens": text_tokens,
        "questions": len(questions),
        "question_mean_tokens": float(np.mean([len(tokens.sequence(item.prompt)) for _, item in questions])),
        "version": VERSION,
    }
    with replacing_folder(folder) as new:
        columns = zip(*(_columns(row, part) for row, part in zip(requests, splits, strict=True)), strict=True)
        table = pd.DataFrame(dict(zip(REQUEST_COLUMNS, map(list, columns), strict=True)))
        table.to_parquet(new / "requests.parquet", index=False)
        pd.DataFrame(calibration, columns=["id", "ids"]).to_parquet(new / "calibration.parquet", index=False)
        _write_lines(new / "perplexity.jsonl", [{"id": row_id, "text": text} for row_id, text in texts])
        fields = ("subject", "question", "choices", "answer")
        _write_lines(
            new / "questions.jsonl",
            [
                {"id": row_id, **{field: getattr(item, field) for field in fields}}
                for row_id, item in questions
            ],
        )
        write_json(new / "requests.json", metrics)
    return metrics


def read_corpus(params: PrepareRequests) -> Corpus:
    """The rows of the source; a file or data set of requests is completed by packaged rows."""
    if params.source == "synthetic":
        return synthetic_rows.corpus(params)
    if params.source == "packaged":
        return packaged.corpus()
    rows = (
        jsonl.read_rows(project_root() / params.jsonl.file)
        if params.source == "jsonl"
        else hub_rows.read_rows(params.hub)
    )
    rest = packaged.corpus()
    return Corpus(rows, rest.calibration, rest.text, rest.questions)


def usable_rows(
    rows: list[Row], tokens: Tokens, params: PrepareRequests, left_out: Counter[str]
) -> list[TokenRow]:
    """Rows as token ids; what is too long, repeated or without a response to score is counted in
    `left_out`.
    """
    usable: list[TokenRow] = []
    seen: set[str] = set()
    passage_tokens = min(params.long_prompt_tokens, params.prompt_tokens)
    for row in rows:
        if row.response is None:
            made = tokens.passage(row, passage_tokens, params.response_tokens)
        else:
            made = tokens.row(row, params.response_tokens)
        if made is None:
            left_out["passage_too_short"] += 1
        elif row.response is not None and not row.response.strip():
            left_out["empty_response"] += 1
        elif len(made.prompt_ids) > params.prompt_tokens:
            left_out["prompt_too_long"] += 1
        elif (key := split.normalised(row.prompt) or row.prompt) in seen:
            left_out["repeated_prompt"] += 1
        else:
            seen.add(key)
            usable.append(made)
    return usable


def _disjoint(rows: list[Row], requests: list[TokenRow], left_out: Counter[str]) -> list[Row]:
    kept, dropped = companions.without_requests(rows, requests)
    if dropped:
        left_out["other_role_holds_a_request"] += dropped
    return kept


def _classes(requests: list[TokenRow], splits: list[str]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name in sorted({row.class_name for row in requests}):
        places = [place for place, row in enumerate(requests) if row.class_name == name]
        table[name] = {
            "fit": sum(splits[place] == "fit" for place in places),
            "holdout": sum(splits[place] == "holdout" for place in places),
            "prompt_tokens_mean": float(np.mean([len(requests[place].prompt_ids) for place in places])),
            "scored_tokens_mean": float(np.mean([len(requests[place].response_ids) for place in places])),
        }
    return table


def _columns(row: TokenRow, part: str) -> tuple[Any, ...]:
    return row.id, row.class_name, part, row.prompt, row.response, row.prompt_ids, row.response_ids


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    metrics = run(Path("artifacts/reference"), params.prepare_requests, Path("artifacts/requests"))
    write_json("metrics/requests.json", metrics)


if __name__ == "__main__":
    run_step(main)
