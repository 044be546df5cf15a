"""Calibrate signals of the scorer's prefill against true damage; measure the predictions on holdout requests.

In: requests.parquet, the scores of the reference and of every instance of the pool, the scorer's prefill
routing, the experts' calibration load. Out: artifacts/fwp/predictions.parquet and predictor.json
(tasks/contracts.py), and metrics/fwp.json: how far each FWP is from perplexity, per instance every
predictor and baseline beside the ceiling that the noise of the damage leaves. Maps are fitted on
fit requests alone.
Cost: seconds, no model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tasks.console import run_step
from tasks.contracts import replacing_folder, write_json
from tasks.params import CalibrateFwp, load_params
from tasks.risk.damage import DAMAGES, ceiling
from tasks.risk.holdout import prediction_figures, rank_figures, stratified_draws
from tasks.risk.holdout_table import show
from tasks.risk.maps import SIGNALS, Rows, constant_signals
from tasks.risk.measured import Measured, measure
from tasks.risk.predictor import PREDICTORS, Predictor, fit_predictor, stratified_folds

VERSION = 1


def run(
    requests_file: Path,
    scores_folder: Path,
    experts_file: Path,
    instances: list[str],
    params: CalibrateFwp,
    output_folder: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Fit every predictor on the fit requests, apply it to all; write the outputs, return the metrics."""
    measured = measure(requests_file, scores_folder, experts_file, instances, params)
    frame, fit = measured.frame, (measured.frame["split"] == "fit").to_numpy()
    rows = Rows.of(frame)
    classes = rows.classes[~fit]
    fold = stratified_folds(rows.classes[fit], params.folds, params.seed)
    draws = stratified_draws(classes, params.bootstrap, params.seed)
    table: dict[str, dict[str, Any]] = {kind: {} for kind in DAMAGES}
    chosen: dict[str, Predictor] = {}
    columns: dict[str, np.ndarray] = {}
    for (instance, kind), damage in measured.damage.items():
        columns[f"{kind}_{instance}"] = damage
        figures = {}
        for name in PREDICTORS:
            fitted, out_of_fold = fit_predictor(name, rows[fit], damage[fit], fold, params.min_tokens)
            predicted = np.empty(len(frame))
            predicted[fit], predicted[~fit] = out_of_fold, fitted.predict(rows[~fit])
            figures[name] = prediction_figures(predicted[~fit], damage[~fit], classes, draws)
            if kind == params.damage and name == params.predictor:
                chosen[instance], columns[f"predicted_{instance}"] = fitted, predicted
                columns[f"class_mean_{instance}"] = fitted.class_mean.predict(rows)
        table[kind][instance] = {
            "ceiling": ceiling(measured.halves[instance, kind][~fit], classes),
            "predictors": figures,
            "signals": {
                s: rank_figures(v[~fit], damage[~fit], classes, draws) for s, v in measured.raw.items()
            },
        }
    metrics = _metrics(measured, table, fit, params)
    with replacing_folder(output_folder) as folder:
        frame.assign(**columns).to_parquet(folder / "predictions.parquet", index=False)
        write_json(folder / "predictor.json", _predictor_json(chosen, params), digits=17)
    write_json(metrics_file, metrics)
    return metrics


def _metrics(
    measured: Measured, table: dict[str, dict[str, Any]], fit: np.ndarray, params: CalibrateFwp
) -> dict[str, Any]:
    other = next(kind for kind in DAMAGES if kind != params.damage)
    short = (measured.frame["prompt_tokens"] < params.min_tokens).to_numpy()
    return {
        "scorer": params.scorer,
        "damage": params.damage,
        "scored": params.scored,
        "align": params.align,
        "strength": params.strength,
        "predictor": params.predictor,
        "strengths": measured.strengths,
        "holdout": table[params.damage],
        "other_damage": {"damage": other, "holdout": table[other]},
        "requests": {"fit": int(fit.sum()), "holdout": int((~fit).sum())},
        "short_prompts": {"fit": int((short & fit).sum()), "holdout": int((short & ~fit).sum())},
        "constant_signals": constant_signals(Rows.of(measured.frame)[fit & ~short], SIGNALS),
        "version": VERSION,
    }


def _predictor_json(chosen: dict[str, Predictor], params: CalibrateFwp) -> dict[str, Any]:
    settings = {k: getattr(params, k) for k in ("scorer", "damage", "scored", "align", "strength")}
    return {
        **settings,
        "version": VERSION,
        "instances": {name: fitted.to_dict() for name, fitted in chosen.items()},
    }


def main() -> None:
    params = load_params()
    metrics = run(
        Path("artifacts/requests/requests.parquet"),
        Path("artifacts/scores"),
        Path("artifacts/experts/experts.safetensors"),
        params.quantize_instances.names,
        params.calibrate_fwp,
        Path("artifacts/fwp"),
        Path("metrics/fwp.json"),
    )
    show(metrics)


if __name__ == "__main__":
    run_step(main)
