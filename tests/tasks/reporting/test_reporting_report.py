"""The report stands alone, says what it shows, and is the same bytes for the same results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pandas as pd
import pytest

from tasks.reporting import pictures, report
from tasks.reporting.tables import read_metrics
from tests.reporting_metrics import build


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("made"))
    metrics = read_metrics(folder / "metrics")
    return metrics, pd.read_parquet(folder / "artifacts/fwp/predictions.parquet")


@pytest.fixture(scope="module")
def terms(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("terms"))
    return pd.read_parquet(folder / "artifacts/decomposition/terms.parquet")


@pytest.fixture(scope="module")
def written(made, terms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report.write_report(folder, *made, {"runtime.threads": 2}, "abc", "http://127.0.0.1:5000/#/x", terms)
    return folder


def test_same_results_same_bytes(made, terms, written, tmp_path):
    report.write_report(tmp_path, *made, {"runtime.threads": 2}, "abc", "http://127.0.0.1:5000/#/x", terms)
    names = sorted(path.name for path in written.iterdir())
    assert names == ["damage.png", "fwp_damage.csv", "fwp_damage.png", "lis.csv", "lis.png", "load.png",
                     "policies.png", "report.html", "terms.png"]  # fmt: skip
    for name in names:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes(), name


def test_it_needs_no_other_file_and_no_network(written):
    html = (written / "report.html").read_text()
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", html)
    assert sum(source.startswith("data:image/png;base64,") for source in sources) == 6
    others = {source for source in sources if not source.startswith("data:")}
    assert others == {"http://127.0.0.1:5000/#/x"}  # the link to the MLflow server, when one runs
    assert "<script" not in html and "url(" not in html and "@import" not in html


class Tags(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_html_is_well_formed_and_rows_have_as_many_cells_as_columns(written):
    html = (written / "report.html").read_text()
    parser = Tags()
    parser.feed(html)
    assert parser.open == []
    tables = re.findall(r"<table>.*?</table>", html, flags=re.DOTALL)
    assert len(tables) > 12
    for table in tables:
        rows = [len(row) for row in ET.fromstring(table).iter("tr")]
        assert len(set(rows)) == 1, table[:200]


def test_what_is_measured_stands_in_it(made, written):
    metrics, _ = made
    html = (written / "report.html").read_text()
    expected = [
        "dequantized execution: no speed gain on this machine",
        "mmlu_other was too small and went into mmlu_stem",
        "R² cannot pass 0.80; not measurable within classes",
        "order FWP endpoint",
        "quantize_instances",
        "runtime.threads",
        f"{metrics['routing']['budget']['tau']['overall']:.3f} nats per token",
    ]
    expected += [
        "one expert, number 7 of decoder layer 1, alone does 50 % of the whole instance&#39;s KL",
        "W3: layer 1, expert 7",
        "interaction of pairs",
        "rest, with sampling error",
        "On W3 these beat the class mean within classes: ridge.",
        "On W2 nothing beats the class mean within classes",
    ]
    expected.append("raised its loss from 3.030 to 3.340 nats per token")
    for text in expected:
        assert text in html, text


def test_without_metrics_it_is_still_a_report(tmp_path):
    report.write_report(tmp_path, {}, None, {}, "abc", "http://127.0.0.1:5000/")
    html = (tmp_path / "report.html").read_text()
    assert "No results yet." in html and "data:image" not in html


def test_without_a_decomposition_the_rest_stands(made, tmp_path):
    metrics, predictions = made
    rest = {key: value for key, value in metrics.items() if key != "decomposition"}
    report.write_report(tmp_path, rest, predictions, {}, "abc", "http://127.0.0.1:5000/")
    html = (tmp_path / "report.html").read_text()
    assert "No damage has been decomposed." in html and "Super experts" not in html
    assert not (tmp_path / "terms.png").exists() and (tmp_path / "policies.png").exists()
    unsupported = {"supported": False, "reason": "x is an encoder-decoder: no", "version": 1}
    report.write_report(tmp_path, {"decomposition": unsupported}, None, {}, "abc", "http://127.0.0.1:5000/",
                        pd.DataFrame(columns=["instance", "split"]))  # fmt: skip
    assert (
        "Not supported for this model: x is an encoder-decoder: no." in (tmp_path / "report.html").read_text()
    )


def test_names_in_metrics_cannot_break_the_page(made, tmp_path):
    metrics, _ = made
    evil = {"reference": {**metrics["reference"], "source": "<script>alert(1)</script>"}}
    report.write_report(tmp_path, evil, None, {}, "abc", "http://127.0.0.1:5000/")
    assert "<script" not in (tmp_path / "report.html").read_text()


def test_a_budget_per_class_draws_no_common_line(made, tmp_path):
    metrics, _ = made
    routing = {**metrics["routing"], "budget": {"scope": "class", "tau": {"code": 0.1, "bbh": 0.2}}}
    pictures.policies_against_budget({**metrics, "routing": routing}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_labels_are_spread_apart():
    # 0.5, 0.5, 0.5 wanted, 0.2 apart: upwards 0.5, 0.7, 0.9; nothing leaves [0, 1]
    assert pictures.spread([0.5, 0.5, 0.5], 0.2) == pytest.approx([0.5, 0.7, 0.9])
    # near the top the downward sweep pushes back: 0.95, 1.15 -> 0.8, 1.0
    assert pictures.spread([0.95, 0.95], 0.2) == pytest.approx([0.8, 1.0])
