"""Requests, calibration rows, held-out text and questions of the made-up domains (`synthetic.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from tasks.params import PrepareRequests
from tasks.sources import split
from tasks.sources.rows import Corpus, Question, Row
from tasks.sources.synthetic import DOMAINS, choice_rows, question_rows

# One seed a role; training uses negative ones.
REQUESTS, CALIBRATION, TEXT, QUESTIONS = 1, 2, 3, 4
TOKENS_OF_A_ROW = 16  # fewer than the shortest row has, so that enough rows are made


def corpus(params: PrepareRequests) -> Corpus:
    """Rows for what `params` asks; a text that two roles would share stays with the first."""
    seen: set[str] = set()
    return Corpus(
        requests=_fresh(_rows("requests", REQUESTS, params.count), seen),
        calibration=_fresh(
            _rows("calibration", CALIBRATION, params.calibration_tokens // TOKENS_OF_A_ROW), seen
        ),
        text=_fresh(_rows("text", TEXT, params.perplexity_tokens // TOKENS_OF_A_ROW), seen),
        questions=_fresh(_choices(2 * params.questions), seen),  # some are too long to be kept
    )


def _rows(role: str, seed: int, count: int) -> Iterable[Row]:
    """`count` rows of every domain, or a few, the domains taking turns."""
    count = max(count, 8)
    made = [
        [Row(f"{role}/{domain}/{number}", domain, "synthetic", row.prompt, row.response)
         for number, row in enumerate(question_rows(domain, count, seed))]
        for domain in DOMAINS
    ]  # fmt: skip
    return [row for row in chain.from_iterable(zip_longest(*made)) if row]


def _choices(count: int) -> Iterable[Row]:
    made = []
    for domain in DOMAINS:
        rows = []
        for number, row in enumerate(choice_rows(domain, count, QUESTIONS)):
            a, b, c, d = row.choices
            question = Question(domain, row.question, (a, b, c, d), row.answer)
            rows.append(
                Row(f"question/{domain}/{number}", domain, "synthetic", question.prompt, None, question)
            )
        made.append(rows)
    return [row for row in chain.from_iterable(zip_longest(*made)) if row]


def _fresh(rows: Iterable[Row], seen: set[str]) -> list[Row]:
    kept = []
    for row in rows:
        key = split.normalised(row.prompt)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return kept
