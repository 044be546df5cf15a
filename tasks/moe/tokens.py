"""Which tokens a forward pass holds: experts see a flat list and need padding, requests and positions.

A pre-hook on the decoder reads them off its arguments, so that prefill, plain calls and generation with a
key-value cache work alike. `prefill` passes no attention mask to a decoder-only model, and names its padding
through `real_tokens`. Of an encoder-decoder both stacks have the hook: their experts run in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.dispatch import request_key

_MASK: ContextVar[torch.Tensor | None] = ContextVar("real_tokens", default=None)


@contextmanager
def real_tokens(mask: torch.Tensor) -> Iterator[None]:
    """Say which of the tokens [B, S] of the forward passes inside are real and which are padding."""
    token = _MASK.set(mask)
    try:
        yield
    finally:
        _MASK.reset(token)


@dataclass(frozen=True)
class BatchTokens:
    """The tokens of one forward pass, flat in the experts' order."""

    real: torch.Tensor  # [B * S] bool, False at padding
    request: np.ndarray  # [B * S] uint64, names the token's sequence
    position: np.ndarray  # [B * S] int64, index among the real tokens of its sequence


class TokenWatch:
    """Keeps `latest`, the tokens of the stack of layers that runs or ran last."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.latest: BatchTokens | None = None
        # [B] of the sequences that a stack has seen, those in its key-value cache
        self._keys: dict[nn.Module, np.ndarray] = {}
        stacks: list[Any] = [model.base_model]
        if model.config.is_encoder_decoder:
            stacks = [model.get_encoder(), model.get_decoder()]
        self._handles: list[RemovableHandle] = [
            stack.register_forward_pre_hook(self._look, with_kwargs=True) for stack in stacks
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def of(self, count: int) -> BatchTokens:
        """The running pass's tokens; raises RuntimeError unless there are `count` of them."""
        if self.latest is None or len(self.latest.real) != count:
            got = "none" if self.latest is None else len(self.latest.real)
            raise RuntimeError(f"the experts got {count} tokens, the decoder's hook saw {got}")
        return self.latest

    def _look(self, stack: nn.Module, inputs: tuple, options: dict) -> None:
        ids = inputs[0] if inputs else options.get("input_ids")
        if ids is None:
            raise InputError(
                "replicas dispatch by token ids: call the model with input_ids, not inputs_embeds"
            )
        cache = options.get("cache", options.get("past_key_values"))
        past = int(cache.get_seq_length()) if cache is not None else 0
        batch, width = ids.shape
        mask = _padding(options.get("attention_mask"), batch, width, past)
        numbers = ids.cpu().numpy()
        if past == 0:
            self._keys[stack] = request_key(numbers, mask)
        keys = self._keys.get(stack, ())
        if len(keys) != batch:
            raise InputError(
                f"a cached forward has {batch} rows, but the cache was filled with {len(keys)}: "
                "expected the same rows in the same order"
            )
        position = np.cumsum(mask, axis=1)[:, -width:] - 1
        self.latest = BatchTokens(
            torch.from_numpy(mask[:, -width:].reshape(-1).copy()).to(ids.device),
            np.repeat(keys, width),
            np.maximum(position, 0).reshape(-1),
        )


def _padding(mask: object, batch: int, width: int, past: int) -> np.ndarray:
    """[B, past + S] bool: True at real tokens, those in the cache included."""
    named = _MASK.get()
    mask = mask if named is None else named
    if mask is None:
        return np.ones((batch, past + width), dtype=bool)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise InputError("replicas need the attention mask as [rows, tokens]; got another form")
    real = mask.cpu().numpy().astype(bool)
    if real.shape == (batch, width) and past:
        real = np.concatenate([np.ones((batch, past), dtype=bool), real], axis=1)
    if real.shape != (batch, past + width):
        raise InputError(f"the attention mask is {list(real.shape)}, expected {[batch, past + width]}")
    return real
