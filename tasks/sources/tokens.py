"""Rows to token ids: one convention for the first token, the chat template, and where a response begins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tasks.contracts import InputError
from tasks.sources.rows import Row


@dataclass(frozen=True)
class TokenRow:
    """A request as its text and the token ids that models see."""

    id: str
    class_name: str
    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class Tokens:
    """A tokenizer with the run's conventions.

    `bos`: where the tokenizer puts no token of its own before a text, one fixed token is put there: its bos
    token, or its eos token where it has no bos. `chat_template`: a prompt is rendered as the user's turn.
    """

    def __init__(self, tokenizer: Any, bos: bool, chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise InputError("prepare_requests.chat_template is true, but the tokenizer has no chat template")
        own = _own_prefix(tokenizer)
        self.prefix = own
        self.first_token = "added by the tokenizer" if own else "none"  # for the metrics
        if bos and not own:
            name = "bos" if tokenizer.bos_token_id is not None else "eos"
            token_id = getattr(tokenizer, f"{name}_token_id")
            if token_id is None:
                raise InputError("prepare_requests.bos is true, but the tokenizer has no bos or eos token")
            self.prefix = [token_id]
            self.first_token = f"{name} prepended"

    def sequence(self, text: str) -> list[int]:
        """Ids of a text of its own, the first token included."""
        return [*self.prefix, *self.bare(text)]

    def bare(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def text(self, ids: list[int]) -> str:
        """The text of a response's ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def prompt(self, text: str) -> tuple[str, list[int]]:
        """The prompt as the model gets it, and its ids."""
        if not self._chat_template:
            return text, self.sequence(text)
        turn = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = self.bare(rendered)
        if ids[: len(self.prefix)] != self.prefix:
            ids = [*self.prefix, *ids]
        return rendered, ids

    def response(self, prompt: str, text: str, limit: int) -> tuple[str, list[int]]:
        """The first `limit` ids of a response and their text; a blank goes between two words."""
        if prompt and not prompt[-1].isspace() and not text[:1].isspace():
            text = " " + text
        ids = self.bare(text)
        if len(ids) <= limit:
            return text, ids
        ids = ids[:limit]
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False), ids

    def row(self, row: Row, response_tokens: int) -> TokenRow:
        """A row with a response of its own; the response is cut."""
        prompt, prompt_ids = self.prompt(row.prompt)
        response, response_ids = self.response(prompt, row.response or "", response_tokens)
        return TokenRow(row.id, row.class_name, prompt, response, prompt_ids, response_ids)

    def passage(self, row: Row, prompt_tokens: int, response_tokens: int) -> TokenRow | None:
        """A passage cut in two at the first blank that gives the prompt `prompt_tokens` ids.

        None when less than half of `response_tokens` is left for the response.
        """
        cuts = [match.start() for match in re.finditer(r"(?<=\S)\s", row.prompt)]
        low, high = 0, len(cuts)
        while low < high:  # token counts grow with the text, so a bisection finds the first cut
            middle = (low + high) // 2
            if len(self.prompt(row.prompt[: cuts[middle]])[1]) >= prompt_tokens:
                high = middle
            else:
                low = middle + 1
        if low == len(cuts):
            return None
        prompt, prompt_ids = self.prompt(row.prompt[: cuts[low]])
        response, response_ids = self.response(prompt, row.prompt[cuts[low] :], response_tokens)
        if len(response_ids) < response_tokens / 2:
            return None
        return TokenRow(row.id, row.class_name, prompt, response, prompt_ids, response_ids)


def _own_prefix(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer itself puts before a text."""
    with_special = tokenizer("a").input_ids
    bare = tokenizer("a", add_special_tokens=False).input_ids
    for start in range(len(with_special) - len(bare) + 1):
        if with_special[start : start + len(bare)] == bare:
            return list(with_special[:start])
    return []
