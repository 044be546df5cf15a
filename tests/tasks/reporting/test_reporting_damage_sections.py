"""Sections on terms, fragility and splits say what the metrics hold."""

from __future__ import annotations

import pytest

from tasks.reporting import damage_sections
from tasks.reporting.tables import read_metrics
from tests.reporting_metrics import build


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    return read_metrics(build(tmp_path_factory.mktemp("made")) / "metrics")


@pytest.fixture(scope="module")
def content(metrics):
    return damage_sections.content(metrics)


def test_a_row_per_term_with_every_instances_mean_and_share(metrics, content):
    rows = {row["term"]: row for row in content["terms"]}
    assert list(rows) == ["total damage", "bias", "separable", "not separable", "interaction of pairs",
                          "rest, with sampling error", "interaction and the rest together", "route change"]  # fmt: skip
    found = metrics["decomposition"]["instances"]["W3"]["terms"]["interaction"]
    row = rows["interaction of pairs"]
    assert row["W3 (nats per token)"].startswith(f"{found['mean']:.4f}".replace("-", "−") + " [")
    assert row["W3: of the differences"] == f"{100 * found['share']:.0f} %".replace("-", "−")
    assert row["W3: ± from sampled pairs (nats per token)"] == f"{found['sampling_error']:.4f}"
    assert rows["total damage"]["W3: of the differences"] is None
    assert list(rows["total damage"]) == list(row) and len(row) == 1 + 3 * 3
    assert rows["bias"]["W3 (nats per token)"] == "0.0000 [0.0000, 0.0000]"  # no minus before a zero
    assert "4 of 10 pairs" in content["decomposition_lead"] and "5 holdout" in content["decomposition_lead"]


def test_agreement_stands_beside_cost(content):
    rows = {row["estimator"]: row for row in content["agreement"]}
    assert list(rows) == ["swap", "taylor KL", "taylor ΔNLL", "output error", "router row norm"]
    assert rows["taylor KL"]["W2 correlation with position 0"] == 0.7
    assert rows["taylor KL"]["W2: off at the top by"] == "3.2x"
    assert rows["router row norm"]["W2 correlation with position 0"] == -0.2
    assert rows["router row norm"]["W2 correlation without"] is None
    assert rows["taylor KL"]["W2 correlation estimated on all tokens"] == 0.7
    cost = {name: (row["forward tokens"], row["backward tokens"]) for name, row in rows.items()}
    assert cost == {
        "swap": ("54,600", "0"), "taylor KL": ("4,096", "8,192"), "taylor ΔNLL": ("4,096", "8,192"),
        "output error": ("4,096", "0"), "router row norm": ("0", "0"),
    }  # fmt: skip
    assert "3 when position 0 does not count" in content["fragility_lead"]


def test_super_experts_are_named_with_their_share(content):
    first, second = content["super_experts"][:2]
    assert first["expert"] == "W4: layer 1, expert 7" and first["share of all KL"] == 0.5
    assert first["KL alone"] == "0.0255" and first["KL alone without position 0"] == "0.00051"
    assert first["taylor KL with position 0"] == "0.0127" and first["taylor KL without"] == "0.00637"
    assert second["share of all KL"] is None


def test_splits_show_the_target_in_use_first(content):
    targets = content["splits"]
    assert [(own["title"], own["used"]) for own in targets] == [
        ("KL of responses", True), ("ΔNLL of prompts", False), ("ΔNLL of responses", False),
        ("KL of prompts", False),
    ]  # fmt: skip
    wide, middle, narrow = targets[0]["tables"]
    assert [own["instance"] for own in (wide, middle, narrow)] == ["W4", "W3", "W2"]
    assert middle["predictors"][1]["beats the class mean within classes"] is True
    assert "these beat the class mean within classes: ridge" in middle["verdict"]
    assert "nothing beats the class mean" in narrow["verdict"]
    assert middle["predictors"][0]["Spearman within classes"] is None
    assert [row["ridge on these and all above"] for row in middle["adds"]] == [
        "class",
        "log length",
        "separable",
    ]
    assert "50 seeded halvings" in content["splits_lead"]


def test_verdicts_by_hand():
    """Total 0.1; additive 0.02 + 0.06 - 0.01 = 0.07, 70 %; routes 0.005, 5 %."""
    values = {"total": 0.1, "bias": 0.02, "separable": 0.06, "separability": -0.01, "route_change": 0.005}
    terms = {name: {"mean": value} for name, value in values.items()}
    expert = {
        "layer": 3, "expert": 5, "share": {"kl": 0.4}, "single": {"kl": 0.04},
        "single_without_first": {"kl": 0.002},
    }  # fmt: skip
    own = {"terms": {**terms, "requests": 6}, "super_experts": [expert]}
    found = damage_sections.verdicts({"decomposition": {"damage": "kl", "instances": {"W4": own}}})
    assert "add up to 70 % of the damage; changed routes make 5 % of it" in found[0]
    assert "6 holdout requests" in found[0]
    assert "number 5 of decoder layer 3, alone does 40 % of the whole instance's KL" in found[1]
    assert "(0.0400 nats per token; 0.0020 where position 0 is spared)" in found[1]


def test_without_metrics_there_is_nothing_to_say():
    content = damage_sections.content({})
    assert content["terms"] == content["agreement"] == content["super_experts"] == content["splits"] == []
    assert damage_sections.verdicts({}) == []
    unsupported = {"supported": False, "reason": "an encoder-decoder", "version": 1}
    assert damage_sections.content({"decomposition": unsupported})["decomposition_lead"].endswith(
        "an encoder-decoder."
    )


def test_other_requests_have_a_section_of_their_own_where_they_were_measured(metrics, content):
    assert content["other_splits"] == content["other_policies"] == [] and content["other_lead"] == ""
    other = {
        "file": "mine.jsonl", "requests": {"count": 40, "classes": {"b": {}, "a": {}}},
        "fwp": metrics["fwp"], "routing": metrics["routing"],
    }  # fmt: skip
    found = damage_sections.content({**metrics, "other_requests": other})
    assert found["other_lead"].startswith("40 requests of mine.jsonl in 2 classes (a, b), on the same pool.")
    assert [target["used"] for target in found["other_splits"]] == [True]
    assert found["other_splits"][0] == content["splits"][0]
    assert {row["policy"] for row in found["other_policies"]} >= {"LP FWP", "class mean"}
