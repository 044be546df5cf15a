from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.toy_dag import write_toy


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the toy DAG; it is the current folder of the test."""
    monkeypatch.chdir(tmp_path)
    return write_toy(tmp_path)
