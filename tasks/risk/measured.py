"""Everything that scoring measured, read from its artifacts and checked, before any map is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import ExpertStatistics, InputError, PrefillRouting, TokenScores
from tasks.params import CalibrateFwp
from tasks.risk.damage import (
    DAMAGES,
    check_same_requests,
    half_means,
    request_means,
    scored_tokens,
    token_damage,
)
from tasks.risk.features import prefill_signals
from tasks.risk.fwp import ALIGNMENTS, prompt_tokens, strength_report, token_strength


@dataclass(frozen=True)
class Measured:
    """All that is known before anything is fitted."""

    frame: pd.DataFrame  # [R] id, class, split, prompt_tokens, scored_tokens, the signals
    damage: dict[tuple[str, str], np.ndarray]  # (instance, dnll | kl) -> [R]
    halves: dict[tuple[str, str], np.ndarray]  # the same -> [R, 2]
    raw: dict[str, np.ndarray]  # signals to rank by as they are, every strength and alignment -> [R]
    strengths: dict[str, dict[str, Any]]


def measure(
    requests_file: Path, scores_folder: Path, experts_file: Path, instances: list[str], params: CalibrateFwp
) -> Measured:
    """Read and check; InputError on missing scores, ids that do not match, one class, an empty split."""
    frame = read_split(requests_file)
    ids = frame["id"].tolist()
    scores: dict[str, TokenScores] = {}
    for name in ["reference", *instances]:
        if not (scores_folder / name / "scores.safetensors").exists():
            raise InputError(
                f"{scores_folder / name}: no scores of {name}; run its score_requests stage first"
            )
        scores[name] = TokenScores.load_from(scores_folder / name)
        check_same_requests(ids, scores[name], name)
    scorer, reference = scores[params.scorer], scores["reference"]
    routing = PrefillRouting.load_from(scores_folder / params.scorer)
    load = ExpertStatistics.load_from(experts_file).load.astype(np.float64)
    signals = {
        align: prefill_signals(scorer, routing, load, params.strengths, align, params.strength)
        for align in ALIGNMENTS
    }
    plain = signals[params.align]
    raw = {name: plain[name].to_numpy() for name in ("log_ppl", "log_length", "routing_frequency")}
    for align in ALIGNMENTS:
        raw |= {f"log_fwp_{s}_{align}": signals[align][f"log_fwp_{s}"].to_numpy() for s in params.strengths}
    tokens = prompt_tokens(scorer, routing, params.align)
    strengths = {s: dict(strength_report(tokens, token_strength(routing, s))) for s in params.strengths}
    frame["prompt_tokens"] = scorer.prompt_length
    frame["scored_tokens"] = scored_tokens(scorer, params.scored)
    damage, halves = {}, {}
    for name in instances:
        for kind in DAMAGES:
            values = token_damage(reference, scores[name], kind)
            damage[name, kind] = request_means(values, scores[name], params.scored)
            halves[name, kind] = half_means(values, scores[name], params.scored)
    return Measured(pd.concat([frame, plain], axis=1), damage, halves, raw, strengths)


def read_split(path: Path) -> pd.DataFrame:
    """id, class, split of every request [R]; both splits are filled and have two classes or more."""
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
    return frame
