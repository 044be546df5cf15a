"""What goes with the requests: calibration sequences, held-out text and questions, none of them a request's
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasks.contracts import InputError
from tasks.params import PrepareRequests
from tasks.sources import split
from tasks.sources.rows import Question, Row
from tasks.sources.tokens import TokenRow, Tokens

SEQUENCE_TOKENS = 512  # longer calibration and held-out texts are cut
QUOTED = 40  # letters and digits from which a text inside another counts as the same


def without_requests(rows: Iterable[Row], requests: Sequence[TokenRow]) -> tuple[list[Row], int]:
    """Rows whose text is in no request and holds none, and how many were left out."""
    taken = [split.normalised(request.prompt) for request in requests]
    kept, left_out = [], 0
    for row in rows:
        text = split.normalised(row.question.question if row.question else row.prompt)
        if any(_same(text, other) for other in taken):
            left_out += 1
        else:
            kept.append(row)
    return kept, left_out


def calibration(rows: Iterable[Row], tokens: Tokens, wanted: int) -> list[tuple[str, list[int]]]:
    """(id, ids) with `wanted` ids in all; the last sequence is cut to fit."""
    sequences: list[tuple[str, list[int]]] = []
    missing = wanted
    for row in rows:
        if missing == 0:
            return sequences
        ids = tokens.sequence(row.text)[: min(SEQUENCE_TOKENS, missing)]
        sequences.append((row.id, ids))
        missing -= len(ids)
    if missing:
        raise InputError(
            f"calibration_tokens is {wanted}, but the source's calibration rows have {wanted - missing} "
            f"tokens: lower it to {wanted - missing}"
        )
    return sequences


def held_out_text(rows: Iterable[Row], tokens: Tokens, wanted: int) -> tuple[list[tuple[str, str]], int]:
    """(id, text) with at most `wanted` tokens in all, first tokens not counted, and how many they have.

    Texts are cut between words, so the last one may leave a few tokens over.
    """
    texts: list[tuple[str, str]] = []
    count = 0
    for row in rows:
        text, size = _cut(row.text, tokens, min(SEQUENCE_TOKENS, wanted - count))
        if size == 0:
            return texts, count
        texts.append((row.id, text))
        count += size
        if count == wanted:
            return texts, count
    raise InputError(
        f"perplexity_tokens is {wanted}, but the source's held-out text has {count}: lower it to {count}"
    )


def questions(rows: Iterable[Row], tokens: Tokens, params: PrepareRequests) -> list[tuple[str, Question]]:
    """The first `questions` of at most `question_tokens`; the longest give way until the mean is kept.

    Raises InputError where the source has too few, or none short enough for `question_mean_tokens`.
    """
    wanted, limit = params.questions, params.question_tokens
    sized = [
        (len(tokens.sequence(row.question.prompt)), row.id, row.question) for row in rows if row.question
    ]
    fitting = [item for item in sized if item[0] <= limit]
    if len(fitting) < wanted:
        raise InputError(
            f"{wanted} questions wanted, but the source has {len(fitting)} of at most {limit} tokens: lower "
            f"prepare_requests.questions to {len(fitting)}, or raise question_tokens"
        )
    kept, spare = fitting[:wanted], fitting[wanted:]
    while sum(size for size, *_ in kept) > wanted * params.question_mean_tokens:
        longest = max(kept, key=lambda item: item[0])
        shorter = next((item for item in spare if item[0] < longest[0]), None)
        if shorter is None:
            least = sum(sorted(size for size, *_ in fitting)[:wanted]) / wanted
            raise InputError(
                f"question_mean_tokens is {params.question_mean_tokens}, but {wanted} questions have "
                f"{least:.1f} tokens each at least: raise it, or lower prepare_requests.questions"
            )
        kept[kept.index(longest)] = shorter
        spare.remove(shorter)
    return [(row_id, question) for _, row_id, question in kept]


def _same(text: str, other: str) -> bool:
    if min(len(text), len(other)) < QUOTED:
        return text == other
    return text in other or other in text


def _cut(text: str, tokens: Tokens, limit: int) -> tuple[str, int]:
    """The longest beginning of `text` that ends before a blank and has at most `limit` tokens."""
    size = len(tokens.bare(text))
    while size > limit:
        shorter = text[: int(len(text) * limit / size)]
        text = shorter.rpartition(" ")[0].rstrip()
        size = len(tokens.bare(text)) if text else 0
    return text, size
