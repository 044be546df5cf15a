"""Result tables: metrics/ -> rows, for the terminal, README, the report and MLflow. Imports json only: cheap.

A row maps a column's name to a value; None means that the column does not apply to the row. The first column
names the model or policy; the others hold numbers, booleans or words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, str | float | bool | None]


def read_metrics(folder: str | Path, models: Collection[str] | None = None) -> dict[str, Any]:
    """Read metrics/*.json and metrics/*/*.json, nested by path: {"reference": {}, "instances": {"W3": {}}}.

    With `models` (Params.model_names) a file of a fan-out folder counts only when params.yaml still lists its
    model: DVC leaves the outputs of removed items behind. A missing file is an absent key.
    """
    folder = Path(folder)
    metrics: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        stale = models is not None and len(parts) > 1 and path.stem not in models
        if stale or any(part.startswith(".") for part in parts):  # a dot: a killed step's temporary file
            continue
        place = metrics
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return metrics


def step_versions(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """VERSION of every step that left metrics, by step name."""
    steps = {
        "reference": "prepare_reference", "requests": "prepare_requests", "instances": "quantize_instances",
        "experts": "measure_experts", "variants": "build_variants", "scores": "score_requests",
        "decomposition": "decompose_damage", "fwp": "calibrate_fwp", "routing": "solve_routing",
        "throughput": "measure_throughput", "benchmarks": "evaluate_benchmarks",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for key, step in steps.items():
        values = metrics.get(key, {})
        for part in (values, *values.values()):
            if isinstance(part, Mapping) and isinstance(part.get("version"), int):
                found[step] = part["version"]
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as {dotted key: leaf}; lists are leaves, as JSON text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def instance_names(metrics: Mapping[str, Any]) -> list[str]:
    """Instances from the widest to the narrowest."""
    return sorted(metrics.get("instances", {}), key=lambda name: (-_number_in(name), name))


def instance_rows(metrics: Mapping[str, Any]) -> list[Row]:
    """The reference and every instance: bytes, damage on holdout responses, accuracy, LIS, speed."""
    return [model_row(metrics, "reference", "instance")] * ("reference" in metrics) + [
        model_row(metrics, name, "instance") for name in instance_names(metrics)
    ]


def model_row(metrics: Mapping[str, Any], name: str, column: str) -> Row:
    """One model's row; `column` is the first column's name."""
    size = metrics.get("reference", {}) if name == "reference" else _at(metrics, "instances", name)
    holdout = _at(metrics, "scores", name, "holdout")
    bench = benchmark(metrics, name)
    speed = _at(metrics, "throughput", name)
    return {
        column: name,
        "size (GiB)": size.get("size_gib"),
        "bits stored": size.get("stored_bits"),
        "ΔNLL": holdout.get("dnll_mean"),
        "KL": holdout.get("kl_mean"),
        "accuracy": bench["accuracy"],
        "± s.e.": bench["stderr"],
        "accuracy change": bench["difference"],
        "LIS": bench["lis_mean"],
        "prefill (tok/s)": _at(speed, "prefill_tokens_per_s").get("median"),
        "decode (tok/s)": _at(speed, "decode_tokens_per_s").get("median"),
    }


def variant_rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Every replicate-and-quantize build: bytes, LIS before and after, damage, accuracy."""
    rows: list[Row] = []
    for name, variant in sorted(metrics.get("variants", {}).items()):
        bench = benchmark(metrics, name)
        rows.append(
            {
                "variant": name,
                "size (GiB)": variant.get("size_gib"),
                "size change": _change(variant.get("size_bytes"), variant.get("size_bytes_before")),
                "replicas": replica_count(variant),
                "LIS before": variant.get("lis_mean_before"),
                "LIS after": variant.get("lis_mean"),
                "ΔNLL": difference(variant.get("nll"), variant.get("nll_reference")),
                "accuracy": bench["accuracy"],
                "± s.e.": bench["stderr"],
                "accuracy change": bench["difference"],
            }
        )
    return rows


def policy_rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Every request-routing policy on true holdout damage, from the slowest to the fastest."""
    policies: dict[str, Any] = _at(metrics, "routing", "policies")
    instances = sorted(
        {name for policy in policies.values() for name in policy.get("shares", {})}, key=_number_in
    )
    rows: list[Row] = []
    for name, policy in sorted(policies.items(), key=lambda item: (item[1].get("multiplier", 0.0), item[0])):
        row: Row = {
            "policy": words(name),
            "multiplier": policy.get("multiplier"),
            "fixed-work multiplier": policy.get("multiplier_fixed_work"),
            "ΔNLL": policy.get("dnll_mean"),
            "KL": policy.get("kl_mean"),
            "budget kept": policy.get("budget_kept"),
            "kept in ΔNLL": policy.get("budget_kept_dnll"),
            "guaranteed": policy.get("guaranteed"),
        }
        row |= {f"share {instance}": policy.get("shares", {}).get(instance) for instance in instances}
        rows.append(row)
    return rows


def overall_budget(routing: Mapping[str, Any]) -> float | None:
    """The one tau that all classes share, or None where each class has its own."""
    return routing["budget"]["tau"].get("overall")


def benchmark(metrics: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """Accuracy, standard error, paired difference to the reference: means over multiple-choice tasks."""
    found = _at(metrics, "benchmarks", name)
    tasks = [task for task in found.get("tasks", {}).values() if "accuracy" in task]
    errors = [task["stderr"] for task in tasks if "stderr" in task]
    changes = [task["difference"] for task in tasks if "difference" in task]
    return {
        "accuracy": _mean(task["accuracy"] for task in tasks),
        # independent questions: the variance of a mean of n accuracies is the sum of theirs over n squared
        "stderr": math.hypot(*errors) / len(errors) if errors else None,
        "difference": _mean(changes),
        "lis_mean": found.get("lis_mean"),
    }


def replica_count(variant: Mapping[str, Any]) -> float | None:
    """Physical minus logical experts of one layer, where every layer has the same number."""
    counts = {
        len(after) - len(before)
        for before, after in zip(variant.get("load_before", []), variant.get("load_after", []), strict=False)
    }
    return counts.pop() if len(counts) == 1 else None


def difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def words(name: str) -> str:
    """A key as words: `isotonic_ppl` -> `isotonic PPL`."""
    shown = {"ppl": "PPL", "fwp": "FWP", "lp": "LP", "nll": "NLL", "dnll": "ΔNLL", "kl": "KL"}
    return " ".join(shown.get(word, word) for word in name.split("_"))


# --- cells --------------------------------------------------------------------------------------------------

_FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (  # first match on the column's name
    (r"smallest visible", lambda value: f"{100 * value:.1f} pt"),
    (r"accuracy change$", lambda value: f"{100 * value:+.1f} pt"),
    (r"change$", lambda value: f"{100 * value:+.1f} %"),
    (r"^share |^guaranteed$|^accuracy$|s\.e\.$", lambda value: f"{100 * value:.1f} %"),
    (r"GiB", lambda value: f"{value:.3f}" if value < 10 else f"{value:.2f}"),
    (r"tok/s", lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}"),
    (
        r"NLL|KL|paper|ours|measured|log-prob|^p$|std|correlation|multiplier|LIS",
        lambda value: f"{value:.3f}",
    ),
    (r"bits", lambda value: f"{value:.2f}"),
    (r"", lambda value: f"{value:g}"),
)


def cell(column: str, value: str | float | bool | None) -> str:
    """A value as text: three decimals for losses, per cent for shares, `–` where it does not apply."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    text = next(form(value) for pattern, form in _FORMATS if re.search(pattern, column))
    return text.replace("-", "−") if re.fullmatch(r"-[\d.]+( %| pt)?", text) else text


def markdown(rows: list[Row]) -> str:
    """A Markdown table without trailing newline; columns that apply to no row are left out."""
    if not rows:
        return "(no results yet)"
    columns = filled_columns(rows)
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join([" --- "] + [" ---: "] * (len(columns) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(cell(column, row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def filled_columns(rows: list[Row]) -> list[str]:
    """The columns in which some row has a value, in order."""
    return [column for column in rows[0] if any(row.get(column) is not None for row in rows)]


def _at(values: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The dict at `path`, empty where a part is missing."""
    place: Any = values
    for part in path:
        place = place.get(part, {}) if isinstance(place, Mapping) else {}
    return place if isinstance(place, dict) else {}


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _change(after: float | None, before: float | None) -> float | None:
    return None if not after or not before else after / before - 1


def _number_in(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 0
