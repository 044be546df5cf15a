"""Calibrate signals of the scorer's prefill against true damage; measure the predictions on holdout requests.

In: requests.parquet, the scores of the reference and of every instance of the pool, the scorer's prefill
routing, the experts' calibration load, the experts' fragility. Out: artifacts/fwp/predictions.parquet and
predictor.json (tasks/contracts.py), and metrics/fwp.json: how far each FWP is from perplexity, per instance every
predictor and baseline beside the ceiling that the noise of the damage leaves, on the holdout split and on many
halvings of all requests, and which holdout requests are unlike the fit requests. Maps are fitted, and with
`predictor: auto` chosen, on fit requests alone.
Cost: some tens of seconds, no model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tasks.console import run_step
from tasks.contracts import replacing_folder, write_json
from tasks.params import CalibrateFwp, load_params
from tasks.risk.candidates import NOMINAL, Choice, choose
from tasks.risk.damage import DAMAGES, ceiling
from tasks.risk.drift import Drift, drift_figures
from tasks.risk.holdout import prediction_figures, rank_figures, stratified_draws
from tasks.risk.holdout_table import show
from tasks.risk.maps import constant_signals, fit_class_mean
from tasks.risk.measured import Measured, estimator, measure
from tasks.risk.predictor import fit_predictor, stratified_folds, usable
from tasks.risk.resplit import resplit

VERSION = 2


def run(
    requests_file: Path,
    scores_folder: Path,
    experts_file: Path,
    decomposition_folder: Path,
    instances: list[str],
    params: CalibrateFwp,
    output_folder: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Fit every predictor on the fit requests, apply it to all; write the outputs, return the metrics."""
    measured = measure(requests_file, scores_folder, experts_file, decomposition_folder, instances, params)
    frame, fit = measured.frame, (measured.frame["split"] == "fit").to_numpy()
    classes = frame["class"].to_numpy(dtype=str)
    fold = stratified_folds(classes[fit], params.folds, params.seed)
    chosen: dict[str, Choice] = {}
    columns: dict[str, np.ndarray] = {}
    coverage: dict[str, Any] = {"nominal": NOMINAL}
    for name in instances:
        columns |= {f"{kind}_{name}": measured.damage[name, kind, params.scored] for kind in DAMAGES}
        rows, damage = measured.rows[name, params.damage], columns[f"{params.damage}_{name}"]
        found = choose(params.predictor, rows[fit], damage[fit], fold, params.min_tokens)
        chosen[name], predicted = found, found.predictor.predict(rows)
        predicted[fit] = found.out_of_fold
        columns[f"predicted_{name}"] = predicted
        columns[f"class_mean_{name}"] = fit_class_mean(rows[fit], damage[fit]).predict(rows)
        low, high = found.predictor.interval(rows[~fit]).T
        coverage[name] = float(((damage[~fit] >= low) & (damage[~fit] <= high)).mean())
    drift = Drift.of(frame.loc[fit], instances)
    outside, reasons = drift.flags(frame)
    metrics = {
        **{k: getattr(params, k) for k in ("scorer", "damage", "scored", "align", "strength", "predictor")},
        "strengths": measured.strengths,
        "absent_signals": measured.absent_signals,
        **_holdout(measured, fit, chosen, instances, params),
        "splits": resplit(measured, instances, params),
        "chosen": {name: found.to_dict() for name, found in chosen.items()},
        "coverage": coverage,
        "drift": drift_figures(frame["split"].to_numpy(dtype=str), outside, reasons, drift),
        **_counts(measured, fit, instances, params),
        "version": VERSION,
    }
    columns |= {"outside": outside, "outside_reason": reasons}
    settings = {k: getattr(params, k) for k in ("scorer", "damage", "scored", "align", "strength")}
    predictor = {
        **settings,
        "fragility": estimator(params.damage, params.position_0),
        "fit_range": drift.to_dict(),
        "instances": {name: found.predictor.to_dict() for name, found in chosen.items()},
        "version": VERSION,
    }
    with replacing_folder(output_folder) as folder:
        frame.assign(**columns).to_parquet(folder / "predictions.parquet", index=False)
        write_json(folder / "predictor.json", predictor, digits=17)
    write_json(metrics_file, metrics)
    return metrics


def _holdout(
    measured: Measured, fit: np.ndarray, chosen: dict[str, Choice], instances: list[str], params: CalibrateFwp
) -> dict[str, Any]:
    """Every predictor on the holdout requests, of both damages."""
    classes = measured.frame["class"].to_numpy(dtype=str)[~fit]
    draws = stratified_draws(classes, params.bootstrap, params.seed)
    table: dict[str, dict[str, Any]] = {kind: {} for kind in DAMAGES}
    for kind in DAMAGES:
        for name in instances:
            rows, damage = measured.rows[name, kind], measured.damage[name, kind, params.scored]
            fitted = {n: fit_predictor(n, rows[fit], damage[fit], params.min_tokens) for n in usable(rows)}
            if kind == params.damage:
                fitted[params.predictor] = chosen[name].predictor
            table[kind][name] = {
                "ceiling": ceiling(measured.halves[name, kind, params.scored][~fit], classes),
                "predictors": {
                    n: prediction_figures(own.predict(rows[~fit]), damage[~fit], classes, draws)
                    for n, own in fitted.items()
                },
                "signals": {
                    s: rank_figures(v[~fit], damage[~fit], classes, draws)
                    for s, v in measured.raw[name, kind].items()
                },
            }
    other = next(kind for kind in DAMAGES if kind != params.damage)
    return {"holdout": table[params.damage], "other_damage": {"damage": other, "holdout": table[other]}}


def _counts(
    measured: Measured, fit: np.ndarray, instances: list[str], params: CalibrateFwp
) -> dict[str, Any]:
    short = (measured.frame["prompt_tokens"] < params.min_tokens).to_numpy()
    constant = {s for n in instances for s in constant_signals(measured.rows[n, params.damage][fit & ~short])}
    return {
        "requests": {"fit": int(fit.sum()), "holdout": int((~fit).sum())},
        "short_prompts": {"fit": int((short & fit).sum()), "holdout": int((short & ~fit).sum())},
        "constant_signals": sorted(constant),
    }


def main() -> None:
    params = load_params()
    metrics = run(
        Path("artifacts/requests/requests.parquet"),
        Path("artifacts/scores"),
        Path("artifacts/experts/experts.safetensors"),
        Path("artifacts/decomposition"),
        params.quantize_instances.names,
        params.calibrate_fwp,
        Path("artifacts/fwp"),
        Path("metrics/fwp.json"),
    )
    show(metrics)


if __name__ == "__main__":
    run_step(main)
