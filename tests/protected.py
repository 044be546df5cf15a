"""A checkpoint with one expert far larger than the rest, and the calibration that finds it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from tasks.contracts import read_json
from tasks.quant.formats import MANIFEST_FILE
from tests.instances import half_precision
from tests.seeded_models import seeded_checkpoint

SUPER = (2, 5)  # layer, expert


def supered(folder: Path) -> Path:
    """A checkpoint of bfloat16 whose expert `SUPER` has outputs 30 times as large."""
    reference = half_precision(seeded_checkpoint(folder / "float32", "qwen2_moe"), folder / "reference")
    tensors = load_file(reference / "model.safetensors")
    tensors[f"model.layers.{SUPER[0]}.mlp.experts.{SUPER[1]}.down_proj.weight"] *= 30
    save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
    return reference


def written_calibration(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(2, 350, (length,), generator=generator).tolist() for length in (60, 40, 50)]
    folder.mkdir()
    pd.DataFrame({"id": range(len(ids)), "ids": ids}).to_parquet(folder / "calibration.parquet")
    return folder


def kept_of(folder: Path) -> list[tuple[int, int]]:
    return [(own["layer"], own["expert"]) for own in read_json(folder / MANIFEST_FILE)["protected"]]
