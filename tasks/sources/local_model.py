"""`path`: a checkpoint folder on this machine, checked, then linked or copied into the artifact."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

import tasks.moe.native  # noqa: F401 (the families whose own code is not needed)
from tasks.console import track
from tasks.contracts import InputError, project_root
from tasks.moe.headers import INDEX, read_headers
from tasks.params import LocalModel
from tasks.sources.shards import list_weights, read_config

# Beside the weights: configuration, tokenizer, and the papers that must travel with them.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    INDEX,
)
CODE_FILES = ("*.py",)  # only where remote code is allowed


def build(folder: Path, params: LocalModel) -> dict[str, str]:
    """Bring the checkpoint in `params.folder` to `folder`; raises InputError when it cannot be used."""
    source = project_root() / Path(params.folder or "").expanduser()
    if not source.is_dir():
        raise InputError(f"path.folder is '{params.folder}': no such folder")
    adopt(source, folder, params.trust_remote_code)
    return {}


def adopt(source: Path, folder: Path, trust_remote_code: bool) -> None:
    """Link (copy, where links do not reach) the checkpoint's files into `folder`, shards as they are.

    Raises InputError for pickled, missing or truncated weights, a quantized checkpoint, a missing tokenizer,
    and for code in the checkpoint that `trust_remote_code` does not allow.
    """
    check_config(read_config(source), str(source), trust_remote_code)
    weights = list_weights(source)
    read_headers(source)  # every header is read before a byte is copied
    patterns = SIDE_FILES + (CODE_FILES if trust_remote_code else ())
    names = sorted(
        path.name
        for path in source.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    )
    if not any(name.startswith(("tokenizer", "vocab")) or name.endswith(".model") for name in names):
        raise InputError(
            f"{source}: no tokenizer there: expected tokenizer.json or its kind beside the weights"
        )
    for name in track([*names, *weights], "bringing files", len(names) + len(weights)):
        link_or_copy(source / name, folder / name)


def check_config(config: dict[str, Any], where: str, trust_remote_code: bool) -> None:
    """Raise InputError when the configuration asks for code that is not allowed, or is a quantized
    model's."""
    if "auto_map" in config and config["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise InputError(
            f"{where}: model type '{config['model_type']}' is code of the checkpoint's own (auto_map in its "
            "config.json), not part of transformers; it runs only with trust_remote_code: true; read it first"
        )
    if config["model_type"] not in CONFIG_MAPPING and "auto_map" not in config:
        raise InputError(
            f"{where}: model type '{config['model_type']}' is unknown to the installed transformers"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        raise InputError(f"{where}: the checkpoint is quantized ({method}); a reference must be unquantized")


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link to the file behind `source` (no second copy of large weights), or a copy across file
    systems."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)
