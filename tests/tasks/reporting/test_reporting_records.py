"""Flat runs with the same nine keys; what does not apply is absent."""

from __future__ import annotations

import math

import pytest

from tasks.reporting.records import NINE_KEYS, records
from tasks.reporting.tables import read_metrics
from tests.reporting_metrics import POLICIES, build


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    return read_metrics(build(tmp_path_factory.mktemp("records")) / "metrics")


@pytest.fixture(scope="module")
def by_name(metrics):
    return {record.name: record for record in records(metrics)}


def nine(record):
    return {key for key in record.metrics if key in NINE_KEYS}


def test_one_record_per_reference_instance_variant_and_policy(by_name):
    kinds = {name: record.kind for name, record in by_name.items()}
    assert kinds == {"reference": "reference", "W2": "instance", "W3": "instance", "W4": "instance",
                     "rq": "variant", **dict.fromkeys(POLICIES, "policy")}  # fmt: skip


def test_what_does_not_apply_is_absent(by_name):
    policy_only = {"multiplier", "budget_kept"}
    assert nine(by_name["reference"]) == set(NINE_KEYS) - policy_only - {"dnll_mean", "kl_mean"}
    assert nine(by_name["W3"]) == set(NINE_KEYS) - policy_only
    assert nine(by_name["rq"]) == set(NINE_KEYS) - policy_only - {"dnll_mean", "kl_mean"}
    assert nine(by_name["lp_fwp"]) == {"size_gib", "dnll_mean", "kl_mean", "multiplier", "budget_kept"}


def test_every_other_key_sorts_after_the_nine_and_has_letters_that_mlflow_takes(by_name):
    for record in by_name.values():
        for key, value, _ in record.points():
            assert key in NINE_KEYS or key.startswith("z."), key
            assert not set(key) & set("@=[]{}()/"), key
            assert math.isfinite(value), key
    assert max(NINE_KEYS) < "z."


def test_values_come_from_the_files(metrics, by_name):
    assert by_name["W3"].metrics["kl_mean"] == metrics["scores"]["W3"]["holdout"]["kl_mean"]
    assert (
        by_name["W3"].metrics["tokens_per_s"] == 21.5 and by_name["W3"].tags["tokens_per_s.phase"] == "decode"
    )
    assert by_name["W3"].metrics["z.fwp.spearman"] == 0.52
    assert (
        by_name["static_W4"].metrics["budget_kept"] == 1 and by_name["static_W2"].metrics["budget_kept"] == 0
    )
    assert by_name["rq"].curves["z.layers.lis_calibration"][1] == metrics["variants"]["rq"]["lis_logical"][0]


def test_a_policy_holds_the_instances_it_uses_and_the_scorer(metrics, by_name):
    sizes = {name: metrics["instances"][name]["size_gib"] for name in ("W2", "W3", "W4")}
    assert by_name["lp_fwp"].metrics["size_gib"] == pytest.approx(sum(sizes.values()))
    assert by_name["order_fwp"].tags["resident"] == "W3 W4"
    assert by_name["static_W4"].metrics["size_gib"] == sizes["W4"]


def test_not_finite_is_dropped_and_named(metrics):
    broken = {**metrics, "instances": {"W3": {**metrics["instances"]["W3"], "stored_bits": math.inf}}}
    record = next(record for record in records(broken) if record.name == "W3")
    assert "stored_bits" not in record.metrics
    assert record.tags["non_finite"] == "stored_bits"


def test_the_first_ten_are_the_ones_to_see(metrics):
    names = [record.name for record in records(metrics)][:10]
    policies = ["lp_fwp", "class_mean", "request_agnostic", "order_fwp", "true_loss"]
    assert names == ["reference", "W4", "W3", "W2", "rq", *policies]


def test_no_metrics_no_records():
    assert records({}) == []
