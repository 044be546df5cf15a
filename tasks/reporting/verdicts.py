"""The report's sentences: what the numbers say, computed from them, in favour of the method or not."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tasks.reporting import damage_sections
from tasks.reporting.tables import benchmark, difference, instance_names, words

FWP_POLICY, CLASS_MEAN_POLICY, AGNOSTIC_POLICY = "lp_fwp", "class_mean", "request_agnostic"
CLAIMED_POINTS = 0.006  # Replicate-and-Quantize claims accuracy within 0.6 points (arXiv 2602.19938)


def all_verdicts(metrics: Mapping[str, Any]) -> list[str]:
    """Every sentence that the metrics at hand allow, in the report's order."""
    found = [damage_verdict(metrics), *predictor_verdicts(metrics), strength_verdict(metrics)]
    found += damage_sections.verdicts(metrics)
    found += [
        routing_verdict(metrics),
        risk_verdict(metrics),
        *variant_verdicts(metrics),
        speed_verdict(metrics),
    ]
    return [sentence for sentence in found if sentence]


def damage_verdict(metrics: Mapping[str, Any]) -> str:
    """Does damage grow as the width falls?"""
    names = [name for name in instance_names(metrics) if "holdout" in metrics.get("scores", {}).get(name, {})]
    if len(names) < 2:
        return ""
    values = [metrics["scores"][name]["holdout"]["kl_mean"] for name in names]
    listed = ", ".join(f"{name} {value:.3f}" for name, value in zip(names, values, strict=True))
    rising = all(low < high for low, high in pairwise(values))
    law = "grows with every bit removed" if rising else "does not grow with every bit removed"
    return f"Damage {law}: mean KL to the reference on holdout responses is {listed} nats per token."


def predictor_verdicts(metrics: Mapping[str, Any]) -> list[str]:
    """Does ridge on FWP order holdout requests better than class means and the same map of PPL or length; what is in
    use?"""
    fwp = metrics.get("fwp", {})
    sentences = []
    for name, table in sorted(fwp.get("holdout", {}).items(), reverse=True):
        rows = table.get("predictors", {})
        ours = rows.get("ridge_fwp", {})
        rivals = {
            "the class mean": rows.get("class_mean", {}),
            "PPL in the same map": rows.get("ridge_ppl", {}),
            "length alone": rows.get("ridge_length", {}),
        }
        if "spearman" not in ours:
            continue
        told = [f"{label} {compare(ours, row)}" for label, row in rivals.items() if "spearman" in row]
        if told:
            used = fwp.get("chosen", {}).get(name, {}).get("name", fwp.get("predictor", ""))
            sentences.append(
                f"On {name}, FWP (ridge) has Spearman {interval(ours, 'spearman')}; against "
                + "; ".join(told)
                + (f". In use: {words(used)}." if used else ".")
            )
    return sentences


def compare(ours: Mapping[str, float], rival: Mapping[str, float]) -> str:
    """Better or worse only where the two bootstrap intervals do not overlap; else it cannot be told."""
    text = interval(rival, "spearman")
    if "spearman_low" not in ours or "spearman_low" not in rival:
        return f"{text} (no intervals)"
    if ours["spearman_low"] > rival["spearman_high"]:
        return f"{text}: better"
    if ours["spearman_high"] < rival["spearman_low"]:
        return f"{text}: worse"
    return f"{text}: no difference that this many requests can show"


def interval(row: Mapping[str, float], name: str) -> str:
    text = f"{row[name]:.2f}"
    return f"{text} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]" if f"{name}_low" in row else text


def strength_verdict(metrics: Mapping[str, Any]) -> str:
    """Is FWP anything but perplexity on this model?"""
    strengths = metrics.get("fwp", {}).get("strengths", {})
    same = [name for name, found in sorted(strengths.items()) if found.get("equals_ppl")]
    if not strengths:
        return ""
    if len(same) == len(strengths):
        return "FWP equals PPL on this model: every router strength is constant over tokens."
    spread = ", ".join(f"{name} {found['std_weight']:.3f}" for name, found in sorted(strengths.items()))
    note = f" With {' and '.join(same)} FWP equals PPL on this model." if same else ""
    return f"Spread of FWP's token weights (standard deviation; 0 would make FWP equal PPL): {spread}.{note}"


def routing_verdict(metrics: Mapping[str, Any]) -> str:
    """Does routing on FWP give more than class means, and more than one share for all, within the budget?"""
    policies = metrics.get("routing", {}).get("policies", {})
    fwp = policies.get(FWP_POLICY)
    if fwp is None:
        return ""
    kind = metrics["routing"]["damage"]
    label = {"kl": "KL", "dnll": "ΔNLL"}[kind]
    head = f"Routing on FWP: multiplier {fwp['multiplier']:.3f} at {label} {fwp[f'{kind}_mean']:.3f}"
    if not fwp["budget_kept"]:
        head += ", over the budget: its multiplier does not count"
    parts = []
    for name in (CLASS_MEAN_POLICY, AGNOSTIC_POLICY):
        if (rival := policies.get(name)) is None:
            continue
        kept = "" if rival["budget_kept"] else ", over the budget"
        told = f"{words(name)} {rival['multiplier']:.3f}{kept}"
        if fwp["budget_kept"] and rival["budget_kept"]:
            gain = fwp["multiplier"] - rival["multiplier"]
            word = "FWP beats it" if gain > 0.0005 else "FWP does not beat it"
            told += f": {word} ({gain:+.3f})".replace("-", "−")
        elif fwp["budget_kept"]:
            told += ": only FWP keeps the budget"
        else:
            told += ": FWP does not beat it" if rival["budget_kept"] else ": neither keeps the budget"
        parts.append(told)
    return "; ".join([head, *parts]) + ". One holdout split: differences this small may be chance."


def risk_verdict(metrics: Mapping[str, Any]) -> str:
    """What a promised budget costs: routing on FWP against request-agnostic mixing under the same guarantee."""
    routing = metrics.get("routing", {})
    risk, policies = routing.get("risk"), routing.get("policies", {})
    if not risk:
        return ""
    parts = []
    for name in (FWP_POLICY, CLASS_MEAN_POLICY, AGNOSTIC_POLICY):
        safe, plain = policies.get(f"{name}_controlled"), policies.get(name)
        if safe is None or plain is None:
            continue
        margins = [own["margin"] for own in risk["policies"][name].values() if own["status"] == "guaranteed"]
        told = f"{words(name)} {safe['multiplier']:.3f} (without the promise {plain['multiplier']:.3f}"
        told += f", margin {max(margins):.3f} nats" if margins else ", nothing can be promised"
        broken = "" if safe["budget_kept"] else "; it broke its budget on this split"
        parts.append(f"{told}{broken})")
    return f"Budgets promised at {1 - risk['delta']:.0%}, margin taken off: {'; '.join(parts)}."


def variant_verdicts(metrics: Mapping[str, Any]) -> list[str]:
    """Replicate-and-Quantize's two claims: LIS falls, accuracy stays within 0.6 points."""
    sentences = []
    for name, variant in sorted(metrics.get("variants", {}).items()):
        before, after = variant.get("lis_mean_before"), variant.get("lis_mean")
        if before is None or after is None:
            continue
        fell = f"LIS falls {before / after:.2f}x" if after < before else "LIS does not fall"
        text = f"Variant {name}: {fell} ({before:.3f} → {after:.3f})"
        change = difference(variant.get("nll"), variant.get("nll_reference"))
        if change is not None:
            text += f", NLL changes by {change:+.4f} nats per token".replace("-", "−")
        sentences.append(f"{text}. {accuracy_verdict(metrics, name)}".strip())
    return sentences


def accuracy_verdict(metrics: Mapping[str, Any], name: str) -> str:
    """Holds, broken or cannot tell: the claim against a 95 % interval of the paired difference.

    The interval is at least what n questions without one change leave open: 1 - 0.025^(1/n), the exact bound on a
    rate of which nothing was seen. With 100 questions that is 3.6 points, so they cannot settle a claim of 0.6.
    """
    tasks = metrics.get("benchmarks", {}).get(name, {}).get("tasks", {})
    choice = [task for task in tasks.values() if "accuracy" in task]
    errors = [task["difference_stderr"] for task in choice if "difference_stderr" in task]
    change = benchmark(metrics, name)["difference"]
    if change is None or not errors:
        return ""
    unseen = 1 - 0.025 ** (1 / sum(task["n"] for task in choice))
    margin = max(1.96 * sum(error**2 for error in errors) ** 0.5 / len(errors), unseen)
    if change - margin > -CLAIMED_POINTS:
        word = "holds"
    elif change + margin < -CLAIMED_POINTS:
        word = "is broken"
    else:
        word = "cannot be told with this many questions"
    points = f"{100 * change:+.1f} ± {100 * margin:.1f}".replace("-", "−")
    return f"The claim of at most 0.6 points of accuracy lost {word}: {points} points (95 %)."


def speed_verdict(metrics: Mapping[str, Any]) -> str:
    execution = metrics.get("throughput", {}).get("execution", "")
    return f"Speed: {execution}. Multipliers are arithmetic, not measured speed." if execution else ""
