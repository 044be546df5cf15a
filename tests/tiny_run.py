"""A workspace that runs the whole DAG on the tiny model: the project's own params.yaml, made small."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]

SMALL = {
    "runtime.threads": 1,
    "prepare_requests.source": "synthetic",
    "prepare_requests.count": 96,
    "prepare_requests.mean_tokens": 160,
    "prepare_requests.prompt_tokens": 192,
    "prepare_requests.response_tokens": 32,
    "prepare_requests.long_prompt_tokens": 32,
    "prepare_requests.long_share": 0.0,
    "prepare_requests.calibration_tokens": 1024,
    "prepare_requests.perplexity_tokens": 256,
    "prepare_requests.questions": 8,
    "prepare_requests.question_mean_tokens": 128,
    "quantize_instances.method": "rtn",
    "quantize_instances.group_size": 0,
    "build_variants.variants.rq.group_size": 32,
    "calibrate_fwp.min_tokens": 8,
    "calibrate_fwp.bootstrap": 50,
    "calibrate_fwp.splits": 4,
    "solve_routing.replicates": 19,
    "measure_throughput.prefill_tokens": 32,
    "measure_throughput.decode_tokens": 2,
    "measure_throughput.repeats": 2,
    "evaluate_benchmarks.limit.mmlu_packaged": 8,
}


def stages(params: dict[str, Any]) -> list[tuple[str, str | None]]:
    """(step, item) of every stage, in an order that respects the DAG."""
    widths = [str(bits) for bits in params["quantize_instances"]["bits"]]
    instances = [f"W{bits}" for bits in widths]
    variants = list(params["build_variants"]["variants"])
    return [
        ("prepare_reference", None),
        ("prepare_requests", None),
        *(("quantize_instances", bits) for bits in widths),
        ("measure_experts", None),
        *(("build_variants", name) for name in variants),
        *(("score_requests", name) for name in ["reference", *instances]),
        ("decompose_damage", None),
        ("calibrate_fwp", None),
        ("solve_routing", None),
        ("measure_throughput", None),
        *(("evaluate_benchmarks", name) for name in ["reference", *instances, *variants]),
        ("track_runs", None),
    ]


def small_params(**overrides: Any) -> dict[str, Any]:
    """params.yaml with the SMALL values and then `overrides` (dots written as double underscores) applied."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for path, value in {
        **SMALL,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }.items():
        *sections, key = path.split(".")
        place = params
        for section in sections:
            place = place[section]
        place[key] = value
    return params


def make_workspace(folder: Path, params: dict[str, Any]) -> Path:
    """A folder with params.yaml and README's markers, where steps run in-process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    shutil.copy(ROOT / "README.md", folder)
    (folder / "mlruns").mkdir(exist_ok=True)
    return folder
