"""What crosses a step's border: file layouts, shapes and units. numpy only, so that reading one never loads torch.

Shapes: L MoE layers in depth order, E experts per layer, k picks per token, R requests, N predictions,
T prefilled tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file, save_file

GIB = 2**30


class InputError(ValueError):
    """The user's input cannot be used; the message says what was wrong, got, expected and how to mend it."""


class ResumableError(InputError):
    """The machine failed, or a limit was hit: the same run can be carried on, so what it has finished is kept."""


# --- where the project is ---------------------------------------------------------------------------------------


def project_root() -> Path:
    """The project's own folder, also when a run works in a copy of it.

    `dvc exp run --temp` and `--queue` work in .dvc/tmp/exps/<name>, `make study` in .study: what must outlive such a
    copy (mlruns/, .downloads/) and relative paths out of the project start here, not at the working directory.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if folder.name == ".study":
            return folder.parent
        if folder.parts[-3:] == (".dvc", "tmp", "exps"):
            return folder.parents[2]
    return here


# --- files: written beside their place, then moved there, so that a kill never leaves half a file ----------------


@contextmanager
def replacing_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on failure it is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed run
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it replaces `path`, on failure it is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed run
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():  # a folder cannot be replaced in one step: move the old one aside for that instant
            path.rename(temporary.with_suffix(".old.tmp"))
        temporary.replace(path)
        shutil.rmtree(temporary.with_suffix(".old.tmp"), ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: str | Path, values: Any, digits: int = 6) -> None:
    """Write sorted, rounded JSON without timestamps, so that equal results are equal bytes.

    Floats are rounded to `digits` significant digits. Raises ValueError on NaN or infinity: absent is the word for
    what does not apply.
    """
    text = json.dumps(_rounded(values, digits), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    with replacing_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item, digits) for item in value]
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist(), digits)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else value
    return value


# --- requests (prepare_requests) ------------------------------------------------------------------------------------
#
# artifacts/requests/
#   requests.parquet     id, class, split ("fit" | "holdout"), prompt, response, prompt_ids, response_ids (lists of
#                        token ids; prompt_ids starts with the fixed `bos` token where one is prepended)
#   calibration.parquet  id, ids      token sequences for weights and statistics, position 0 included
#   perplexity.jsonl     id, text     held-out text of the benchmark role
#   questions.jsonl      id, subject, question, choices [4], answer (0..3)
#   requests.json        counts, merged classes, VERSION

REQUEST_COLUMNS = ("id", "class", "split", "prompt", "response", "prompt_ids", "response_ids")


# --- experts (measure_experts) --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertStatistics:
    """Load and importance of every routed expert, counted on calibration tokens (artifacts/experts/)."""

    layers: np.ndarray  # [L] decoder layer of each MoE layer
    load: np.ndarray  # [L, E] tokens
    importance: np.ndarray  # [L, E] Wanda: mean of |W| ||X||_2 over the expert's matrices
    importance_rms: np.ndarray  # [L, E] the same with the per-token root mean square, free of the load

    def save(self, path: str | Path) -> None:
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in self.__dataclass_fields__}
        with replacing_file(path) as temporary:
            save_file(arrays, temporary)

    @classmethod
    def load_from(cls, path: str | Path) -> ExpertStatistics:
        return cls(**load_file(path))


# --- scores (score_requests) ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScores:
    """Losses of one model on all requests (artifacts/scores/<model>/scores.safetensors and ids.json).

    Request r owns predictions offset[r] : offset[r + 1]. The j-th of them is the prediction of token j + 1 from the
    tokens 0..j; the first `prompt_length[r] - 1` predict prompt tokens, the rest predict the response. Prediction 0,
    made from position 0 alone, is stored but never scored. An encoder-decoder does not predict the tokens that
    its encoder reads: the predictions before `first[r]` do not exist, and are NaN.
    """

    ids: list[str]  # [R]
    offset: np.ndarray  # [R + 1]
    prompt_length: np.ndarray  # [R] tokens, bos included
    nll: np.ndarray  # [N] nats
    kl: np.ndarray | None  # [N] nats, KL(reference || model); None for the reference
    first: np.ndarray | None = None  # [R] the first scored prediction, 1 or more; None: 1

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.ids) + 1 or len(self.nll) != self.offset[-1]:
            raise ValueError(
                f"{len(self.ids)} ids, {len(self.offset)} offsets, {len(self.nll)} losses do not match"
            )

    def scored(self, row: int, part: str) -> slice:
        """The predictions of request `row` that count for part "prompt" or "response"."""
        start, stop = int(self.offset[row]), int(self.offset[row + 1])
        split = start + int(self.prompt_length[row]) - 1
        first = start + (1 if self.first is None else int(self.first[row]))
        if part == "response":
            return slice(max(split, first), stop)
        if part == "prompt":
            return slice(first, split)
        raise ValueError(f"part is '{part}', expected 'prompt' or 'response'")

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        arrays = {"offset": self.offset, "prompt_length": self.prompt_length, "nll": self.nll}
        arrays |= {name: own for name, own in (("kl", self.kl), ("first", self.first)) if own is not None}
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            folder / "scores.safetensors",
        )
        write_json(folder / "ids.json", self.ids)

    @classmethod
    def load_from(cls, folder: str | Path) -> TokenScores:
        folder = Path(folder)
        arrays = load_file(folder / "scores.safetensors")
        return cls(read_json(folder / "ids.json"), kl=arrays.pop("kl", None), **arrays)


@dataclass(frozen=True)
class PrefillRouting:
    """Token routing of a model's prefill of every prompt (artifacts/scores/<model>/routing.safetensors)."""

    offset: np.ndarray  # [R + 1] into T; request r owns tokens offset[r] : offset[r + 1], bos included
    index: np.ndarray  # [T, L, k] uint16, selected experts
    weight: np.ndarray  # [T, L, k] float32, routing weights as the model applies them
    gate_prob: (
        np.ndarray
    )  # [T, L, k] float32, softmax over all E of the unflattened logits, at the selected experts
    router_row_norm: np.ndarray  # [L, E] L2 norm of each expert's router row, divided by its layer's mean
    visited: np.ndarray | None = (
        None  # [T, L] bool, False where a token does not pass a layer; None: all pass
    )
    # Where a layer is not visited, or its expert dropped the token, `weight` is 0.

    def save(self, folder: str | Path) -> None:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        arrays = {name: np.ascontiguousarray(own) for name, own in named.items() if own is not None}
        save_file(arrays, Path(folder) / "routing.safetensors")

    @classmethod
    def load_from(cls, folder: str | Path) -> PrefillRouting:
        return cls(**load_file(Path(folder) / "routing.safetensors"))


# --- fragility (decompose_damage) -----------------------------------------------------------------------------------
#
# artifacts/decomposition/
#   fragility.safetensors  see below
#   terms.parquet          instance, id, split, total, bias, separable, separability, interaction, higher_order,
#                          route_change, sampling_error [nats per scored token] of the requests that were decomposed
#   decomposition.json     VERSION, counts, settings


@dataclass(frozen=True)
class Fragility:
    """Every routed expert's fragility under every instance, estimated on calibration tokens alone.

    `arrays`: float64 [L, E] under `<estimator>_<instance>` (position 0 counted) and
    `<estimator>_without_first_<instance>` (not counted), estimators taylor_kl and taylor_dnll [nats per unit of
    routing weight] and output_error [norm], and under `router_row_norm`. An expert without a calibration token
    has 0. Of an encoder-decoder only `router_row_norm` is known.
    """

    arrays: dict[str, np.ndarray]

    FILE: ClassVar[str] = "fragility.safetensors"

    @staticmethod
    def key(estimator: str, instance: str, first: bool = True) -> str:
        return f"{estimator}_{instance}" if first else f"{estimator}_without_first_{instance}"

    def save(self, folder: str | Path) -> None:
        arrays = {name: np.ascontiguousarray(array, dtype=np.float64) for name, array in self.arrays.items()}
        save_file(arrays, Path(folder) / self.FILE)

    @classmethod
    def load_from(cls, folder: str | Path) -> Fragility:
        path = Path(folder) / cls.FILE
        if not path.is_file():
            raise InputError(f"{path}: no such file; run the stage decompose_damage first")
        return cls(load_file(path))


# --- predictions (calibrate_fwp) ------------------------------------------------------------------------------------
#
# artifacts/fwp/predictions.parquet, one row a request, in the order of requests.parquet:
#   id, class, split, prompt_tokens, scored_tokens
#   signals of the scorer's prefill: log_ppl, log_length, routing_frequency, log_fwp_gate_prob, log_fwp_router_row_norm,
#                    log_fwp (the strength in use; of `measured` the mean over instances)
#   outside, outside_reason     whether and why the request is unlike the fit requests (tasks/risk/drift.py)
#   per instance i:  dnll_<i>, kl_<i>        true damage, nats per scored token
#                    predicted_<i>           damage predicted by the predictor in use; fit rows out of fold
#                    class_mean_<i>          the fit class mean
#                    separable_<i>, log_fwp_measured_<i>   signals of its fragility; absent where none is known
#                    log_fwp_<i>             only with strength `measured`: goes before log_fwp
# artifacts/fwp/predictor.json                version 2: scorer, damage, scored, align, strength, fit_range (Drift),
#                    fragility (its estimator in fragility.safetensors), instances: <i> -> Predictor with interval


# --- replication plans (build_variants) -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlan:
    """One MoE layer of a variant. The first E physical experts are the logical ones, then the replicas."""

    layer: int  # decoder layer
    physical_to_logical: list[int]  # [m + r]
    bits: list[int]  # [m + r] stored width of each physical expert; 0: as in the reference


@dataclass(frozen=True)
class ReplicationPlan:
    """The sidecar plan.json: which physical experts a variant has and how tokens are dispatched to them."""

    model_hash: str  # of the reference's configuration
    group_size: int
    dispatch: str  # round_robin | random
    seed: int
    layers: list[LayerPlan]

    def save(self, path: str | Path) -> None:
        write_json(path, {**self.__dict__, "layers": [layer.__dict__ for layer in self.layers]})

    @classmethod
    def load_from(cls, path: str | Path) -> ReplicationPlan:
        values = read_json(path)
        return cls(**{**values, "layers": [LayerPlan(**layer) for layer in values["layers"]]})
