"""README's result tables are those of metrics/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.params import load_params
from tasks.reporting.readme import between
from tasks.reporting.tables import read_metrics
from tasks.track_runs import readme_tables

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["instances", "variants", "policies"])
def test_tables_equal_metrics(name):
    metrics = read_metrics(ROOT / "metrics", load_params(ROOT / "params.yaml").model_names)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert between(name, text) == readme_tables(metrics)[name], "run `python -m tasks.track_runs`"
