"""Rows and cells of the result tables."""

from __future__ import annotations

import json

import pytest

from tasks.reporting import tables
from tests.reporting_metrics import build


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    return tables.read_metrics(build(tmp_path_factory.mktemp("tables")) / "metrics")


def test_a_model_that_params_no_longer_list_is_left_out(tmp_path):
    for name in ("W3", "W8"):
        (tmp_path / "instances").mkdir(exist_ok=True)
        (tmp_path / f"instances/{name}.json").write_text(json.dumps({"name": name}))
    (tmp_path / ".fwp.json.7.tmp.json").write_text("{half")  # what a kill may leave
    found = tables.read_metrics(tmp_path, models=["reference", "W3"])
    assert found == {"instances": {"W3": {"name": "W3"}}}


def test_rows_come_from_the_metrics_and_what_does_not_apply_is_none(metrics):
    reference, w4, w3, w2 = tables.instance_rows(metrics)
    assert [row["instance"] for row in (reference, w4, w3, w2)] == ["reference", "W4", "W3", "W2"]
    assert reference["ΔNLL"] is None and reference["accuracy change"] is None
    assert w3["KL"] == metrics["scores"]["W3"]["holdout"]["kl_mean"]
    assert w3["accuracy change"] == metrics["benchmarks"]["W3"]["tasks"]["mmlu_packaged"]["difference"]


def test_no_metrics_give_no_rows():
    assert tables.instance_rows({}) == tables.variant_rows({}) == tables.policy_rows({}) == []
    assert tables.markdown([]) == "(no results yet)"


def test_variant_row(metrics):
    (row,) = tables.variant_rows(metrics)
    assert row["replicas"] == 1
    # 520,000,000 / 538,060,032 - 1 = -3.3565 %
    assert tables.cell("size change", row["size change"]) == "−3.4 %"
    assert row["ΔNLL"] == pytest.approx(2.9003 - 2.9)


def test_policies_go_from_the_slowest_to_the_fastest(metrics):
    rows = tables.policy_rows(metrics)
    multipliers = [row["multiplier"] for row in rows]
    assert multipliers == sorted(multipliers)
    assert len(rows) == len(metrics["routing"]["policies"])
    assert rows[0]["policy"] == "static W4" and rows[0]["share W4"] == 1


def test_the_mean_of_accuracies_has_the_standard_error_of_a_mean():
    tasks = {
        "a": {"accuracy": 0.5, "stderr": 0.03},
        "b": {"accuracy": 0.3, "stderr": 0.04},
        "text": {"nll": 2.0},
    }
    found = tables.benchmark({"benchmarks": {"W3": {"tasks": tasks}}}, "W3")
    assert found["accuracy"] == pytest.approx(0.4)
    assert found["stderr"] == pytest.approx(0.025)  # sqrt(0.03² + 0.04²) / 2 = 0.05 / 2
    assert found["difference"] is None


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("ΔNLL", -0.00049, "−0.000"),
        ("ΔNLL", 0.18321, "0.183"),
        ("accuracy", 0.375, "37.5 %"),
        ("accuracy change", -0.02, "−2.0 pt"),
        ("share W3", 0.7582, "75.8 %"),
        ("budget kept", False, "no"),
        ("size (GiB)", 18.0577, "18.06"),
        ("size (GiB)", 0.41321, "0.413"),
        ("replicas", 1, "1"),
        ("LIS", None, "–"),
    ],
)
def test_cells(column, value, text):
    assert tables.cell(column, value) == text


def test_markdown_has_one_width_and_drops_empty_columns():
    rows = [{"policy": "a", "KL": 0.5, "LIS": None}, {"policy": "b", "KL": None, "LIS": None}]
    assert tables.markdown(rows) == "| policy | KL |\n| --- | ---: |\n| a | 0.500 |\n| b | – |"


def test_step_versions_and_flat_keys(metrics):
    assert tables.step_versions(metrics)["quantize_instances"] == 1
    assert len(tables.step_versions(metrics)) == 11
    assert tables.flatten({"a": {"b": 1, "c": [2, 3]}}) == {"a.b": 1, "a.c": "[2, 3]"}
