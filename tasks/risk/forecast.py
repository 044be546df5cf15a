"""Predicted damage of prompts from their signals alone: what calibrate_fwp fitted, applied to new requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from tasks.contracts import Fragility, InputError, read_json
from tasks.moe.registry import moe_layers
from tasks.risk.drift import Drift
from tasks.risk.fragility import router_row_norm
from tasks.risk.fwp import MEASURED
from tasks.risk.maps import Rows
from tasks.risk.online import Signals
from tasks.risk.predictor import Predictor

PREDICTOR_FILE = "predictor.json"
PREDICTOR_VERSION = 2  # of calibrate_fwp
REMEDY = "run the stage calibrate_fwp again"

# Norms of router rows of one model, computed in another dtype, agree this well.
NORM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Forecaster:
    """The predictors of every instance, and the signals of the scorer's prefill that they read."""

    scorer: str
    damage: str  # kl | dnll
    scored: str  # response | prompt
    strength: str
    predictors: dict[str, Predictor]
    drift: Drift
    signals: Signals
    fragility: Fragility | None

    @classmethod
    def load(
        cls, fwp_folder: Path, decomposition_folder: Path, scorer: str, instances: list[str]
    ) -> Forecaster:
        """Read predictor.json, and fragility.safetensors where a predictor needs it.

        Raises InputError where either is missing, of another version, or not of `scorer` and `instances`.
        """
        values = _read(fwp_folder / PREDICTOR_FILE, scorer, instances)
        drift = Drift.from_dict(values)
        fragility, phi = None, {}
        if values["strength"] == MEASURED or any(name.startswith("separable_") for name in drift.signals):
            fragility = Fragility.load_from(decomposition_folder)
            keys = {name: Fragility.key(values["fragility"], name) for name in instances}
            missing = sorted(set(keys.values()) - set(fragility.arrays))
            if missing:
                raise InputError(
                    f"{decomposition_folder / Fragility.FILE}: no fragility '{missing[0]}', which the predictors in "
                    f"{fwp_folder} read; run the stages decompose_damage and calibrate_fwp again"
                )
            phi = {name: fragility.arrays[key] for name, key in keys.items()}
        signals = Signals(values["align"], (values["strength"],), phi)
        predictors = {name: Predictor.from_dict(values["instances"][name]) for name in instances}
        return cls(
            scorer,
            values["damage"],
            values["scored"],
            values["strength"],
            predictors,
            drift,
            signals,
            fragility,
        )

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise InputError unless the fragility is of `model`: routers are never quantized, so it shows in theirs."""
        if self.fragility is None:
            return
        own, known = router_row_norm(model), self.fragility.arrays["router_row_norm"]
        if own.shape != known.shape or not np.allclose(own, known, rtol=NORM_TOLERANCE):
            layers = moe_layers(model)
            raise InputError(
                f"artifacts/decomposition/{Fragility.FILE} is of another model: it has {known.shape} (MoE layers, "
                f"experts){'' if own.shape != known.shape else ' with other routers'}, the scorer {self.scorer} has "
                f"({len(layers)}, {layers[0].num_experts}); run the stages decompose_damage and calibrate_fwp again"
            )

    def forecast(self, frame: pd.DataFrame) -> pd.DataFrame:
        """`frame` [R] of `read_signals`, with a column `class` ("" for none), and: log_fwp, predicted_<i>, low_<i>
        and high_<i> (where 90 % of true damages lie; nats per token), outside and outside_reason.

        Without a class, a request counts as one of an average class, and its class is no reason to be outside.
        """
        frame = _in_use(frame, list(self.predictors), self.strength)
        columns: dict[str, np.ndarray] = {}
        for name, predictor in self.predictors.items():
            rows = Rows.of(frame, name)
            columns[f"predicted_{name}"] = predictor.predict(rows)
            columns[f"low_{name}"], columns[f"high_{name}"] = predictor.interval(rows).T
        judged = frame.assign(**{"class": frame["class"].where(frame["class"] != "", self.drift.classes[0])})
        columns["outside"], columns["outside_reason"] = self.drift.flags(judged)
        return frame.assign(**columns)

    @property
    def min_tokens(self) -> int:
        """Below so many tokens, some instance's prediction is its class mean."""
        return max(predictor.min_tokens for predictor in self.predictors.values())

    def short(self, frame: pd.DataFrame) -> np.ndarray:
        """[R] bool: prompts of fewer than `min_tokens` tokens."""
        return (frame["prompt_tokens"] < self.min_tokens).to_numpy()


def _read(path: Path, scorer: str, instances: list[str]) -> dict[str, Any]:
    """predictor.json, checked."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; run the pipeline (make run) or its stage calibrate_fwp first"
        )
    try:
        values = read_json(path)
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}; {REMEDY}") from None
    if not isinstance(values, dict) or values.get("version") != PREDICTOR_VERSION:
        version = values.get("version") if isinstance(values, dict) else None
        raise InputError(f"{path}: is of version {version}, expected {PREDICTOR_VERSION}; {REMEDY}")
    needed = ("scorer", "damage", "scored", "align", "strength", "fragility", "fit_range", "instances")
    missing = [name for name in needed if name not in values]
    if missing:
        raise InputError(f"{path}: has no '{missing[0]}'; {REMEDY}")
    if values["scorer"] != scorer:
        raise InputError(
            f"{path}: was calibrated on prefills of {values['scorer']}, but calibrate_fwp.scorer in params.yaml is "
            f"{scorer}; {REMEDY}, or set it back"
        )
    if sorted(values["instances"]) != sorted(instances):
        raise InputError(
            f"{path}: predicts for {sorted(values['instances'])}, but params.yaml's instances are {sorted(instances)}; "
            f"{REMEDY}"
        )
    return values


def _in_use(frame: pd.DataFrame, instances: list[str], strength: str) -> pd.DataFrame:
    """`frame` with log_fwp of the strength in use; of `measured` also log_fwp_<i>, and log_fwp is their mean."""
    if strength != MEASURED:
        return frame.assign(log_fwp=frame[f"log_fwp_{strength}"])
    own = {f"log_fwp_{name}": frame[f"log_fwp_{MEASURED}_{name}"] for name in instances}
    return frame.assign(**own, log_fwp=np.mean(list(own.values()), axis=0))
