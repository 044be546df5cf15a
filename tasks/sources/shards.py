"""A checkpoint folder as a source: its configuration as plain JSON, its weight files. No tensor is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.contracts import InputError
from tasks.moe.headers import read_index, weight_files


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; raises InputError when it is absent or no configuration."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no config.json there: expected the folder of a transformers checkpoint"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(values).__name__}")
    if not isinstance(values.get("model_type"), str):
        raise InputError(f"{path} has no model_type: not a transformers configuration")
    return values


def list_weights(folder: Path) -> list[str]:
    """The names of the weight files of a checkpoint folder; raises InputError as `weight_files` does."""
    return weight_files([path.name for path in folder.iterdir()], read_index(folder), str(folder))
