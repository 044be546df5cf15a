"""Calibration tokens: what experts are counted on, and the loss that a variant is compared by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from tasks.contracts import InputError
from tasks.moe.prefill import PrefillBatch, next_token_nll


def read_calibration(requests: Path) -> list[list[int]]:
    """Token sequences of calibration.parquet in `requests`, in its order.

    Raises InputError where the file is absent, or no sequence is long enough to score a prediction.
    """
    path = requests / "calibration.parquet"
    if not path.is_file():
        raise InputError(f"{path}: no such file: run prepare_requests first")
    sequences = [ids.tolist() for ids in pd.read_parquet(path, columns=["ids"])["ids"]]
    if max(map(len, sequences), default=0) < 3:
        raise InputError(
            f"{path}: no sequence has three tokens, got {len(sequences)} sequences; "
            "raise prepare_requests.calibration_tokens"
        )
    return sequences


def calibration_nll(model: PreTrainedModel, batch: PrefillBatch) -> np.ndarray:
    """Losses [predictions] in nats, float64; padding and predictions made from position 0 are left out, and of
    an encoder-decoder the tokens that the encoder reads."""
    kept = batch.predicted[:, 2:]
    return next_token_nll(model, batch.hidden[:, 1:-1][kept], batch.ids[:, 2:][kept]).double().numpy()
