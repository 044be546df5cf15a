"""Policies: the published rows, what each may see, and whether a real signal pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tasks.contracts import InputError
from tasks.routing.budget import budget_tau, make_pool
from tasks.routing.comparison import compare
from tasks.routing.outcome import outcome
from tasks.routing.policies import (
    Guard,
    best_mix,
    controlled,
    lp_fwp,
    ordered,
    policies,
    request_agnostic,
    true_loss,
)
from tasks.routing.predictions import make_window
from tasks.routing.problem import InfeasibleBudget
from tasks.routing.published import MEANS, REQUESTS, published_requests, published_row, published_table
from tests.tasks.routing.made_predictions import made_predictions

POOL = make_pool(["W2", "W3", "W4"], "bits")


def made_window(frame=None, instances=("W2", "W3", "W4"), budget="relative", value=0.758, scope="overall"):
    frame = made_predictions(instances) if frame is None else frame
    return make_window(frame, make_pool(instances, "bits"), "kl", budget, value, scope)


# --- the paper's rows, through the policies of the pipeline -------------------------------------------------


def test_made_requests_have_the_published_means():
    evidence = published_requests()
    np.testing.assert_allclose(evidence.fit_damage.mean(axis=0), list(MEANS.values()), rtol=1e-12)
    assert len(evidence.ids) == REQUESTS == 88
    assert evidence.tau == pytest.approx([0.1513])


def test_request_agnostic_share_is_the_published_one():
    """W3 share 0.10 / (0.1832 - 0.0513) = 0.7582; 1 + 0.7582 / 3 = 1.2527."""
    x = request_agnostic(published_requests()).x
    np.testing.assert_allclose(x[0], [0, 0.7582, 0.2418], atol=5e-5)
    assert published_row("request_agnostic")["multiplier"] == pytest.approx(1.2527, abs=5e-5)


def test_two_widths_alone():
    """0.10 / (0.9437 - 0.0513) = 0.1121 of the requests on W2."""
    assert published_row("request_agnostic_w2_w4")["multiplier"] == pytest.approx(1.112, abs=5e-4)


def test_capacity_proportional_violates_the_budget():
    row = published_row("capacity_proportional")
    assert row["multiplier"] == pytest.approx(1.5641, abs=5e-5)
    assert row["dnll_mean"] == pytest.approx(0.504, abs=5e-4)
    assert not row["budget_kept"]


@pytest.mark.parametrize(
    ("row", "on_w3", "multiplier", "endpoint"),
    [("order_fwp", 75, 1.2841, 1.094), ("true_loss", 80, 1.3030, 1.100)],
)
def test_rows_of_whole_requests(row, on_w3, multiplier, endpoint):
    found = published_row(row)
    assert found["shares"]["W3"] * 88 == pytest.approx(on_w3)
    assert found["shares"]["W2"] == 0
    assert found["multiplier"] == pytest.approx(multiplier, abs=5e-5)
    assert found["budget_kept"]
    assert published_row(f"{row}_endpoint")["multiplier"] == pytest.approx(endpoint, abs=5e-4)


def test_endpoint_speeds_and_fixed_work():
    """75 of 88 on W3 at 3 / 4 of the time: 88 / (75 x 0.75 + 13) = 1.271."""
    assert published_row("request_agnostic_endpoint")["multiplier"] == pytest.approx(1.083, abs=5e-4)
    assert published_row("order_fwp")["multiplier_fixed_work"] == pytest.approx(1.271, abs=5e-4)


def test_published_table_shows_three_columns_and_measures_only_what_compares():
    measured = {
        "request_agnostic": {"multiplier": 1.2},
        "capacity_proportional": {"multiplier": 1.5, "dnll_mean": 0.4},
    }
    table = published_table(measured, ("W2", "W3", "W4"), "bits")
    assert table["request_agnostic"]["multiplier"]["measured"] == 1.2
    assert "measured" not in table["request_agnostic_endpoint"]["multiplier"]
    assert "measured" not in table["true_loss"]["multiplier"]
    assert "measured" not in published_table(measured, ("W2", "W4"), "bits")["request_agnostic"]["multiplier"]
    for row in table.values():
        for figures in row.values():
            assert figures["from_means"] == pytest.approx(figures["paper"], abs=5e-4)


# --- budgets and pools --------------------------------------------------------------------------------------


def test_budgets_from_fit_means():
    means = np.array([[0.9437, 0.1832, 0.0513], [1.0, 0.4, 0.2]])
    np.testing.assert_allclose(budget_tau("relative", 0.758, POOL, means), [0.15128, 0.3516], atol=1e-5)
    np.testing.assert_allclose(budget_tau("paper", 0.1, POOL, means), [0.1513, 0.3])
    np.testing.assert_allclose(budget_tau("absolute", 0.2, POOL, means), [0.2, 0.2])


def test_safest_are_the_widest_and_the_baseline_is_w4_or_the_widest():
    wide = make_pool(["W8", "W2", "W4"], "bits")
    assert wide.instances[wide.baseline] == "W4"
    np.testing.assert_allclose(budget_tau("relative", 0.5, wide, np.array([[0.0, 1.0, 0.1]])), [0.05])
    no_w4 = make_pool(["W2", "W3"], "bits")
    assert no_w4.instances[no_w4.baseline] == "W3"
    np.testing.assert_allclose(no_w4.multiplier, [1.5, 1.0])
    np.testing.assert_allclose(
        budget_tau("relative", 0.5, make_pool(["W4"], "bits"), np.array([[0.3]])), [0.3]
    )


def test_pools_that_cannot_be_rewarded_are_refused():
    with pytest.raises(InputError, match="W8"):
        make_pool(["W4", "W8"], "published_endpoint")
    with pytest.raises(InputError, match=r"instance 'fp16'.*W<bits>"):
        make_pool(["fp16"], "bits")
    with pytest.raises(InputError, match="empty"):
        make_pool([], "bits")


def test_best_mix_of_several_classes_keeps_every_budget():
    """Class b is the tighter: 0.5 p <= 0.2 gives p = 0.4."""
    mix = best_mix(np.array([2.0, 1.0]), np.array([[0.3, 0.0], [0.5, 0.0]]), np.array([0.2, 0.2]), ("a", "b"))
    np.testing.assert_allclose(mix, [0.4, 0.6])
    with pytest.raises(InfeasibleBudget, match="class 'b'"):
        best_mix(np.array([2.0, 1.0]), np.array([[0.3, 0.0], [0.5, 0.4]]), np.array([0.2, 0.2]), ("a", "b"))


# --- what policies may see, and what it is worth ------------------------------------------------------------


def test_no_policy_sees_true_holdout_damage():
    """Policies but the oracle decide the same after the true damage of the holdout requests was replaced."""
    frame = made_predictions()
    other = frame.copy()
    holdout = other["split"] == "holdout"
    for name in ("W2", "W3", "W4"):
        for kind in ("kl", "dnll"):
            other.loc[holdout, f"{kind}_{name}"] = 1.0 + np.arange(holdout.sum())
    first, second = (
        compare(made_window(frame), "kl", "overall", 0),
        compare(made_window(other), "kl", "overall", 0),
    )
    for name, choice in first.choices.items():
        if name != "true_loss":
            np.testing.assert_array_equal(choice, second.choices[name])
    assert "true_loss" in second.infeasible  # nobody can keep the budget there, and the oracle knows


def test_real_signal_beats_one_share_for_all_and_shuffled_predictions_lose_the_gain():
    frame = made_predictions(per_class=400)
    window = made_window(frame)
    rng = np.random.default_rng(1)
    shuffled = replace(window.evidence, predicted=rng.permutation(window.evidence.predicted, axis=0))
    decisions = {
        "lp_fwp": lp_fwp(window.evidence),
        "agnostic": request_agnostic(window.evidence),
        "shuffled": lp_fwp(shuffled),
        "oracle": true_loss(replace(window.evidence, predicted=window.true_damage["kl"])),
    }
    found = {}
    for name, decision in decisions.items():
        true = window.true_damage
        found[name] = outcome(
            POOL, decision.x, true, window.classes, window.class_names, window.tau, "overall", "kl"
        )
    tau = window.tau["kl"][0]
    gain = found["lp_fwp"]["multiplier"] - found["agnostic"]["multiplier"]
    assert gain > 0.03
    assert found["lp_fwp"]["kl_mean"] <= 1.05 * tau
    # Shuffled, the same number of requests takes each instance, but the wrong ones: the damage is that of a
    # blind mix, far over the budget, which the true predictions kept.
    assert found["shuffled"]["multiplier"] == pytest.approx(found["lp_fwp"]["multiplier"], abs=1e-6)
    assert found["shuffled"]["kl_mean"] > 1.2 * tau
    blind = decisions["lp_fwp"].x.mean(axis=0) @ window.true_damage["kl"].mean(axis=0)
    assert found["shuffled"]["kl_mean"] == pytest.approx(blind, rel=0.1)
    assert found["oracle"]["budget_kept"]
    assert found["oracle"]["multiplier"] >= found["lp_fwp"]["multiplier"] - 0.02


def test_shuffled_predictions_lose_the_gain_at_equal_damage():
    """With the budget lowered until the shuffled LP really keeps tau, its multiplier is no better than one
    share.
    """
    window = made_window(made_predictions(per_class=400))
    tau, true = window.tau["kl"][0], window.true_damage
    shuffled = np.random.default_rng(1).permutation(window.evidence.predicted, axis=0)

    def at_equal_damage(predicted):
        low, high = 0.3 * tau, 2 * tau
        for _ in range(30):
            middle = (low + high) / 2
            x = lp_fwp(replace(window.evidence, predicted=predicted, tau=np.array([middle]))).x
            low, high = (middle, high) if (x * true["kl"]).sum() / len(x) <= tau else (low, middle)
        return float((x @ POOL.multiplier).mean())

    agnostic = (
        best_mix(POOL.reward, true["kl"].mean(axis=0)[None], np.array([tau]), ("overall",)) @ POOL.multiplier
    )
    assert at_equal_damage(window.evidence.predicted) > agnostic + 0.03
    assert at_equal_damage(shuffled) < agnostic + 0.01


@pytest.mark.parametrize("sign", [1, -1])
def test_an_order_finds_its_direction_and_longest_prefix(sign):
    """Fit: extra damage 0.0, 0.1, 0.2, 0.3 along the signal (or against it), tau = 0.075: prefixes of 1, 2, 3
    mean 0, 0.025, 0.075 on average over four, so three take W3; the threshold lies between the third and the
    fourth."""
    evidence = published_requests(("W3", "W4"))
    extra = np.array([0.0, 0.1, 0.2, 0.3])
    signal = sign * np.array([1.0, 2.0, 3.0, 4.0])
    damage = np.stack([extra, np.zeros(4)], axis=1)
    group = np.zeros(4, dtype=int)
    evidence = replace(
        evidence, tau=np.array([0.075]), fit_classes=group, fit_damage=damage,
        fit_signals={"log_fwp": signal}, ids=("a", "b"), classes=group[:2],
        signals={"log_fwp": sign * np.array([3.4, 3.6])}, predicted=damage[:2], class_mean=damage[:2],
    )  # fmt: skip
    decision = ordered("log_fwp")(evidence)
    np.testing.assert_array_equal(decision.x, [[1, 0], [0, 1]])
    rule = decision.rule["order"]["overall"]
    assert rule["threshold"] == pytest.approx(sign * 3.5)
    assert rule["direction"] == ("rising" if sign > 0 else "falling")


def test_equal_signals_are_not_parted():
    evidence = published_requests()
    flat = {"log_fwp": np.zeros(REQUESTS)}
    x = ordered("log_fwp")(replace(evidence, fit_signals=flat, signals=flat)).x
    np.testing.assert_array_equal(x, np.tile([0, 0, 1], (REQUESTS, 1)))  # all on W3 would break the budget


def test_class_means_tie_whole_classes_and_share_alike():
    window = made_window()
    x = compare(window, "kl", "overall", 0).decisions["class_mean"].x
    for c in range(3):
        rows = x[window.classes == c]
        np.testing.assert_allclose(rows, np.tile(rows[0], (len(rows), 1)))
    used = (x * window.evidence.class_mean).sum() / len(x)
    assert used <= window.tau["kl"][0] + 1e-12


def test_a_budget_per_class_is_kept_on_predictions_in_every_class():
    window = made_window(scope="class")
    assert window.evidence.class_names == ("code", "maths", "prose")
    x = compare(window, "kl", "class", 0).decisions["lp_fwp"].x
    used = (x * window.evidence.predicted).sum(axis=1)
    means = pd.Series(used).groupby(window.classes).mean().to_numpy()
    assert (means <= window.tau["kl"] + 1e-12).all()


@pytest.mark.parametrize("instances", [("W2", "W4"), ("W2", "W3"), ("W4",), ("W2", "W3", "W4", "W8")])
@pytest.mark.parametrize("scope", ["overall", "class"])
def test_pools_of_any_size(instances, scope):
    window = made_window(instances=instances, scope=scope)
    found = compare(window, "kl", scope, 0)
    assert set(found.choices) | set(found.infeasible) == set(policies(window.evidence.pool))
    baseline = window.evidence.pool.instances[window.evidence.pool.baseline]
    assert found.outcomes[f"static_{baseline}"]["multiplier"] == 1


def test_an_infeasible_budget_stops_the_method_and_names_the_class():
    with pytest.raises(
        InfeasibleBudget, match=r"class 'code': the least reachable mean damage is 0\.0\d+, tau is 0\.01"
    ):
        compare(made_window(budget="absolute", value=0.01, scope="class"), "kl", "class", 0)


# --- under a guarantee --------------------------------------------------------------------------------------


def guarded(margin: float, guaranteed: bool = True, name: str = "request_agnostic"):
    guard = Guard(np.array([margin]), np.array([guaranteed]))
    return replace(published_requests(), guards={name: guard})


def test_a_margin_is_taken_off_the_budget():
    """tau 0.1513 - 0.05 leaves 0.05 above W4: a W3 share of 0.05 / 0.1319 = 0.3791."""
    decision = controlled("request_agnostic")(guarded(0.05))
    np.testing.assert_allclose(decision.x, np.tile([0, 0.3791, 0.6209], (REQUESTS, 1)), atol=5e-5)
    assert decision.rule["margin"] == {"overall": 0.05} and decision.rule["routed"] == ["overall"]


def test_without_margin_it_is_the_point_estimate():
    plain = lp_fwp(published_requests()).x
    np.testing.assert_allclose(controlled("lp_fwp")(guarded(0.0, name="lp_fwp")).x, plain)


@pytest.mark.parametrize(("margin", "guaranteed"), [(0.0, False), (0.11, True)])
def test_no_guarantee_or_no_room_means_the_safest(margin: float, guaranteed: bool):
    """tau - 0.11 = 0.0413 lies below W4's own 0.0513."""
    decision = controlled("request_agnostic")(guarded(margin, guaranteed))
    assert (decision.x == [0, 0, 1]).all() and decision.rule["routed"] == [] and decision.solution is None


def test_one_class_guaranteed_another_not():
    window = made_window(scope="class")
    guard = Guard(np.array([0.0, 0.02, 0.0]), np.array([False, True, True]))
    evidence = replace(window.evidence, guards={"class_mean": guard})
    decision = controlled("class_mean")(evidence)
    first = evidence.classes == 0
    assert (decision.x[first] == [0, 0, 1]).all() and decision.x[~first, 1].mean() > 0.5
    for c in (1, 2):  # what the routed classes know of their damage keeps tau - margin
        rows = evidence.classes == c
        spent = (decision.x * evidence.class_mean)[rows].sum(axis=1).mean()
        assert spent == pytest.approx(evidence.tau[c] - guard.margin[c])


def test_requests_outside_go_to_the_safest_and_count():
    evidence = made_window().evidence
    outside = np.zeros(len(evidence.ids), dtype=bool)
    outside[[0, 5, 7]] = True
    evidence = replace(
        evidence, outside=outside, guards={"lp_fwp": Guard(np.zeros(1), np.ones(1, dtype=bool))}
    )
    plain, safe = lp_fwp(replace(evidence, outside=np.zeros_like(outside))), lp_fwp(evidence)
    assert (safe.x[outside] == [0, 0, 1]).all() and not (plain.x[outside] == [0, 0, 1]).all()
    spent = (safe.x * evidence.predicted).sum(axis=1).mean()
    assert spent == pytest.approx(evidence.tau[0])  # what they leave of the budget serves the others
    assert (controlled("lp_fwp")(evidence).x == safe.x).all()
    assert safe.solution is not None and safe.solution.certificate.holds


def test_policies_under_a_guarantee_say_so():
    window = made_window()
    guard = Guard(np.zeros(1), np.ones(1, dtype=bool))
    window = replace(window, evidence=replace(window.evidence, guards={"lp_fwp": guard}))
    found = compare(window, "kl", "overall", 0)
    assert found.outcomes["lp_fwp_controlled"]["guaranteed"] == 1.0
    assert "guaranteed" not in found.outcomes["lp_fwp"] and "class_mean_controlled" not in found.outcomes
