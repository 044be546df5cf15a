"""Made-up metrics of decompose_damage and of calibrate_fwp's many splits, for tests of report and tracking."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import write_json
from tasks.risk.decomposition import TERMS, decompose, swap_terms, term_figures
from tasks.risk.holdout import stratified_draws


def decomposition(folder: Path, metrics: Path, frame: pd.DataFrame, means: dict[int, float]) -> None:
    """Ten requests, five blocks, four of the ten pairs: a made loss of single blocks and pairs."""
    rows, instances, tables = np.arange(10), {}, []
    own = frame.iloc[rows]
    fit = (own["split"] == "fit").to_numpy()
    for bits, mean in means.items():
        rng = np.random.default_rng(bits)
        slope, bend = rng.gamma(4, mean / 20, (5, 10)), rng.normal(0, mean / 40, (5, 5, 10))

        def loss(blocks, routes, slope=slope, bend=bend, mean=mean):
            pairs = [bend[a, b] for a in blocks for b in blocks if a < b]
            return slope[sorted(blocks)].sum(axis=0) + sum(pairs, np.zeros(10)) + (routes == "free") * (
                0.1 * mean * (len(blocks) == 5)
            )  # fmt: skip

        made = decompose(swap_terms(loss, 5, pairs=4), np.ones((5, 10)), fit)
        draws = stratified_draws(np.zeros(5), 50, 0)
        ways = {
            kind: {"layers": {"15": 0.7}, "mean": 0.7, "all": 0.7}
            for kind in ("with_first", "without_first", "all_tokens")
        }
        taylor = {kind: {**found, "wrong_sign": 0, "worst_factor": 3.25} for kind, found in ways.items()}
        phi = {"with_first": 0.25 * mean, "without_first": 0.125 * mean}
        super_expert = {
            "layer": 1, "expert": 7, "router_row_norm": 1.25,
            "phi": {"taylor_kl": phi, "taylor_dnll": phi, "output_error": phi},
            "single": {"kl": mean / 2, "dnll": mean / 3}, "share": {"kl": 0.5, "dnll": 1 / 3},
            "single_without_first": {"kl": mean / 100, "dnll": mean / 90},
        }  # fmt: skip
        instances[f"W{bits}"] = {
            "terms": term_figures(made, np.flatnonzero(~fit), draws),
            "agreement": {"taylor_kl": taylor, "taylor_dnll": ways, "output_error": ways,
                          "router_row_norm": {"layers": {"15": -0.2}, "mean": -0.2, "all": -0.2}},
            "super_experts": [super_expert, {**super_expert, "expert": 2, "share": {}}],
            "total_on_calibration": {"kl": mean, "dnll": mean},
            "cost": {"decomposition": 9000.0, "experts": 4000.0},
        }  # fmt: skip
        columns = ["instance", "id", "split", "total", *TERMS, "sampling_error"]
        named = {"instance": f"W{bits}", "id": own["id"], "split": own["split"]}
        tables.append(made.frame().assign(**named)[columns])
    (folder / "artifacts/decomposition").mkdir(parents=True, exist_ok=True)
    pd.concat(tables).to_parquet(folder / "artifacts/decomposition/terms.parquet", index=False)
    free, taylor = {"forward_tokens": 0, "backward_tokens": 0}, {"forward_tokens": 4096}
    write_json(
        metrics / "decomposition.json",
        {
            "supported": True, "version": 1, "level": "layer", "damage": "kl", "scored": "response",
            "requests": {"fit": 5, "holdout": 5, "tokens": 1500},
            "calibration": {"sequences": 15, "tokens": 4096, "swap_sequences": 2, "swap_tokens": 455,
                            "swap_layers": [15]},
            "experts_without_tokens": {"with_first": 0, "without_first": 3},
            "unrouted_blocks": dict.fromkeys(instances, 0),
            "instances": instances,
            "cost": {
                "forward_tokens": 43096.0, "backward_tokens": 8192,
                "estimators": {
                    "swap": {"forward_tokens": 54600.5, "backward_tokens": 0},
                    "taylor": {**taylor, "backward_tokens": 8192},
                    "output_error": {**taylor, "backward_tokens": 0}, "router_row_norm": free,
                },
            },
        },
    )  # fmt: skip


def splits(row: Callable[[float], dict[str, float]], widths: list[int]) -> dict[str, Any]:
    """What calibrate_fwp reports over many splits; W3's ridge beats the class mean, nothing else does."""

    def figures(value: float, gain: float) -> dict[str, Any]:
        gains = {"within_gain": gain, "within_gain_low": gain - 0.1, "within_gain_high": gain + 0.1}
        return {**row(value), **gains, "r2_gain": 0.01, "beats_class_mean": gain > 0.1}

    def target(gain: float) -> dict[str, Any]:
        class_mean = {key: value for key, value in row(0.31).items() if "within" not in key}
        return {
            "ceiling": {"rho": 2 / 3, "rho_star": 0.8, "correlation": math.sqrt(0.8), "measurable": True},
            "predictors": {"class_mean": class_mean, "ridge": figures(0.5, gain)},
            "adds": {"class": class_mean, "log_length": row(0.35), "separable": row(0.45)},
        }

    names = [f"W{bits}" for bits in widths]
    targets = {
        f"{kind}_{part}": {
            name: target(0.2 if (kind, part, name) == ("kl", "response", "W3") else 0.05) for name in names
        }
        for kind in ("kl", "dnll")
        for part in ("response", "prompt")
    }
    beats = {
        key: {
            name: [own for own, found in table["predictors"].items() if found.get("beats_class_mean")]
            for name, table in tables.items()
        }
        for key, tables in targets.items()
    }
    return {"count": 50, "requests": {"fit": 84, "judged": 84}, "targets": targets, "beats": beats}
