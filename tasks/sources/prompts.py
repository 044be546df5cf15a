"""Prompts of a JSON Lines file as token ids, read in windows: memory does not grow with the file.

One object a line: `prompt` (text) or `prompt_ids` (token ids, taken as they are), optionally `id` and `class`; other
fields are left alone. Lines end at a line feed alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.contracts import InputError
from tasks.sources.tokens import Tokens

LEAST_TOKENS = 3
WINDOW_PROMPTS = 2048  # of one window at most ...
WINDOW_TOKENS = 2**18  # ... and about as many tokens


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it."""

    id: str  # as given, or "line <number>"
    class_name: str | None  # as given
    ids: list[int]
    whole_length: int  # tokens before truncation

    @property
    def truncated(self) -> bool:
        return len(self.ids) < self.whole_length


@dataclass(frozen=True)
class Checked:
    """What a whole file holds."""

    prompts: int
    tokens: int  # after truncation
    truncated: int
    without_class: int


class PromptFile:
    """The prompts of `path`.

    `vocabulary`: token ids are below it. `context`: the most tokens that the model takes, None for no limit; a
    longer prompt is an error, or with `truncate` its first `context` tokens are kept: they are then what the
    model would have seen of the whole prompt, since its attention is causal.
    """

    def __init__(
        self, path: str | Path, tokens: Tokens, vocabulary: int, context: int | None, truncate: bool
    ) -> None:
        self._path, self._tokens, self._vocabulary = Path(path), tokens, vocabulary
        self._context, self._truncate = context, truncate
        if not self._path.is_file():
            raise InputError(
                f"{self._path}: no such file; give a JSON Lines file with one object a line: prompt (text), and "
                "optionally id and class"
            )

    def check(self) -> Checked:
        """Read the whole file once and keep nothing but 8 bytes an id.

        Raises InputError naming file, line and id for the first prompt that cannot be scored, for an id given
        twice, and for a file without prompts.
        """
        prompts = tokens = truncated = without_class = 0
        seen, fresh = np.empty(0, dtype=np.uint64), []
        for window in self.windows():
            fresh = [_digest(prompt.id) for prompt in window]
            seen = self._refuse_repeated(seen, fresh, window)
            prompts += len(window)
            tokens += sum(len(prompt.ids) for prompt in window)
            truncated += sum(prompt.truncated for prompt in window)
            without_class += sum(prompt.class_name is None for prompt in window)
        if not prompts:
            raise InputError(f"{self._path}: holds no prompt; at least one is expected")
        return Checked(prompts, tokens, truncated, without_class)

    def windows(self) -> Iterator[list[Prompt]]:
        """The prompts in the file's order, some thousand at a time."""
        window: list[Prompt] = []
        tokens = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                window.append(self._prompt(line, number))
                tokens += len(window[-1].ids)
                if len(window) == WINDOW_PROMPTS or tokens >= WINDOW_TOKENS:
                    yield window
                    window, tokens = [], 0
        if window:
            yield window

    def _prompt(self, line: bytes, number: int) -> Prompt:
        where = f"{self._path}:{number}"
        try:
            values = json.loads(line)
        except ValueError as error:  # also undecodable bytes
            raise InputError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{where}: {type(values).__name__}, expected an object with a field 'prompt'")
        name = values.get("id")
        if name is None:
            name = f"line {number}"
        elif isinstance(name, bool) or not (isinstance(name, int) or _is_text(name)):
            raise InputError(f"{where}: id is {name!r}, expected text")
        class_name = values.get("class")
        if class_name is not None and not _is_text(class_name):
            raise InputError(f"{where}: class is {class_name!r}, expected text, or no class at all")
        ids = self._ids(values, f"{where}: prompt '{name}'")
        if len(ids) < LEAST_TOKENS:
            raise InputError(
                f"{where}: prompt '{name}' has {len(ids)} tokens, the first one that is prepended included; at least "
                f"{LEAST_TOKENS} are needed, since the prediction made from position 0 is never scored: give a "
                "longer prompt"
            )
        whole = len(ids)
        if self._context is not None and whole > self._context:
            if not self._truncate:
                raise InputError(
                    f"{where}: prompt '{name}' has {whole} tokens, the model takes {self._context}; shorten it, or "
                    f"give --truncate to score its first {self._context}"
                )
            ids = ids[: self._context]
        return Prompt(str(name), class_name, ids, whole)

    def _ids(self, values: dict[str, Any], where: str) -> list[int]:
        given = sorted({"prompt", "prompt_ids"} & values.keys())
        if len(given) != 1:
            raise InputError(
                f"{where} has both 'prompt' and 'prompt_ids': expected one of them"
                if given
                else f"{where} has neither 'prompt' nor 'prompt_ids', but {sorted(values)}"
            )
        if given == ["prompt"]:
            text = values["prompt"]
            if not _is_text(text) or not text.strip():
                raise InputError(
                    f"{where} is {'empty' if isinstance(text, str) and not text.strip() else repr(text)}, expected text"
                )
            return self._tokens.prompt(text)[1]
        ids = values["prompt_ids"]
        if not isinstance(ids, list) or not all(type(own) is int for own in ids):
            raise InputError(f"{where}: prompt_ids is not a list of whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise InputError(
                f"{where}: prompt_ids has numbers outside 0..{self._vocabulary - 1}, the model's vocabulary"
            )
        return ids

    def _refuse_repeated(self, seen: np.ndarray, fresh: list[int], window: list[Prompt]) -> np.ndarray:
        """`seen` with the digests of a window's ids; raises InputError for one that was there."""
        own = np.array(fresh, dtype=np.uint64)
        joined, count = np.unique(np.concatenate([seen, own]), return_counts=True)
        if (count > 1).any():
            repeated = set(joined[count > 1].tolist())
            name = next(prompt.id for prompt, digest in zip(window, fresh, strict=True) if digest in repeated)
            raise InputError(
                f"{self._path}: id '{name}' stands there twice; give every prompt an id of its own"
            )
        return joined


def _is_text(value: Any) -> bool:
    """Whether it is a string, not empty, that UTF-8 can hold: half of a surrogate pair is no character."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
