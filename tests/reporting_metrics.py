"""Made-up metrics/ and predictions of the default configuration's shape, for tests of report and tracking."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.contracts import write_json
from tests.reporting_damage import decomposition, splits

CLASSES = ("bbh", "code", "documentation", "gsm8k", "mmlu_humanities", "mmlu_social_sciences", "mmlu_stem")
LAYERS, EXPERTS = list(range(1, 30, 2)), 16
DAMAGE = {2: 0.94, 3: 0.18, 4: 0.051}
POLICIES = {  # shares of W2, W3, W4
    "static_W2": (1, 0, 0),
    "static_W3": (0, 1, 0),
    "static_W4": (0, 0, 1),
    "request_agnostic": (0, 0.7582, 0.2418),
    "capacity_proportional": (6 / 13, 4 / 13, 3 / 13),
    "class_mean": (0.02, 0.80, 0.18),
    "order_length": (0, 0.74, 0.26),
    "order_routing_frequency": (0, 0.75, 0.25),
    "order_ppl": (0, 0.78, 0.22),
    "order_fwp": (0, 0.79, 0.21),
    "lp_fwp": (0.03, 0.82, 0.15),
    "true_loss": (0.09, 0.80, 0.11),
}


def build(folder: Path, seed: int = 0) -> Path:
    """Write metrics/ and artifacts/fwp/predictions.parquet under `folder`."""
    rng = np.random.default_rng(seed)
    metrics = folder / "metrics"
    write_json(
        metrics / "reference.json",
        {
            "name": "reference",
            "source": "smollm2-moe",
            "model_type": "qwen2_moe",
            "moe_layers": len(LAYERS),
            "experts": EXPERTS,
            "top_k": 4,
            "parameters": 134_515_008,
            "expert_parameters": 26_542_080,
            "size_bytes": 538_060_032,
            "size_gib": 538_060_032 / 2**30,
            "stored_bits": 32.0,
            "nll_dense": 3.03,
            "nll_upcycled": 3.34,
            "version": 1,
        },
    )
    frame = predictions(rng)
    (folder / "artifacts/fwp").mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / "artifacts/fwp/predictions.parquet")
    write_json(
        metrics / "requests.json",
        {
            "source": "packaged",
            "requests": len(frame),
            "fit": 84,
            "holdout": 84,
            "merged": {"mmlu_other": "mmlu_stem"},
            "classes": {
                name: {"fit": 12, "holdout": 12, "prompt_tokens_mean": 120.5, "scored_tokens_mean": 31.25}
                for name in CLASSES
            },
            "long_share": 0.52,
            "mean_tokens": 151.3,
            "calibration_tokens": 4096,
            "perplexity_tokens": 4000,
            "questions": 100,
            "version": 1,
        },
    )
    _models(metrics, frame, rng)
    _experts(metrics, rng)
    _fwp(metrics)
    decomposition(folder, metrics, frame, DAMAGE)
    _routing(metrics, frame)
    return folder


def predictions(rng: np.random.Generator) -> pd.DataFrame:
    """168 requests whose damage grows with a signal, as predictions.parquet holds them."""
    names = [name for name in CLASSES for _ in range(24)]
    size = len(names)
    log_ppl = rng.normal(2.4, 0.4, size)
    frame = pd.DataFrame(
        {
            "id": [f"{name}/{row}" for row, name in enumerate(names)],
            "class": names,
            "split": ["fit", "holdout"] * (size // 2),
            "prompt_tokens": rng.integers(40, 220, size),
            "scored_tokens": rng.integers(8, 48, size),
            "log_ppl": log_ppl,
            "log_length": np.log(rng.integers(40, 220, size)),
            "routing_frequency": rng.uniform(0.05, 0.1, size),
            "log_fwp_gate_prob": log_ppl + rng.normal(0, 0.03, size),
            "log_fwp_router_row_norm": log_ppl + rng.normal(0, 0.02, size),
        }
    )
    frame["log_fwp"] = frame["log_fwp_router_row_norm"]
    shift = {name: rng.normal(1, 0.2) for name in CLASSES}
    for bits, mean in DAMAGE.items():
        level = mean * np.array([shift[name] for name in names]) * np.exp(0.6 * (log_ppl - 2.4))
        frame[f"kl_W{bits}"] = level * rng.gamma(8, 1 / 8, size)
        frame[f"dnll_W{bits}"] = frame[f"kl_W{bits}"] + rng.normal(0, 0.08, size)
        frame[f"predicted_W{bits}"] = level
        frame[f"class_mean_W{bits}"] = frame.groupby("class")[f"kl_W{bits}"].transform("mean")
    return frame


def _models(metrics: Path, frame: pd.DataFrame, rng: np.random.Generator) -> None:
    write_json(
        metrics / "scores/reference.json",
        {"name": "reference", "nll_mean": 1.9, "tokens": 4321, "version": 1},
    )
    speed = {"execution": "dequantized execution: no speed gain on this machine", "version": 1}
    for name, bits, accuracy in [
        ("reference", 32, 0.37),
        ("W4", 4, 0.36),
        ("W3", 3, 0.34),
        ("W2", 2, 0.27),
        ("rq", 8, 0.38),
    ]:
        speed[name] = {
            "prefill_tokens_per_s": {"median": 980.0 - bits, "low": 930.0, "high": 1005.0},
            "decode_tokens_per_s": {"median": 21.5, "low": 20.25, "high": 22.0},
        }
        task = {"accuracy": accuracy, "stderr": 0.048, "n": 100, "log_prob_right": -1.4}
        if name != "reference":
            task |= {
                "difference": accuracy - 0.37,
                "difference_stderr": 0.03,
                "p_value": 0.6,
                "smallest_visible_difference": 0.084,
            }
        write_json(
            metrics / f"benchmarks/{name}.json",
            {
                "name": name,
                "tasks": {
                    "mmlu_packaged": task,
                    "heldout_perplexity": {"nll": 2.9 + DAMAGE.get(bits, 0), "tokens": 4000},
                },
                "lis": (1.6 + 0.3 * rng.random(len(LAYERS))).tolist(),
                "lis_mean": 1.73,
                "version": 1,
            },
        )
        if bits > 4:
            continue
        bytes_now = 431_891_712 + 26_542_080 * (bits + 0.5) / 8
        write_json(
            metrics / f"instances/{name}.json",
            {
                "name": name,
                "bits": bits,
                "method": "hqq",
                "group_size": 64,
                "symmetric": False,
                "exportable": False,
                "blocks": 240,
                "matrices": 720,
                "expert_parameters": 26_542_080,
                "expert_bytes": 1,
                "ideal_expert_bytes": 1,
                "rest_bytes": 431_891_712,
                "size_bytes": int(bytes_now),
                "size_gib": bytes_now / 2**30,
                "ideal_gib": 0.4,
                "stored_bits": bits + 0.5,
                "relative_error": 0.6 / 2**bits,
                "version": 1,
            },
        )
        parts = {"all": frame} | dict(list(frame.groupby("split")))
        write_json(
            metrics / f"scores/{name}.json",
            {
                "name": name,
                "reliability": {"dnll": 0.2, "kl": 0.8},
                "version": 1,
                **{
                    part: {
                        **damage(rows, f"W{bits}"),
                        "classes": {
                            label: {**damage(some, f"W{bits}"), "requests": len(some)}
                            for label, some in rows.groupby("class")
                        },
                    }
                    for part, rows in parts.items()
                },
            },
        )
    write_json(metrics / "throughput.json", speed)


def damage(rows: pd.DataFrame, name: str) -> dict[str, float]:
    return {f"{kind}_mean": float(rows[f"{kind}_{name}"].mean()) for kind in ("dnll", "kl")}


def _experts(metrics: Path, rng: np.random.Generator) -> None:
    before = rng.gamma(3, 300, (len(LAYERS), EXPERTS)).astype(int)
    heaviest = before.argmax(1)
    rows = np.arange(len(LAYERS))
    after = np.concatenate([before, np.zeros((len(LAYERS), 1), int)], 1)
    after[rows, -1] = before[rows, heaviest] // 2
    after[rows, heaviest] -= after[rows, -1]
    lis = EXPERTS * before.max(1) / before.sum(1)
    logical = EXPERTS * after.max(1) / after.sum(1)
    write_json(
        metrics / "experts.json",
        {
            "layers": LAYERS,
            "tokens": 4096,
            "lis": lis,
            "lis_mean": lis.mean(),
            "load_importance_spearman": 0.7,
            "lis_batch": {"mean": lis * 1.1, "quantile": lis * 1.3, "max": lis * 1.4},
            "version": 1,
        },
    )
    write_json(
        metrics / "variants/rq.json",
        {
            "name": "rq",
            "size_bytes": 520_000_000,
            "size_bytes_before": 538_060_032,
            "size_gib": 520_000_000 / 2**30,
            "stored_bits": 24.0,
            "layers": LAYERS,
            "lis_before": lis,
            "lis_physical": logical * 17 / 16,
            "lis_logical": logical,
            "lis_mean": logical.mean(),
            "lis_mean_before": lis.mean(),
            "nll": 2.9003,
            "nll_reference": 2.9,
            "load_before": before,
            "load_after": after,
            "replicas": 1,
            "version": 1,
        },
    )


def _fwp(metrics: Path) -> None:
    def figures(name: str, value: float) -> dict[str, float]:
        return {name: value, f"{name}_low": value - 0.12, f"{name}_high": value + 0.12}

    def row(spearman: float) -> dict[str, float]:
        return {
            **figures("spearman", spearman),
            **figures("spearman_within", spearman - 0.1),
            **figures("auroc", 0.5 + spearman / 2),
            **figures("r2", spearman**2),
            **figures("slope", 0.9),
        }

    names = {
        "ridge_fwp": 0.52,
        "isotonic": 0.5,
        "class_mean": 0.31,
        "ridge_ppl": 0.53,
        "isotonic_ppl": 0.5,
        "ridge_length": 0.05,
        "ridge_routing_frequency": 0.12,
    }
    write_json(
        metrics / "fwp.json",
        {
            "scorer": "W4",
            "damage": "kl",
            "predictor": "ridge_fwp",
            "scored": "response",
            "short_prompts": {"fit": 2, "holdout": 1},
            "splits": splits(row, list(DAMAGE)),
            "version": 1,
            "strengths": {
                "gate_prob": {"std_weight": 0.031, "correlation_log_ppl": 0.997, "equals_ppl": False},
                "router_row_norm": {"std_weight": 0.0004, "correlation_log_ppl": 0.99999, "equals_ppl": True},
            },
            "holdout": {
                f"W{bits}": {
                    "ceiling": {
                        "rho": 2 / 3,
                        "rho_star": 0.8,
                        "correlation": math.sqrt(0.8),
                        "measurable": True,
                        "within": {"rho": -0.1, "measurable": False},
                    },
                    "predictors": {name: row(value) for name, value in names.items()},
                }
                for bits in DAMAGE
            },
        },
    )


def _routing(metrics: Path, frame: pd.DataFrame) -> None:
    holdout = frame[frame["split"] == "holdout"]
    tau = {kind: {bits: holdout[f"{kind}_W{bits}"].mean() for bits in DAMAGE} for kind in ("dnll", "kl")}
    budget = {kind: means[4] + 0.758 * (means[3] - means[4]) for kind, means in tau.items()}
    policies = {}
    for name, shares in POLICIES.items():
        mix = {
            kind: sum(share * tau[kind][bits] for share, bits in zip(shares, DAMAGE, strict=True))
            for kind in tau
        }
        multiplier = sum(share * 4 / bits for share, bits in zip(shares, DAMAGE, strict=True))
        policies[name] = {
            "multiplier": multiplier,
            "multiplier_fixed_work": 1 / sum(s * b / 4 for s, b in zip(shares, DAMAGE, strict=True)),
            "dnll_mean": mix["dnll"],
            "kl_mean": mix["kl"],
            "predicted": name not in ("true_loss", "static_W4"),
            "budget_kept": bool(mix["kl"] <= budget["kl"]),
            "budget_kept_dnll": bool(mix["dnll"] <= budget["dnll"]),
            "shares": {f"W{bits}": share for bits, share in zip(DAMAGE, shares, strict=True)},
            "classes": {
                label: {
                    "dnll_mean": mix["dnll"] * scale,
                    "kl_mean": mix["kl"] * scale,
                    "tau": budget["kl"],
                    "kept": bool(mix["kl"] * scale <= budget["kl"]),
                }
                for label, scale in zip(CLASSES, np.linspace(0.7, 1.3, 7), strict=True)
            },
        }
    write_json(
        metrics / "routing.json",
        {
            "mode": "serve_all",
            "reward": "bits",
            "damage": "kl",
            "policies": policies,
            "version": 1,
            "budget": {
                "kind": "relative",
                "value": 0.758,
                "scope": "overall",
                "tau": {"overall": budget["kl"]},
                "tau_dnll": {"overall": budget["dnll"]},
            },
            "prices": {"overall": 1.7},
            "certificate": {
                "primal": 1.31,
                "dual": 1.31,
                "gap": 2e-16,
                "primal_residual": 0.0,
                "dual_residual": 0.0,
                "valid": True,
            },
            "published": {
                "request_agnostic": {
                    "multiplier": {"paper": 1.2527, "from_means": 1.2527, "measured": 1.253}
                },
                "order_fwp_endpoint": {"multiplier": {"paper": 1.094, "from_means": 1.0938}},
            },
        },
    )
