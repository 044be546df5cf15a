"""What every source of requests hands over: rows of text, not yet tokens."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.contracts import InputError
from tasks.sources import split


@dataclass(frozen=True)
class Question:
    """A multiple-choice question with its four choices; `answer` is 0..3."""

    subject: str
    question: str
    choices: tuple[str, str, str, str]
    answer: int

    @property
    def prompt(self) -> str:
        """As `tasks/evaluation/benchmarks/mmlu_packaged.yaml` asks it."""
        options = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", self.choices, strict=True))
        return f"{self.question}\n{options}\nAnswer:"


@dataclass(frozen=True)
class Row:
    """One row. A passage has no response of its own: `prompt` is the whole text, `response` None."""

    id: str
    class_name: str
    source: str  # which shares of `split.SHARES` hold for it; rows of other sources are all requests
    prompt: str
    response: str | None
    question: Question | None = None

    @property
    def role(self) -> str:
        return split.role(self.id, self.source)

    @property
    def text(self) -> str:
        if not self.response:
            return self.prompt
        return f"{self.prompt}{'' if self.response[0].isspace() else ' '}{self.response}"


@dataclass(frozen=True)
class Corpus:
    """Rows by what they are for, in the order in which they should be used."""

    requests: list[Row]
    calibration: list[Row]
    text: list[Row]  # held out, for perplexity
    questions: list[Row]  # held out, multiple choice


def check_columns(wanted: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise InputError for the first wanted column that is not among the found ones, naming the nearest."""
    found = list(found)
    for column in wanted:
        if column not in found:
            near = difflib.get_close_matches(column, found, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InputError(f"{where}: no column '{column}' among {sorted(found)}{hint}")


def checked_row(values: dict[str, object], source: str, where: str, columns: dict[str, str]) -> Row:
    """A row from a mapping; `columns` maps id, class, prompt and response to the mapping's keys.

    Raises InputError naming `where` for a missing or empty field or one that is not text. An empty response
    is kept: whether it counts is for the reader to decide.
    """
    texts: dict[str, str] = {}
    for name in ("id", "class", "prompt", "response"):
        key = columns.get(name, name)
        if key not in values:
            raise InputError(f"{where}: no '{key}': expected id, class, prompt and response")
        value = values[key]
        if name in ("id", "class") and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if name == "response" and value is None:
            value = ""
        if not isinstance(value, str):
            raise InputError(f"{where}: '{key}' is {type(value).__name__}, expected text")
        if name != "response" and not value.strip():
            raise InputError(f"{where}: '{key}' is empty")
        texts[name] = value
    return Row(texts["id"], texts["class"], source, texts["prompt"], texts["response"])


def refuse_repeated_ids(rows: Iterable[tuple[str, Row]]) -> None:
    """Raise InputError when two rows share an id; takes (where, row)."""
    first: dict[str, str] = {}
    for where, row in rows:
        if row.id in first:
            raise InputError(
                f"{where}: id '{row.id}' was used before, at {first[row.id]}: expected unique ids"
            )
        first[row.id] = where
