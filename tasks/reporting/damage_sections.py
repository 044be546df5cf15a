"""The report's sections on where damage comes from and on what predicts it over many splits: tables and
sentences out of metrics/decomposition.json and metrics/fwp.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.reporting.tables import Row, policy_rows, words

DAMAGE_NAMES = {"dnll": "ΔNLL", "kl": "KL"}
TERMS = {
    "total": "total damage",
    "bias": "bias",
    "separable": "separable",
    "separability": "not separable",
    "interaction": "interaction of pairs",
    "higher_order": "higher order",
    "rest_with_sampling_error": "rest, with sampling error",
    "beyond_additive": "interaction and the rest together",
    "route_change": "route change",
}
ESTIMATORS = ("swap", "taylor_kl", "taylor_dnll", "output_error", "router_row_norm")
SIGNALS = ("class", "log_length", "log_ppl", "log_fwp", "separable")  # in the order in which they are added
POSITION_0 = {"with_first": "with position 0", "without_first": "without"}
AGREEMENTS = {**POSITION_0, "all_tokens": "estimated on all tokens"}
SPLIT_FIGURES = {
    "spearman": "Spearman", "spearman_within": "Spearman within classes", "auroc": "AUROC", "r2": "R²",
    "slope": "slope", "r2_gain": "R² above the class mean",
}  # fmt: skip


def content(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the template's sections on decomposition, fragility and splits show."""
    found, fwp = metrics.get("decomposition", {}), metrics.get("fwp", {})
    return {
        "decomposition_lead": _lead(found),
        "terms": _filled(_terms(found)),
        "fragility_lead": _fragility_lead(found),
        "agreement": _filled(_agreement(found)),
        "super_experts": list(_super_experts(found)),
        "splits_lead": _splits_lead(fwp),
        "splits": list(_splits(fwp)),
        **_other(metrics.get("other_requests", {})),
    }


def _filled(rows: Iterator[Row]) -> list[Row]:
    """Rows of which each has every column, in the order of the row that has most."""
    listed = list(rows)
    columns = dict.fromkeys(column for row in sorted(listed, key=len, reverse=True) for column in row)
    return [{column: row.get(column) for column in columns} for row in listed]


def in_order(names: Mapping[str, Any]) -> list[str]:
    """Instances from the widest to the narrowest."""
    return sorted(names, key=lambda name: (-int("".join(filter(str.isdigit, name)) or 0), name))


# --- decomposition --------------------------------------------------------------------------------------------


def _lead(found: Mapping[str, Any]) -> str:
    if not found:
        return "No damage has been decomposed."
    if not found["supported"]:
        return f"Not supported for this model: {found['reason']}."
    requests, kind = found["requests"], DAMAGE_NAMES[found["damage"]]
    blocks = "whole MoE layers" if found["level"] == "layer" else "single experts"
    figures = [own["terms"] for own in found["instances"].values()]
    every = figures[0]["all_pairs"]
    pairs = "all pairs" if figures[0]["pairs"] >= every else f"{figures[0]['pairs']} of {every} pairs"
    return (
        f"{kind} of {found['scored']}s, taken apart by swapping {blocks} between reference and instance with the "
        f"reference's routes held ({pairs} of them swapped), on {requests['holdout']} holdout requests; "
        f"{requests['fit']} fit requests set bias and the separable term."
    )


def _terms(found: Mapping[str, Any]) -> Iterator[Row]:
    """One row a term: per instance its mean with interval, and its share of the differences between requests."""
    instances = found.get("instances", {})
    for name, title in TERMS.items():
        row: Row = {"term": title}
        for instance in in_order(instances):
            own = instances[instance]["terms"].get(name)
            if own is None:
                continue
            row[f"{instance} (nats per token)"] = with_interval(own, "mean", 4)
            if "sampling_error" in own:
                row[f"{instance}: ± from sampled pairs (nats per token)"] = f"{own['sampling_error']:.4f}"
            if name != "total" and "share" in own:
                row[f"{instance}: of the differences"] = f"{round(100 * own['share']) + 0:d} %".replace(
                    "-", "−"
                )
        if len(row) > 1:
            yield row


# --- fragility ------------------------------------------------------------------------------------------------


def _fragility_lead(found: Mapping[str, Any]) -> str:
    if not found or not found["supported"]:
        return ""
    calibration, kind = found["calibration"], DAMAGE_NAMES[found["damage"]]
    layers = ", ".join(str(layer) for layer in calibration["swap_layers"])
    without = found["experts_without_tokens"]
    return (
        f"Estimated on {calibration['tokens']} calibration tokens; swapped one by one, as the exact truth, were the "
        f"experts of decoder layer {layers} on {calibration['swap_tokens']} of these tokens ({kind}). Experts "
        f"without a token: {without['with_first']}, and {without['without_first']} when position 0 does not count."
    )


def _agreement(found: Mapping[str, Any]) -> Iterator[Row]:
    """One row an estimator: rank correlation with the exact swaps (mean over swapped layers), its cost."""
    instances = found.get("instances", {})
    costs = found.get("cost", {}).get("estimators", {})
    for estimator in ESTIMATORS if instances else ():
        row: Row = {"estimator": words(estimator)}
        for instance in in_order(instances):
            own = instances[instance]["agreement"].get(estimator, {})
            ways = own if "with_first" in own else {"with_first": own}
            for key, title in AGREEMENTS.items():
                row[f"{instance} correlation {title}"] = (
                    None if estimator == "swap" else ways.get(key, {}).get("mean")
                )
            if (factor := ways["with_first"].get("worst_factor")) is not None:
                row[f"{instance}: off at the top by"] = f"{factor:.1f}x"
        cost = costs.get(estimator) or costs.get(estimator.split("_")[0], {})
        row["forward tokens"] = _count(cost.get("forward_tokens"))
        row["backward tokens"] = _count(cost.get("backward_tokens"))
        yield row


def _super_experts(found: Mapping[str, Any]) -> Iterator[Row]:
    kind = found.get("damage", "")
    for instance in in_order(found.get("instances", {})):
        for own in found["instances"][instance]["super_experts"]:
            row: Row = {
                "expert": f"{instance}: layer {own['layer']}, expert {own['expert']}",
                "KL alone": f"{own['single']['kl']:.3g}",
                "ΔNLL alone": f"{own['single']['dnll']:.3g}".replace("-", "−"),
                f"share of all {DAMAGE_NAMES[kind]}": own["share"].get(kind),
                f"{DAMAGE_NAMES[kind]} alone without position 0": f"{own['single_without_first'][kind]:.3g}".replace(
                    "-", "−"
                ),
            }
            for estimator, ways in own["phi"].items():
                for key, title in POSITION_0.items():
                    row[f"{words(estimator)} {title}"] = f"{ways[key]:.3g}".replace("-", "−")
            row["router row norm"] = f"{own['router_row_norm']:.2f}"
            yield row


# --- predictors over many splits --------------------------------------------------------------------------------


def _splits_lead(fwp: Mapping[str, Any]) -> str:
    splits = fwp.get("splits", {})
    if not splits:
        return ""
    sizes = splits["requests"]
    return (
        f"{splits['count']} seeded halvings of all requests, stratified by class: fitted on {sizes['fit']}, judged "
        f"on the other {sizes['judged']}; means over the splits with 2.5 and 97.5 percentiles."
    )


def _splits(fwp: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Per target, the one in use first: its name, whether it is in use, and per instance the tables."""
    splits = fwp.get("splits", {})
    used = f"{fwp.get('damage')}_{fwp.get('scored')}"
    for target in sorted(splits.get("targets", {}), key=lambda name: (name != used, name)):
        found = splits["targets"][target]
        beats = splits.get("beats", {}).get(target, {})
        tables = [
            {
                "instance": name,
                "predictors": list(_rows(found[name].get("predictors", {}), "predictor")),
                "adds": list(_rows(_ordered(found[name].get("adds", {})), "ridge on these and all above")),
                "verdict": _beats(name, beats.get(name, [])),
            }
            for name in in_order(found)
        ]
        kind, part = target.split("_", 1)
        yield {
            "title": f"{DAMAGE_NAMES.get(kind, kind)} of {part}s",
            "used": target == used,
            "tables": tables,
        }


def _other(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same of requests from elsewhere (`benchmarks/other_requests.py`), where they were measured."""
    if not found:
        return {"other_lead": "", "other_splits": [], "other_policies": []}
    requests, fwp = found["requests"], found["fwp"]
    budget = ", ".join(f"{name} {tau:.4f}" for name, tau in found["routing"]["budget"]["tau"].items())
    return {
        "other_lead": (
            f"{requests['count']} requests of {found['file']} in {len(requests['classes'])} classes "
            f"({', '.join(sorted(requests['classes']))}), on the same pool. {_splits_lead(fwp)} Budget: {budget} nats."
        ),
        "other_splits": [target for target in _splits(fwp) if target["used"]],
        "other_policies": policy_rows(found),
    }


def _ordered(adds: Mapping[str, Any]) -> dict[str, Any]:
    names = [*(name for name in SIGNALS if name in adds), *sorted(set(adds) - set(SIGNALS))]
    return {name: adds[name] for name in names}


def _rows(predictors: Mapping[str, Any], column: str) -> Iterator[Row]:
    for name, found in predictors.items():
        row: Row = {column: words(name)}
        for key, title in SPLIT_FIGURES.items():
            row[title] = with_interval(found, key) if key in found else None
        row["beats the class mean within classes"] = found.get("beats_class_mean")
        yield row


def _beats(instance: str, names: list[str]) -> str:
    if not names:
        return f"On {instance} nothing beats the class mean within classes in 97.5 % of the splits."
    return (
        f"On {instance} these beat the class mean within classes: {', '.join(words(name) for name in names)}."
    )


def with_interval(found: Mapping[str, float], name: str, digits: int = 2) -> str:
    ends = (found[f"{name}_low"], found[f"{name}_high"]) if f"{name}_low" in found else ()
    # + 0.0: no minus before what rounds to zero
    texts = [f"{round(value, digits) + 0.0:.{digits}f}" for value in (found[name], *ends)]
    text = texts[0] if not ends else f"{texts[0]} [{texts[1]}, {texts[2]}]"
    return text.replace("-", "−")


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


# --- sentences --------------------------------------------------------------------------------------------------


def verdicts(metrics: Mapping[str, Any]) -> list[str]:
    """What decomposition and splits say, for the report's head."""
    found = metrics.get("decomposition", {})
    sentences = []
    for name in in_order(found.get("instances", {})):
        own = found["instances"][name]
        sentences += [_terms_verdict(name, own["terms"]), _super_verdict(name, own, found["damage"])]
    fwp = metrics.get("fwp", {})
    beats = fwp.get("splits", {}).get("beats", {}).get(f"{fwp.get('damage')}_{fwp.get('scored')}", {})
    sentences += [_beats(name, beats[name]) for name in in_order(beats)]
    return [sentence for sentence in sentences if sentence]


def _terms_verdict(name: str, terms: Mapping[str, Any]) -> str:
    total = terms["total"]["mean"]
    if total <= 0:
        return ""
    additive = sum(terms[part]["mean"] for part in ("bias", "separable", "separability"))
    routes = terms["route_change"]["mean"]
    text = (
        f"On {name}, blocks swapped one by one add up to {100 * additive / total:.0f} % of the damage; changed "
        f"routes make {100 * routes / total:.0f} % of it, interactions between blocks the rest"
    ).replace("-", "−")
    return f"{text} ({terms['requests']} holdout requests)."


def _super_verdict(name: str, own: Mapping[str, Any], kind: str) -> str:
    experts = [found for found in own["super_experts"] if kind in found["share"]]
    if not experts:
        return ""
    top = experts[0]
    return (
        f"On {name}, one expert, number {top['expert']} of decoder layer {top['layer']}, alone does "
        f"{100 * top['share'][kind]:.0f} % of the whole instance's {DAMAGE_NAMES[kind]} on calibration tokens"
        f" ({top['single'][kind]:.4f} nats per token; {top['single_without_first'][kind]:.4f} where position 0 is "
        "spared)."
    ).replace("-", "−")
