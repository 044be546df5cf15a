"""How soon FWP is known: its rank correlation on the first tokens of long texts with the final one, and with damage.

    python -m benchmarks.fwp_prefix [--artifacts artifacts] [--texts 20] [--tokens 1024] [--instance W3]
        [--source packaged | prose] [--threads 1]

Attention is causal, so one pass over each text, by the reference, the scorer and the instance, gives every prefix.
Texts: passages of one file of the packaged corpus joined, without those that shaped the model, or the chunks of one
book in ../shared/data/prose. Damage is the mean over all scored tokens of the text, and over those after the prefix,
which are what a prediction is for; intervals by 1,000 redraws of the texts. Ways to weigh the tokens: none (PPL), the
strengths, and `measured` where artifacts/decomposition knows the instance's fragility. Each pass costs --texts x
--tokens tokens; the figures of every text go to fwp_prefix.jsonl, the table to fwp_prefix.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tasks.console import timed
from tasks.contracts import Fragility, InputError, PrefillRouting, TokenScores
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.params import load_params
from tasks.risk.damage import DAMAGES, token_damage
from tasks.risk.fwp import (
    MEASURED,
    STRENGTHS,
    log_fwp,
    measured_weight,
    normalised,
    prompt_tokens,
    segment_mean,
    token_strength,
    weighted_log_ppl,
)
from tasks.risk.holdout import INTERVAL, spearman, stratified_draws
from tasks.risk.scoring import Requests, score
from tasks.sources import packaged
from tasks.sources.tokens import Tokens

ROOT = Path(__file__).parents[1]
FILE, REPORT = ROOT / "benchmarks/fwp_prefix.jsonl", ROOT / "benchmarks/fwp_prefix.md"
PREFIXES = (64, 128, 256, 512, 1024)
PLAIN = "none (PPL)"
REDRAWS = 1000
LEAST_AFTER = 32  # tokens after a prefix, for their damage to mean anything


def texts(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of long texts in a fixed order."""
    if source == "prose":
        for path in sorted((ROOT / "../shared/data/prose").glob("*.jsonl")):
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for start in range(0, len(rows) - 7, 8):  # neighbours in one file: mostly chunks of one book
                yield f"{path.stem}:{start}", "".join(row["text"] for row in rows[start : start + 8])
        return
    joined: dict[str, list[str]] = {}
    turns = [row for row in packaged.rows() if row.response is None and row.role != "upcycling"]
    for row in packaged.by_turns(turns):  # code and documentation in turn
        joined.setdefault(row.id.partition(":")[0], []).append(row.prompt)
    for name, passages in joined.items():
        yield name, "\n".join(passages)


def long_texts(source: str, tokens: Tokens, count: int, length: int) -> tuple[list[str], list[list[int]]]:
    """The first `count` texts of at least `length` tokens, cut there."""
    names, sequences = [], []
    for name, text in texts(source):
        if len(text) > 2 * length:  # fewer characters cannot be enough tokens
            ids = tokens.sequence(text[: 8 * length])
            if len(ids) >= length:
                names.append(name)
                sequences.append(ids[:length])
        if len(names) == count:
            return names, sequences
    raise InputError(
        f"source {source} has {len(names)} texts of {length} tokens, {count} are wanted: lower --texts or --tokens"
    )


def prefix_rows(
    names: list[str],
    scores: dict[str, TokenScores],
    routing: PrefillRouting,
    scorer: str,
    instance: str,
    align: str,
    phi: np.ndarray | None,
) -> list[dict[str, Any]]:
    """Per text its damage, and per way to weigh and prefix length its log FWP; all texts are equally long."""
    tokens = prompt_tokens(scores[scorer], routing, align)
    count, length = len(names), int(tokens.offset[1]) + 2
    place = tokens.position.reshape(count, -1)  # [R, N - 2], as the losses
    nll = tokens.nll.reshape(count, -1)
    strengths = {name: token_strength(routing, name) for name in STRENGTHS}
    weight = None if phi is None else measured_weight(routing, phi)
    rows: list[dict[str, Any]] = [{"text": name, "tokens": length, "log_fwp": {}} for name in names]
    prefixes = [n for n in PREFIXES if n < length] + [length]
    for n in prefixes:
        part, offset = nll[:, : n - 2].ravel(), np.arange(count + 1) * (n - 2)
        at = place[:, : n - 2].ravel()
        found = {PLAIN: segment_mean(part, offset)}
        found |= {name: log_fwp(part, own[at], offset) for name, own in strengths.items()}
        if weight is not None:
            found[MEASURED] = weighted_log_ppl(part, normalised(weight[at], offset), offset)
        for row, values in zip(rows, np.stack(list(found.values()), axis=1).tolist(), strict=True):
            for way, value in zip(found, values, strict=True):
                row["log_fwp"].setdefault(way, {})[str(n)] = value
    for kind in DAMAGES:
        damage = token_damage(scores["reference"], scores[instance], kind).reshape(count, -1)[:, 1:]
        for row, own in zip(rows, damage, strict=True):
            row[kind] = float(own.mean())
            row[f"{kind}_after"] = {
                str(n): float(own[n - 2 :].mean()) for n in prefixes if length - n >= LEAST_AFTER
            }
    return rows


def correlation(x: np.ndarray, y: np.ndarray, draws: np.ndarray) -> str:
    """Rank correlation over texts with its 95 % bootstrap interval."""
    values = spearman(x[draws], y[draws])
    low, high = np.percentile(values[~np.isnan(values)], INTERVAL)
    return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"


def report(rows: list[dict[str, Any]], scorer: str, instance: str, source: str) -> str:
    """The table in Markdown."""
    length = str(rows[0]["tokens"])
    draws = stratified_draws(np.array(["text"] * len(rows)), REDRAWS, 0)
    columns = ("weighed by", "first tokens", "final FWP", "KL", "ΔNLL", "KL after", "ΔNLL after")
    lines = [
        "# How soon FWP is known",
        "",
        f"{len(rows)} texts of {length} tokens ({source}), scorer {scorer}, damage of {instance}. Rank correlation "
        "over texts of log FWP on the first tokens with the final one, with the damage of the whole text, and with the "
        "damage of what comes after the prefix; 95 % intervals by redrawing texts. "
        f"{MEASURED}: weighed by {instance}'s fragility. "
        "The paper [S]: 0.24 … 0.999 with the final FWP at 64 … 1,024 tokens.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    whole = {kind: np.array([row[kind] for row in rows]) for kind in reversed(DAMAGES)}
    for way, by_prefix in rows[0]["log_fwp"].items():
        final = np.array([row["log_fwp"][way][length] for row in rows])
        for n in by_prefix:
            own = np.array([row["log_fwp"][way][n] for row in rows])
            cells = [way, n, "1" if n == length else correlation(own, final, draws)]
            cells += [correlation(own, damage, draws) for damage in whole.values()]
            for kind in whole:
                known = n in rows[0][f"{kind}_after"]
                after = np.array([row[f"{kind}_after"][n] for row in rows]) if known else own
                cells.append(correlation(own, after, draws) if known else "–")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--artifacts", type=Path, default=ROOT / "artifacts")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--instance", default="W3")
    parser.add_argument("--source", choices=["packaged", "prose"], default="packaged")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    params = load_params(ROOT / "params.yaml")
    torch.set_num_threads(options.threads)
    artifacts, scorer = options.artifacts, params.calibrate_fwp.scorer
    tokens = Tokens(load_tokenizer(artifacts / "reference"), params.prepare_requests.bos, False)
    names, sequences = long_texts(options.source, tokens, options.texts, options.tokens)
    phi = None
    if (artifacts / "decomposition").is_dir():
        key = Fragility.key(f"taylor_{params.calibrate_fwp.damage}", options.instance)
        phi = Fragility.load_from(artifacts / "decomposition").arrays.get(key)
    frame = pd.DataFrame({"id": names})
    requests = Requests(frame, sequences, np.full(len(names), options.tokens, dtype=np.int64))
    scores, routing, hidden = {}, None, None
    for name in dict.fromkeys(["reference", scorer, options.instance]):
        folder = artifacts / "reference" if name == "reference" else artifacts / "instances" / name
        with timed(f"{name}: {len(names)} texts of {options.tokens} tokens"):
            found = score(load_model(folder), requests, name, options.tokens, hidden)
        scores[name] = found[0]
        if name == scorer:
            routing = found[1]
        if name == "reference":
            hidden = found[2]
    assert routing is not None
    rows = prefix_rows(names, scores, routing, scorer, options.instance, params.calibrate_fwp.align, phi)
    options.file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    table = report(rows, scorer, options.instance, options.source)
    options.report.write_text(table)
    print(table)


if __name__ == "__main__":
    main()
