"""The tensors of a checkpoint folder by name, its configuration, and whether both fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import tasks.moe.native  # noqa: F401 (makes the Auto classes know the native ones)
from tasks.contracts import InputError
from tasks.moe.headers import StoredTensor, read_headers
from tasks.quant.formats import Entry


class CheckpointTensors:
    """The tensors of a safetensors checkpoint, one file or many, read one at a time by name."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}

    @cached_property
    def headers(self) -> dict[str, StoredTensor]:
        """What the files say that they hold.

        Raises InputError as `read_headers` does, and for a tensor without values: one saved from a meta
        device, or the placeholder of a distributed optimiser.
        """
        headers = read_headers(self.folder)
        empty = sorted(name for name, tensor in headers.items() if not tensor.elements)
        if empty:
            raise InputError(
                f"{self.folder}: '{empty[0]}' holds no values ({len(empty)} such tensors): it was saved from a meta "
                "device or before its parts were gathered; save the model again with its weights in memory"
            )
        return headers

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> file name. Raises InputError as `headers` does."""
        return {name: tensor.file for name, tensor in self.headers.items()}

    def _source(self, name: str) -> Any:
        if name not in self.files:
            raise InputError(f"{self.folder}: the checkpoint has no tensor '{name}'")
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file]

    def entry(self, name: str) -> Entry:
        """Stored dtype and shape of a tensor."""
        tensor = self.get(name)  # mapped from the file: nothing is read
        return tensor.dtype, tuple(tensor.shape)

    def get(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype; raises InputError naming it when it is absent."""
        return self._source(name).get_tensor(name)

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors of one shape as a stack [len(names), ...]; raises InputError when the shapes differ."""
        tensors = [self.get(name) for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.shape != tensors[0].shape:
                got, first = list(tensor.shape), list(tensors[0].shape)
                raise InputError(
                    f"{self.folder}: '{name}' is {got}, but '{names[0]}' is {first}: "
                    "expected experts of one shape in a layer"
                )
        return torch.stack(tensors)


def check_keys(
    folder: Path, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable = ()
) -> None:
    """Raise InputError naming the first keys when a checkpoint and its model do not match exactly."""
    faults = []
    for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)):
        names = sorted(map(str, keys))
        if names:
            faults.append(f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    if faults:
        raise InputError(
            f"{folder}: the checkpoint does not fit its config.json: keys {'; '.join(faults)}; "
            "expected every key exactly once"
        )


def check_finite(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError naming the first of `tensors` that is on the meta device or holds NaN or infinity."""
    for name, tensor in tensors:
        if tensor.is_meta:
            raise InputError(f"{folder}: '{name}' was never filled: the checkpoint holds no values for it")
        # The sum is not finite if a value is not; it may overflow too, so only then look at every value.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise InputError(
                f"{folder}: '{name}' holds NaN or infinity: expected finite weights; get the checkpoint again, or "
                "make it again from finite weights"
            )


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """A folder's config.json as transformers reads it.

    Raises InputError when it is absent or unreadable, for an architecture that transformers does not know,
    and for one whose own code was not allowed.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json there: expected a checkpoint folder")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}/config.json: {error}") from None


def auto_class(config: Any) -> Any:
    """transformers' Auto class that makes the language model of a configuration."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
