"""What an instance costs a request, and how well that can be measured at all.

    dnll = mean over the scored tokens of NLL_i - NLL_R, signed, never clipped
    kl   = mean over the same positions of KL(p_R || p_i) >= 0

Both in nats per token (arXiv 2609.12550, section on damage). One response is a small sample of tokens: the
split-half reliability says how much of the spread between requests is signal, and so bounds every predictor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import InputError, TokenScores

DAMAGES = ("dnll", "kl")
PARTS = ("response", "prompt")


def check_same_requests(ids: list[str], scores: TokenScores, name: str) -> None:
    """Raise InputError unless the scores of model `name` are of exactly the requests `ids`, in order."""
    if scores.ids == ids:
        return
    missing, extra = sorted(set(ids) - set(scores.ids)), sorted(set(scores.ids) - set(ids))
    what = (
        f"request '{missing[0]}' has no score ({len(missing)} such)"
        if missing
        else f"score '{extra[0]}' has no request ({len(extra)} such)"
        if extra
        else "their order differs"
    )
    raise InputError(
        f"scores of {name} do not match requests.parquet: {what}; run its score_requests stage again"
    )


def check_finite(scores: TokenScores, name: str) -> None:
    """Raise InputError where a scored loss or divergence of model `name` is no finite number."""
    for kind, values in (("loss", scores.nll), ("kl", scores.kl)):
        bad = [
            own
            for row, own in enumerate(scores.ids)
            if values is not None
            and not all(np.isfinite(values[scores.scored(row, part)]).all() for part in PARTS)
        ]
        if bad:
            raise InputError(
                f"scores of {name}: a {kind} of request '{bad[0]}' is NaN or infinite ({len(bad)} such requests of "
                f"{len(scores.ids)}); the model overflows or its weights are broken: score it in float32 "
                "(score_requests.compute_dtype), or check its quantization"
            )


def token_damage(reference: TokenScores, instance: TokenScores, damage: str) -> np.ndarray:
    """Damage of every prediction [N], nats."""
    if not np.array_equal(reference.offset, instance.offset):
        raise InputError(
            "the instance was scored on other token sequences than the reference; score both again"
        )
    if damage == "dnll":
        return instance.nll.astype(np.float64) - reference.nll.astype(np.float64)
    if damage == "kl":
        if instance.kl is None:
            raise ValueError("these scores hold no kl: they are the reference's")
        return instance.kl.astype(np.float64)
    raise ValueError(f"damage is '{damage}', expected one of {DAMAGES}")


def request_means(values: np.ndarray, scores: TokenScores, part: str) -> np.ndarray:
    """Mean of `values` [N] over the scored predictions of each request [R]; part "response" or "prompt"."""
    return np.array([values[scores.scored(row, part)].mean() for row in range(len(scores.ids))])


def half_means(values: np.ndarray, scores: TokenScores, part: str) -> np.ndarray:
    """Means over the even and over the odd scored tokens [R, 2]; NaN where a request has only one."""
    halves = np.full((len(scores.ids), 2), np.nan)
    for row in range(len(scores.ids)):
        chosen = values[scores.scored(row, part)]
        if len(chosen) > 1:
            halves[row] = chosen[0::2].mean(), chosen[1::2].mean()
    return halves


def scored_tokens(scores: TokenScores, part: str) -> np.ndarray:
    """Number of scored tokens of each request [R]."""
    slices = [scores.scored(row, part) for row in range(len(scores.ids))]
    return np.array([chosen.stop - chosen.start for chosen in slices], dtype=np.int64)


def spearman_brown(rho: float) -> float:
    """Reliability of the whole from the correlation of its halves: rho* = 2 rho / (1 + rho)."""
    return 2 * rho / (1 + rho)


def split_half(halves: np.ndarray) -> float | None:
    """Pearson correlation over requests of the two columns of `halves` [R, 2]; None where it is undefined."""
    halves = halves[~np.isnan(halves).any(axis=1)]
    if len(halves) < 3 or min(halves.std(axis=0)) == 0:
        return None
    return float(np.corrcoef(halves.T)[0, 1])


def ceiling(halves: np.ndarray, classes: np.ndarray) -> dict[str, object]:
    """The best that any predictor could reach, from the halves [R, 2] of the requests that it is judged on.

    R2 cannot pass rho_star and a correlation cannot pass correlation = sqrt(rho_star); `within` is the same
    for requests of one class (class means taken off). measurable is false where rho <= 0 or undefined: the
    damage is then mostly noise and no figure about it means much. halved_requests: those with at least two
    scored tokens.
    """
    kept = ~np.isnan(halves).any(axis=1)
    halves, classes = halves[kept], classes[kept]
    centred = halves.copy()
    for name in np.unique(classes):
        centred[classes == name] -= centred[classes == name].mean(axis=0)
    whole, within = _ceiling_of(split_half(halves)), _ceiling_of(split_half(centred))
    return {**whole, "within": within, "halved_requests": len(halves)}


def _ceiling_of(rho: float | None) -> dict[str, object]:
    if rho is None:
        return {"measurable": False}
    if rho <= 0:
        return {"rho": rho, "measurable": False}
    star = spearman_brown(rho)
    return {"rho": rho, "rho_star": star, "correlation": float(np.sqrt(star)), "measurable": True}


def damage_summary(scores: TokenScores, reference: TokenScores, frame: pd.DataFrame) -> dict[str, Any]:
    """Mean damage of the responses per split and class, nats per token, and its split-half reliability."""
    tokens = {damage: token_damage(reference, scores, damage) for damage in DAMAGES}
    means = pd.DataFrame(
        {damage: request_means(values, scores, "response") for damage, values in tokens.items()}
    )
    means = pd.concat([frame.reset_index(drop=True), means], axis=1)

    def averages(rows: pd.DataFrame) -> dict[str, float]:
        return {f"{damage}_mean": float(rows[damage].to_numpy().mean()) for damage in DAMAGES}

    metrics: dict[str, Any] = {}
    for split, rows in [("all", means), *means.groupby("split", sort=True)]:
        classes = {
            name: {**averages(part), "requests": len(part)} for name, part in rows.groupby("class", sort=True)
        }
        metrics[str(split)] = {**averages(rows), "classes": classes, "requests": len(rows)}
    reliability: dict[str, float] = {}
    for damage, values in tokens.items():
        rho = split_half(half_means(values, scores, "response"))
        if rho is not None:
            reliability[damage] = rho
            if rho > 0:
                reliability[f"{damage}_star"] = spearman_brown(rho)
    return {**metrics, "reliability": reliability}
