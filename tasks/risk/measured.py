"""Everything that scoring measured, read from its artifacts and checked, before any map is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import ExpertStatistics, Fragility, InputError, PrefillRouting, TokenScores
from tasks.params import CalibrateFwp
from tasks.risk.damage import (
    DAMAGES,
    PARTS,
    check_finite,
    check_same_requests,
    half_means,
    request_means,
    scored_tokens,
    token_damage,
)
from tasks.risk.features import fragility_signals, prefill_signals
from tasks.risk.fwp import (
    ALIGNMENTS,
    MEASURED,
    STRENGTHS,
    measured_weight,
    normalised,
    prompt_tokens,
    separable,
    strength_report,
    token_strength,
    weight_report,
)
from tasks.risk.maps import Rows

# The name of the separable term that is not in use, among the signals to rank by.
OTHER = {True: "separable_without_position_0", False: "separable_with_position_0"}

Target = tuple[str, str, str]  # instance, damage, part


@dataclass(frozen=True)
class Measured:
    """All that is known before anything is fitted."""

    frame: (
        pd.DataFrame
    )  # [R] id, class, split, prompt_tokens, scored_tokens, the signals of the damage in use
    rows: dict[tuple[str, str], Rows]  # (instance, damage) -> what its maps may read
    damage: dict[Target, np.ndarray]  # [R]
    halves: dict[Target, np.ndarray]  # [R, 2]
    raw: dict[
        tuple[str, str], dict[str, np.ndarray]
    ]  # (instance, damage) -> signals to rank by as they are, [R]
    strengths: dict[str, dict[str, Any]]  # measured: of every instance
    absent_signals: list[str]


def measure(
    requests_file: Path,
    scores_folder: Path,
    experts_file: Path,
    decomposition_folder: Path,
    instances: list[str],
    params: CalibrateFwp,
) -> Measured:
    """Read and check; InputError on missing scores, ids that do not match, losses that are no numbers, one class, an
    empty split, and on a strength `measured` for a model without fragility."""
    frame = read_split(requests_file)
    scores = read_scores(scores_folder, frame["id"].tolist(), instances)
    scorer, reference = scores[params.scorer], scores["reference"]
    routing = PrefillRouting.load_from(scores_folder / params.scorer)
    load = ExpertStatistics.load_from(experts_file).load.astype(np.float64)
    phi = read_fragility(decomposition_folder, instances, params.position_0)
    other = read_fragility(decomposition_folder, instances, not params.position_0)
    if not phi and params.strength == MEASURED:
        raise InputError(
            f"calibrate_fwp.strength is '{MEASURED}', but this model has no fragility (an encoder-decoder has none): "
            f"choose one of {STRENGTHS}"
        )
    plain = {a: prefill_signals(scorer, routing, load, _routed(params), a) for a in ALIGNMENTS}
    own = {
        (kind, align): fragility_signals(scorer, routing, of_kind, align)
        for kind, of_kind in phi.items()
        for align in ALIGNMENTS
    }
    frame["prompt_tokens"] = scorer.prompt_length
    frame["scored_tokens"] = scored_tokens(scorer, params.scored)
    frames = {}
    for kind in DAMAGES:
        of_phi = [own[kind, params.align]] if kind in phi else []
        frames[kind] = _in_use(pd.concat([frame, plain[params.align], *of_phi], axis=1), instances, params)
    damage, halves, raw = {}, {}, {}
    for name in instances:
        for kind in DAMAGES:
            values = token_damage(reference, scores[name], kind)
            raw[name, kind] = _raw_signals(plain, own, name, kind, params)
            if kind in other:
                raw[name, kind][OTHER[params.position_0]] = separable(routing, other[kind][name])
            for part in PARTS:
                damage[name, kind, part] = request_means(values, scores[name], part)
                halves[name, kind, part] = half_means(values, scores[name], part)
    return Measured(
        frames[params.damage],
        {(name, kind): Rows.of(frames[kind], name) for name in instances for kind in DAMAGES},
        damage,
        halves,
        raw,
        _strength_reports(scorer, routing, phi.get(params.damage, {}), params),
        [] if phi else ["separable", *([MEASURED] if MEASURED in params.strengths else [])],
    )


def read_scores(folder: Path, ids: list[str], instances: list[str]) -> dict[str, TokenScores]:
    """The scores of the reference and every instance, of exactly the requests `ids`, all finite."""
    scores: dict[str, TokenScores] = {}
    for name in ["reference", *instances]:
        if not (folder / name / "scores.safetensors").exists():
            raise InputError(f"{folder / name}: no scores of {name}; run its score_requests stage first")
        scores[name] = TokenScores.load_from(folder / name)
        check_same_requests(ids, scores[name], name)
        check_finite(scores[name], name)
    return scores


def estimator(damage: str, first: bool) -> str:
    """The fragility of a damage in fragility.safetensors, nats per routing weight; `first`: position 0 counted."""
    return f"taylor_{damage}" if first else f"taylor_{damage}_without_first"


def read_fragility(folder: Path, instances: list[str], first: bool) -> dict[str, dict[str, np.ndarray]]:
    """damage -> instance -> phi [L, E]; {} of a model for which decompose_damage knows none.

    Raises InputError where only some are there: then they are of another pool.
    """
    arrays = Fragility.load_from(folder).arrays
    keys = {
        (kind, name): Fragility.key(estimator(kind, first), name) for kind in DAMAGES for name in instances
    }
    missing = sorted(set(keys.values()) - set(arrays))
    if len(missing) == len(keys):
        return {}
    if missing:
        raise InputError(
            f"{folder}: no fragility '{missing[0]}' ({len(missing)} such); run decompose_damage again"
        )
    return {kind: {name: arrays[keys[kind, name]] for name in instances} for kind in DAMAGES}


def read_split(path: Path) -> pd.DataFrame:
    """id, class, split of every request [R]; both splits are filled and have two classes or more, and every class
    that has fit requests has two or more."""
    if not path.exists():
        raise InputError(f"{path}: no such file; run the stage prepare_requests first")
    frame = pd.read_parquet(path, columns=["id", "class", "split"])
    for split in ("fit", "holdout"):
        classes = sorted(set(frame.loc[frame["split"] == split, "class"]))
        if not classes:
            raise InputError(
                f"{path}: the split '{split}' is empty; change prepare_requests.holdout_share or count"
            )
        if len(classes) < 2:
            raise InputError(
                f"{path}: the split '{split}' has one class, '{classes[0]}'; budgets and damage are compared "
                "between classes, at least 2 are needed: give requests of more classes"
            )
    sizes = frame.loc[frame["split"] == "fit", "class"].value_counts().sort_index()
    if sizes.min() < 2:
        raise InputError(
            f"{path}: class '{sizes.idxmin()}' has 1 fit request; at least 2 are needed, one to predict the other "
            "from: merge the class with another (prepare_requests.min_class_size), or give more of its requests"
        )
    return frame


def _routed(params: CalibrateFwp) -> list[str]:
    """The strengths that routing alone gives."""
    return [name for name in params.strengths if name != MEASURED]


def _in_use(frame: pd.DataFrame, instances: list[str], params: CalibrateFwp) -> pd.DataFrame:
    """`frame` with log_fwp of the strength in use; of `measured` also log_fwp_<i>, and log_fwp is their mean."""
    if params.strength != MEASURED:
        return frame.assign(log_fwp=frame[f"log_fwp_{params.strength}"])
    own = {f"log_fwp_{name}": frame[f"log_fwp_{MEASURED}_{name}"] for name in instances}
    return frame.assign(**own, log_fwp=np.mean(list(own.values()), axis=0))


def _raw_signals(
    plain: dict[str, pd.DataFrame],
    own: dict[tuple[str, str], pd.DataFrame],
    instance: str,
    kind: str,
    params: CalibrateFwp,
) -> dict[str, np.ndarray]:
    """Every signal, FWP under every strength and alignment."""
    raw = {s: plain[params.align][s].to_numpy() for s in ("log_ppl", "log_length", "routing_frequency")}
    for align in ALIGNMENTS:
        raw |= {f"log_fwp_{s}_{align}": plain[align][f"log_fwp_{s}"].to_numpy() for s in _routed(params)}
        if (kind, align) in own:
            raw["separable"] = own[kind, align][f"separable_{instance}"].to_numpy()
            if MEASURED in params.strengths:
                column = f"log_fwp_{MEASURED}_{instance}"
                raw[f"log_fwp_{MEASURED}_{align}"] = own[kind, align][column].to_numpy()
    return raw


def _strength_reports(
    scorer: TokenScores, routing: PrefillRouting, phi: dict[str, np.ndarray], params: CalibrateFwp
) -> dict[str, dict[str, Any]]:
    """Of every strength; `measured` is each instance's own: measured_<instance>."""
    tokens = prompt_tokens(scorer, routing, params.align)
    reports = {s: dict(strength_report(tokens, token_strength(routing, s))) for s in _routed(params)}
    for name, own in phi.items() if MEASURED in params.strengths else ():
        weight = measured_weight(routing, own)[tokens.position]
        unweighted = np.add.reduceat(weight, tokens.offset[:-1]) == 0  # FWP is PPL there
        report = weight_report(tokens, normalised(weight, tokens.offset))
        reports[f"{MEASURED}_{name}"] = {**report, "unweighted_requests": int(unweighted.sum())}
    return reports
