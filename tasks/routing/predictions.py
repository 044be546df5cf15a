"""predictions.parquet (tasks/contracts.py) -> what policies may see, and the true damage that judges them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tasks.contracts import InputError
from tasks.routing.budget import Pool, budget_tau
from tasks.routing.policies import ORDERS, Evidence, class_means

DAMAGES = ("dnll", "kl")


@dataclass(frozen=True)
class Window:
    """The holdout requests of a run: R requests, I instances, B classes of requests, C budget classes."""

    evidence: Evidence
    true_damage: dict[str, np.ndarray]  # dnll | kl -> [R, I]
    tau: dict[str, np.ndarray]  # dnll | kl -> [C], both by the same rule from the fit means of their kind
    class_names: tuple[str, ...]  # [B]
    classes: np.ndarray  # [R] int, index into class_names


def read_predictions(path: Path, instances: list[str]) -> pd.DataFrame:
    """Read and check the columns that routing needs.

    Raises InputError for a missing file or column (an instance absent from the predictions), duplicate ids,
    values that are not finite, an unknown or empty split, and a holdout class without fit requests.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; run the stage calibrate_fwp first")
    frame = pd.read_parquet(path)
    signals = list(ORDERS.values())
    kinds = (*DAMAGES, "predicted", "class_mean")
    numbers = [*signals, *(f"{kind}_{instance}" for instance in instances for kind in kinds)]
    missing = [column for column in ("id", "class", "split", "outside", *numbers) if column not in frame]
    if missing:
        absent = [name for name in instances if f"predicted_{name}" in missing]
        hint = f" (not in the predictions: instance {', '.join(absent)})" if absent else ""
        raise InputError(
            f"{path}: missing columns {', '.join(missing)}{hint}; run the stage calibrate_fwp again"
        )
    if (twice := frame["id"].duplicated()).any():
        raise InputError(f"{path}: id '{frame.loc[twice, 'id'].iloc[0]}' occurs twice; ids must be unique")
    for column in numbers:
        values = frame[column].to_numpy(dtype=np.float64)
        if not np.isfinite(values).all():
            bad = frame["id"].iloc[int(np.flatnonzero(~np.isfinite(values))[0])]
            raise InputError(f"{path}: {column} of request '{bad}' is not a finite number")
    counts = frame["split"].value_counts()
    if set(counts.index) != {"fit", "holdout"}:
        got = ", ".join(sorted(map(str, counts.index))) or "none"
        raise InputError(f"{path}: the splits are {got}, expected requests in both 'fit' and 'holdout'")
    unseen = set(frame.loc[frame["split"] == "holdout", "class"]) - set(
        frame.loc[frame["split"] == "fit", "class"]
    )
    if unseen:
        raise InputError(f"{path}: class '{min(unseen)}' has holdout requests but no fit requests")
    return frame


def make_window(
    frame: pd.DataFrame,
    pool: Pool,
    damage: Literal["kl", "dnll"],
    budget: Literal["relative", "paper", "absolute"],
    value: float,
    scope: Literal["overall", "class"],
) -> Window:
    """Split a checked frame into fit knowledge and holdout requests to route; tau comes from fit means."""
    fit, routed = (frame.loc[frame["split"] == split] for split in ("fit", "holdout"))
    names = tuple(sorted(set(fit["class"])))
    class_index = {name: c for c, name in enumerate(names)}
    budget_names = names if scope == "class" else ("overall",)

    def per_instance(part: Any, kind: str) -> np.ndarray:
        return np.stack(
            [part[f"{kind}_{name}"].to_numpy(dtype=np.float64) for name in pool.instances], axis=1
        )

    def index(part: Any) -> np.ndarray:
        return np.array([class_index[name] for name in part["class"]], dtype=np.int64)

    def budget_index(part: Any) -> np.ndarray:
        return index(part) if scope == "class" else np.zeros(len(part), dtype=np.int64)

    def signals(part: Any) -> dict[str, np.ndarray]:
        return {name: part[name].to_numpy(dtype=np.float64) for name in ORDERS.values()}

    tau = {}
    for kind in DAMAGES:
        means = class_means(per_instance(fit, kind), budget_index(fit), len(budget_names))
        tau[kind] = budget_tau(budget, value, pool, means)
    evidence = Evidence(
        pool=pool,
        class_names=budget_names,
        tau=tau[damage],
        fit_classes=budget_index(fit),
        fit_damage=per_instance(fit, damage),
        fit_signals=signals(fit),
        ids=tuple(routed["id"].astype(str)),
        classes=budget_index(routed),
        signals=signals(routed),
        predicted=per_instance(routed, "predicted"),
        class_mean=per_instance(routed, "class_mean"),
        outside=routed["outside"].to_numpy(dtype=bool),
        guards={},
    )
    true = {kind: per_instance(routed, kind) for kind in DAMAGES}
    return Window(evidence, true, tau, names, index(routed))
