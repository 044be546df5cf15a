"""Load a reference, an instance or a variant folder as a transformers model in eval mode."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tasks.contracts import InputError
from tasks.moe.fused import EXPERTS_IMPLEMENTATION


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    reference: str | Path | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load `folder` in eval mode, its experts dequantized to `dtype`.

    Raises InputError for a folder without a checkpoint and for any missing or unexpected key.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json there: expected a checkpoint folder")
    return _load_reference(folder, dtype, trust_remote_code)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False):
    """The tokenizer beside a checkpoint."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def _load_reference(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        experts_implementation=EXPERTS_IMPLEMENTATION,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    check_keys(folder, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return model.eval()


def check_keys(folder: Path, missing, unexpected, mismatched=()) -> None:
    """Raise InputError naming the first keys when a checkpoint and its model do not match exactly."""
    faults = [
        f"{len(keys)} {kind} ({', '.join(sorted(map(str, keys))[:3])}{', ...' if len(keys) > 3 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if keys
    ]
    if faults:
        raise InputError(
            f"{folder}: the checkpoint does not fit its config.json: keys {'; '.join(faults)}; "
            "expected every key exactly once"
        )
