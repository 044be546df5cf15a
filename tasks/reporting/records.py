"""Flat MLflow runs out of metrics/: one per reference, instance, variant and policy, with the same keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.reporting.tables import benchmark, difference, instance_names

# The keys that every kind of run shares, so that MLflow can put all of them into one chart. What does not
# apply is absent, never 0. dnll_mean and kl_mean are nats per token of holdout responses, so a variant, which
# is measured on calibration tokens, has neither. All other keys begin with "z.": MLflow's charts are sorted by
# key, and these nine come first.
NINE_KEYS = (
    "size_gib", "stored_bits", "dnll_mean", "kl_mean", "accuracy", "lis_mean", "multiplier", "budget_kept",
    "tokens_per_s",
)  # fmt: skip


# MLflow's charts show ten runs at once: the policies to see there, the rest follow by name.
FIRST_POLICIES = ("lp_fwp", "class_mean", "request_agnostic", "order_fwp", "true_loss")


@dataclass
class Record:
    """One run: metrics by key, curves by key as {step: value}, tags."""

    kind: str  # reference | instance | variant | policy
    name: str
    metrics: dict[str, float | None]
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def points(self) -> list[tuple[str, float, int]]:
        """Every metric and curve as (key, value, step)."""
        single = [(key, value, 0) for key, value in self.metrics.items() if value is not None]
        curves = [(key, value, step) for key, curve in self.curves.items() for step, value in curve.items()]
        return single + curves


def records(metrics: Mapping[str, Any]) -> list[Record]:
    """Every run that the metrics describe."""
    listed = [*_models(metrics), *_variants(metrics), *_policies(metrics)]
    return [_checked(record) for record in listed]


def _models(metrics: Mapping[str, Any]) -> Iterator[Record]:
    if "reference" in metrics:
        yield _model(metrics, "reference", "reference", metrics["reference"])
    for name in instance_names(metrics):
        yield _model(metrics, "instance", name, metrics["instances"][name])


def _model(metrics: Mapping[str, Any], kind: str, name: str, size: Mapping[str, Any]) -> Record:
    scores = metrics.get("scores", {}).get(name, {})
    holdout = scores.get("holdout", {})
    record = Record(kind, name, {
        "size_gib": size.get("size_gib"), "stored_bits": size.get("stored_bits"),
        "dnll_mean": holdout.get("dnll_mean"), "kl_mean": holdout.get("kl_mean"),
        "z.weights.relative_error": size.get("relative_error"),
        **_classes(holdout), **_fwp(metrics, name), **_bench(metrics, name), **_speed(metrics, name),
        **_terms(metrics, name),
    }, tags={"damage.tokens": "responses of holdout requests"})  # fmt: skip
    if kind == "reference" and "experts" in metrics:
        experts = metrics["experts"]
        record.metrics["z.lis.calibration_mean"] = experts["lis_mean"]
        record.curves["z.layers.lis_calibration"] = dict(zip(experts["layers"], experts["lis"], strict=True))
    _bench_curve(metrics, record)
    return record


def _variants(metrics: Mapping[str, Any]) -> Iterator[Record]:
    for name, variant in sorted(metrics.get("variants", {}).items()):
        record = Record("variant", name, {
            "size_gib": variant.get("size_gib"), "stored_bits": variant.get("stored_bits"),
            "z.variant.dnll": difference(variant.get("nll"), variant.get("nll_reference")),
            "z.variant.nll": variant.get("nll"), "z.lis.calibration_mean": variant.get("lis_mean"),
            "z.lis.calibration_mean_before": variant.get("lis_mean_before"),
            **_bench(metrics, name), **_speed(metrics, name),
        }, tags={"damage.tokens": "calibration tokens: beside no request"})  # fmt: skip
        for key, values in {
            "z.layers.lis_calibration": "lis_logical",
            "z.layers.lis_physical": "lis_physical",
        }.items():
            if values in variant:
                record.curves[key] = dict(zip(variant["layers"], variant[values], strict=True))
        if "load_after" in variant:
            record.curves["z.layers.busiest_share"] = {
                layer: max(load) / max(sum(load), 1)
                for layer, load in zip(variant["layers"], variant["load_after"], strict=True)
            }
        _bench_curve(metrics, record)
        yield record


def _policies(metrics: Mapping[str, Any]) -> Iterator[Record]:
    routing = metrics.get("routing", {})
    sizes = {name: found.get("size_gib") for name, found in metrics.get("instances", {}).items()}
    scorer = metrics.get("fwp", {}).get("scorer")
    policies = routing.get("policies", {})
    first = [name for name in FIRST_POLICIES if name in policies]
    for name in first + sorted(policies.keys() - first):
        policy = policies[name]
        shares = policy.get("shares", {})
        resident = {instance for instance, share in shares.items() if share > 0}
        if policy.get("predicted") and scorer in sizes:
            resident.add(scorer)  # it prefills every prompt
        pool = [sizes[instance] for instance in sorted(resident) if sizes.get(instance) is not None]
        yield Record("policy", name, {
            "size_gib": sum(pool) if len(pool) == len(resident) else None,
            "dnll_mean": policy.get("dnll_mean"), "kl_mean": policy.get("kl_mean"),
            "multiplier": policy.get("multiplier"),
            "z.routing.multiplier_fixed_work": policy.get("multiplier_fixed_work"),
            "budget_kept": None if policy.get("budget_kept") is None else float(policy["budget_kept"]),
            **_classes(policy), **{_key(f"z.share.{instance}"): share for instance, share in shares.items()},
        }, tags={"damage.tokens": "responses of holdout requests", "resident": " ".join(sorted(resident)),
                 "reward": str(routing.get("reward", ""))})  # fmt: skip


def _classes(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        _key(f"z.{kind}_by_class.{label}"): found.get(f"{kind}_mean")
        for label, found in sorted(values.get("classes", {}).items())
        for kind in ("dnll", "kl")
    }


def _terms(metrics: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """Means of the decomposition's terms, and what the most fragile expert alone does, as z.terms.<name>."""
    found = metrics.get("decomposition", {}).get("instances", {}).get(name, {})
    means = {
        _key(f"z.terms.{term}"): own["mean"]
        for term, own in found.get("terms", {}).items()
        if isinstance(own, Mapping)
    }
    top = next(iter(found.get("super_experts", [])), None)
    return means | ({} if top is None else {"z.terms.top_expert_alone": top["single"]["kl"]})


def _fwp(metrics: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """Holdout figures of the predictor in use, as keys z.fwp.<figure>."""
    fwp = metrics.get("fwp", {})
    found = fwp.get("holdout", {}).get(name, {}).get("predictors", {}).get(fwp.get("predictor", ""), {})
    return {_key(f"z.fwp.{figure}"): value for figure, value in found.items()}


def _bench(metrics: Mapping[str, Any], name: str) -> dict[str, float | None]:
    bench = benchmark(metrics, name)
    tasks = metrics.get("benchmarks", {}).get(name, {}).get("tasks", {})
    each = {
        _key(f"z.benchmark.{task}.{figure}"): value
        for task, found in sorted(tasks.items())
        for figure, value in sorted(found.items())
        if isinstance(value, int | float)
    }
    named = {"accuracy": "accuracy", "z.benchmark.accuracy_stderr": "stderr", "lis_mean": "lis_mean"}
    return {key: bench[figure] for key, figure in named.items()} | each


def _bench_curve(metrics: Mapping[str, Any], record: Record) -> None:
    """LIS per MoE layer while the benchmarks ran; steps are positions among the MoE layers."""
    if lis := metrics.get("benchmarks", {}).get(record.name, {}).get("lis"):
        record.curves["z.layers.lis"] = dict(enumerate(lis))
    if record.metrics.get("lis_mean") is not None:
        record.tags["lis_mean.tokens"] = "benchmarks"


def _speed(metrics: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """tokens_per_s is the decode median: the phase that a served request spends its time in."""
    found = metrics.get("throughput", {}).get(name, {})
    decode, prefill = found.get("decode_tokens_per_s", {}), found.get("prefill_tokens_per_s", {})
    return {"tokens_per_s": decode.get("median"), "z.speed.prefill_tokens_per_s": prefill.get("median")}


def _checked(record: Record) -> Record:
    """Drop what is absent; drop what is not finite, and name it in a tag (MLflow would store 1.8e308)."""
    present = {key: float(value) for key, value in record.metrics.items() if value is not None}
    finite_values = {key: value for key, value in present.items() if math.isfinite(value)}
    record.metrics = {**finite_values}
    bad = sorted(present.keys() - finite_values.keys())
    for key, curve in record.curves.items():
        finite = {step: float(value) for step, value in curve.items() if math.isfinite(value)}
        if len(finite) < len(curve):
            bad.append(key)
        record.curves[key] = finite
    if bad:
        record.tags["non_finite"] = " ".join(bad)
    if "tokens_per_s" in record.metrics:
        record.tags["tokens_per_s.phase"] = "decode"
    return record


def _key(text: str) -> str:
    """A metric key as MLflow allows it: letters, digits, _ - and . only."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)
