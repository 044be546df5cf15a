"""The report's sentences follow the numbers, also against the method."""

from __future__ import annotations

import pytest

from tasks.reporting import verdicts
from tasks.reporting.tables import read_metrics
from tests.reporting_metrics import build


def routing(fwp: float, fwp_kept: bool, rival: float, rival_kept: bool):
    def policy(multiplier, kept):
        return {"multiplier": multiplier, "kl_mean": 0.15, "budget_kept": kept}

    return {"routing": {"damage": "kl", "policies": {"lp_fwp": policy(fwp, fwp_kept),
                                                      "class_mean": policy(rival, rival_kept)}}}  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((1.28, True, 1.25, True), "class mean 1.250: FWP beats it (+0.030)"),
        ((1.25, True, 1.28, True), "class mean 1.280: FWP does not beat it (−0.030)"),
        ((1.25, True, 1.25, True), "FWP does not beat it (+0.000)"),
        ((1.28, True, 1.40, False), "class mean 1.400, over the budget: only FWP keeps the budget"),
        ((1.40, False, 1.25, True), "its multiplier does not count; class mean 1.250: FWP does not beat it"),
        ((1.40, False, 1.50, False), "neither keeps the budget"),
    ],
)
def test_routing(numbers, said):
    assert said in verdicts.routing_verdict(routing(*numbers))


@pytest.mark.parametrize(
    ("ours", "rival", "said"),
    [
        ((0.5, 0.4, 0.6), (0.3, 0.2, 0.39), "better"),
        ((0.3, 0.2, 0.39), (0.5, 0.4, 0.6), "worse"),
        ((0.5, 0.4, 0.6), (0.45, 0.3, 0.55), "no difference that this many requests can show"),
    ],
)
def test_a_predictor_is_better_only_where_intervals_are_apart(ours, rival, said):
    def row(values):
        return dict(zip(("spearman", "spearman_low", "spearman_high"), values, strict=True))

    assert verdicts.compare(row(ours), row(rival)).endswith(": " + said)


@pytest.mark.parametrize(
    ("change", "stderr", "word"),
    [
        (0.0, 0.002, "holds"),  # 0 - 0.39 points: above -0.6; 2000 questions leave 0.18 open
        (-0.05, 0.01, "is broken"),  # -5 + 1.96 points: below -0.6
        (-0.01, 0.03, "cannot be told"),  # -1 ± 5.9 points
    ],
)
def test_accuracy_claim(change, stderr, word):
    task = {"accuracy": 0.4, "stderr": 0.05, "n": 2000, "difference": change, "difference_stderr": stderr}
    text = {"nll": 2.9, "difference": 0.1, "difference_stderr": 9.0}  # not an accuracy: does not count
    metrics = {"benchmarks": {"rq": {"tasks": {"mmlu": task, "text": text}}}}
    assert word in verdicts.accuracy_verdict(metrics, "rq")


def test_a_hundred_questions_without_one_change_cannot_settle_the_claim():
    # 1 - 0.025^(1/100) = 1 - exp(-3.689 / 100) = 0.0362: up to 3.6 points may be lost unseen
    task = {"accuracy": 0.4, "stderr": 0.05, "n": 100, "difference": 0.0, "difference_stderr": 0.0}
    said = verdicts.accuracy_verdict({"benchmarks": {"rq": {"tasks": {"mmlu": task}}}}, "rq")
    assert "cannot be told" in said
    assert "± 3.6" in said


def test_damage_that_does_not_grow_is_said_so():
    def scores(w4, w3):
        damage = {"W4": {"holdout": {"kl_mean": w4}}, "W3": {"holdout": {"kl_mean": w3}}}
        return {"instances": {"W3": {}, "W4": {}}, "scores": damage}

    assert "grows with every bit" in verdicts.damage_verdict(scores(0.05, 0.2))
    assert "does not grow" in verdicts.damage_verdict(scores(0.2, 0.05))


def test_lis_that_does_not_fall_is_said_so():
    variant = {"lis_mean_before": 1.5, "lis_mean": 1.6}
    assert "LIS does not fall (1.500 → 1.600)" in verdicts.variant_verdicts({"variants": {"rq": variant}})[0]


def test_fwp_that_is_perplexity_is_said_so():
    same = {"equals_ppl": True, "std_weight": 0.0}
    assert verdicts.strength_verdict({"fwp": {"strengths": {"gate_prob": same}}}).startswith("FWP equals PPL")


def test_no_metrics_no_sentences(tmp_path):
    assert verdicts.all_verdicts({}) == []
    assert (
        len(verdicts.all_verdicts(read_metrics(build(tmp_path) / "metrics"))) == 17
    )  # 1 + 3 + 1 + 9 + 1 + 1 + 1


def test_what_a_promise_costs() -> None:
    def policy(multiplier: float, kept: bool = True) -> dict:
        return {"multiplier": multiplier, "budget_kept": kept}

    policies = {
        "lp_fwp": policy(1.27, False), "lp_fwp_controlled": policy(1.22),
        "request_agnostic": policy(1.25), "request_agnostic_controlled": policy(1.0),
    }  # fmt: skip
    risk = {
        "delta": 0.1,
        "policies": {
            "lp_fwp": {"overall": {"status": "guaranteed", "margin": 0.0321}},
            "request_agnostic": {"overall": {"status": "no guarantee", "margin": 0.0}},
        },
    }
    assert verdicts.risk_verdict({"routing": {"policies": policies, "risk": risk}}) == (
        "Budgets promised at 90%, margin taken off: LP FWP 1.220 (without the promise 1.270, margin 0.032 nats); "
        "request agnostic 1.000 (without the promise 1.250, nothing can be promised)."
    )
    assert verdicts.risk_verdict({"routing": {"policies": policies}}) == ""
