"""What the report's template shows, but for pictures: tables and sentences out of metrics/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.reporting import damage_sections, tables, verdicts
from tasks.reporting.tables import Row, instance_names, overall_budget

FIGURES = {
    "spearman": "Spearman",
    "spearman_within": "Spearman within classes",
    "auroc": "AUROC",
    "r2": "R²",
    "slope": "slope",
}
LINEAR_PROGRAM = ("budget", "prices", "certificate", "infeasible")
DAMAGE_NAMES = {"dnll": "ΔNLL", "kl": "KL"}


def content(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows, but for pictures and parameters."""
    routing, fwp = metrics.get("routing", {}), metrics.get("fwp", {})
    requests, speed = metrics.get("requests", {}), metrics.get("throughput", {})
    return {
        "title": metrics.get("reference", {}).get("source", "no model yet"),
        "lead": _lead(metrics.get("reference", {})),
        "verdicts": verdicts.all_verdicts(metrics),
        "instances": tables.instance_rows(metrics),
        "variants": tables.variant_rows(metrics),
        "policies": tables.policy_rows(metrics),
        "scorer": fwp.get("scorer", "–"),
        "damage": DAMAGE_NAMES.get(fwp.get("damage", ""), "–"),
        "short_prompts": sum(fwp.get("short_prompts", {}).values()),
        "predictors": list(_predictors(fwp)),
        "strengths": [
            {"strength": name, "std of weights": found.get("std_weight"), "correlation with log PPL":
             found.get("correlation_log_ppl"), "equals PPL": found.get("equals_ppl")}
            for name, found in sorted(fwp.get("strengths", {}).items())
        ],
        "budget": _budget(routing),
        "policy_classes": _policy_classes(routing),
        "published": _published(routing),
        "certificate": pairs(
            tables.flatten({key: routing[key] for key in LINEAR_PROGRAM if key in routing}), "quantity"
        ),
        "benchmarks": list(_benchmarks(metrics)),
        "execution": speed.get("execution", "Not measured."),
        "speed": list(_speed(speed)),
        "requests_lead": _requests_lead(requests),
        "request_classes": [
            {"class": name, "fit": found.get("fit"), "holdout": found.get("holdout"),
             "prompt tokens (mean)": found.get("prompt_tokens_mean"),
             "scored tokens (mean)": found.get("scored_tokens_mean")}
            for name, found in sorted(requests.get("classes", {}).items())
        ],
        "versions": pairs(tables.step_versions(metrics), "step"),
        **damage_sections.content(metrics),
    }  # fmt: skip


def _lead(reference: Mapping[str, Any]) -> str:
    if not reference:
        return "No reference has been prepared."
    text = (
        f"The reference is a {reference['model_type']} checkpoint: {reference['moe_layers']} MoE layers of "
        f"{reference['experts']} experts, {reference['top_k']} picked per token; "
        f"{reference['parameters'] / 1e6:,.1f} M parameters, "
        f"{reference['expert_parameters'] / 1e6:,.1f} M of them in routed experts."
    )
    if "nll_upcycled" in reference:
        text += (
            f" It was made from a dense model: turning it into a MoE raised its loss from "
            f"{reference['nll_dense']:.3f} to {reference['nll_upcycled']:.3f} nats per token."
        )
    return text


def _requests_lead(requests: Mapping[str, Any]) -> str:
    if not requests:
        return "No requests have been prepared."
    merged = "; ".join(
        f"{name} was too small and went into {into}"
        for name, into in sorted(requests.get("merged", {}).items())
    )
    text = (
        f"{requests['requests']} requests from source {requests['source']}: {requests['fit']} to fit, "
        f"{requests['holdout']} held out."
    )
    return f"{text} Merged classes: {merged}." if merged else f"{text} No class was merged."


def _budget(routing: Mapping[str, Any]) -> str:
    if not routing.get("policies"):
        return ""
    tau = overall_budget(routing)
    kind = DAMAGE_NAMES[routing["damage"]]
    return (
        f"The budget is a mean {kind} of {tau:.3f} nats per token."
        if tau is not None
        else f"Each class has its own budget of mean {kind}."
    )


def _predictors(fwp: Mapping[str, Any]) -> Iterator[tuple[str, list[Row], str]]:
    """(instance, one row a predictor, the ceiling in words), from the widest instance to the narrowest."""
    for name, table in sorted(fwp.get("holdout", {}).items(), reverse=True):
        rows: list[Row] = []
        for label, found in table.get("predictors", {}).items():
            row: Row = {"predictor": tables.words(label)}
            for key, title in FIGURES.items():
                row[title] = verdicts.interval(found, key) if key in found else None
            rows.append(row)
        yield name, rows, _ceiling(table.get("ceiling", {}))


def _ceiling(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    if not found.get("measurable", False):
        return "not measurable: the two halves of a request's tokens do not agree, the damage is mostly noise"
    text = f"a correlation cannot pass {found['correlation']:.2f}, R² cannot pass {found['rho_star']:.2f}"
    within = found.get("within", {})
    if within.get("measurable"):
        return f"{text}; within classes {within['correlation']:.2f} and {within['rho_star']:.2f}"
    return f"{text}; not measurable within classes" if within else text


def _policy_classes(routing: Mapping[str, Any]) -> list[Row]:
    """Realised mean damage of every policy and class; ✗ where the class is over its budget."""
    kind = routing.get("damage", "")
    rows: list[Row] = []
    for name, policy in sorted(
        routing.get("policies", {}).items(), key=lambda item: (item[1].get("multiplier", 0), item[0])
    ):
        if classes := policy.get("classes"):
            row: Row = {"policy": tables.words(name)}
            for label, found in sorted(classes.items()):
                value = found.get(f"{kind}_mean")
                mark = "" if found.get("kept", True) else " ✗"
                row[tables.words(label)] = None if value is None else tables.cell(kind.upper(), value) + mark
            rows.append(row)
    return rows


def _published(routing: Mapping[str, Any]) -> list[Row]:
    """The paper's rows, our policies on requests with the paper's means, and this run where it compares."""
    return [
        {
            "row": tables.words(row), "figure": tables.words(key), "paper": found["paper"],
            "ours from its means": found["from_means"], "measured here": found.get("measured"),
        }
        for row, figures in routing.get("published", {}).items()
        for key, found in figures.items()
    ]  # fmt: skip


def _benchmarks(metrics: Mapping[str, Any]) -> Iterator[Row]:
    results = metrics.get("benchmarks", {})
    order = [name for name in ("reference", *instance_names(metrics)) if name in results]
    order += [name for name in sorted(results) if name not in order]
    for task in sorted({task for found in results.values() for task in found.get("tasks", {})}):
        for name in order:
            found = results[name].get("tasks", {}).get(task)
            if found is not None:
                is_choice = "accuracy" in found
                yield {
                    "benchmark": task, "model": name, "n": found.get("n", found.get("tokens")),
                    "accuracy": found.get("accuracy"), "± s.e.": found.get("stderr"),
                    "accuracy change": found.get("difference") if is_choice else None,
                    "p": found.get("p_value"),
                    "smallest visible change": found.get("smallest_visible_difference"),
                    "log-prob of right": found.get("log_prob_right"), "NLL": found.get("nll"),
                    "NLL difference": None if is_choice else found.get("difference"),
                }  # fmt: skip


def _speed(speed: Mapping[str, Any]) -> Iterator[Row]:
    for name, found in sorted(speed.items(), key=lambda item: (item[0] != "reference", item[0])):
        if isinstance(found, Mapping):
            row: Row = {"model": name}
            for phase in ("prefill", "decode"):
                values = found.get(f"{phase}_tokens_per_s", {})
                row |= {f"{phase} {key} (tok/s)": values.get(key) for key in ("median", "low", "high")}
            yield row


def pairs(values: Mapping[str, Any], name: str) -> list[Row]:
    return [
        {name: key, "value": f"{value:g}" if isinstance(value, float) else str(value)}
        for key, value in values.items()
    ]
