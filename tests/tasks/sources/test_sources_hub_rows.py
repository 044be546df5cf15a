import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts import InputError
from tasks.params import HubSource

COLUMNS = {"id": "qid", "class": "topic", "prompt": "question", "response": "answer"}


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A local dataset folder with two parquet splits, and a datasets cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "made"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        pd.DataFrame(
            {
                "qid": [f"{split}-{number}" for number in range(count)],
                "topic": ["math", "code", "math"][:count],
                "question": [f"What is {number}?" for number in range(count)],
                "answer": [str(number) for number in range(count)],
            }
        ).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def source(folder: Path | str | None, **changes) -> HubSource:
    values = {
        "id": None if folder is None else str(folder),
        "revision": "main",
        "split": "train",
        "columns": COLUMNS,
    }
    return HubSource.model_validate({**values, **changes})


def test_columns_are_mapped(dataset):
    from tasks.sources.hub_rows import read_rows

    rows = read_rows(source(dataset))
    assert [(row.id, row.class_name, row.prompt, row.response) for row in rows] == [
        ("train-0", "math", "What is 0?", "0"),
        ("train-1", "code", "What is 1?", "1"),
        ("train-2", "math", "What is 2?", "2"),
    ]
    assert len(read_rows(source(dataset, split="test"))) == 2


def test_what_cannot_be_read_is_an_input_error(dataset):
    from tasks.sources.hub_rows import read_rows

    with pytest.raises(InputError, match=r"no column 'questions' among .*; did you mean 'question'"):
        read_rows(source(dataset, columns={**COLUMNS, "prompt": "questions"}))
    with pytest.raises(InputError, match="split validation: cannot be read"):
        read_rows(source(dataset, split="validation"))
    with pytest.raises(InputError, match=r"hub\.id is empty"):
        read_rows(source(None))


def test_offline_and_not_cached_is_an_input_error(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE when they are imported."""
    code = """
from tasks.contracts import InputError
from tasks.params import HubSource
from tasks.sources.hub_rows import read_rows
try:
    read_rows(HubSource(id='nobody/nothing', revision='main', split='train', columns={}))
except InputError as error:
    print(error)
"""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert "dataset nobody/nothing, revision main, split train: cannot be read" in done.stdout, done.stderr
    assert "without a network" in done.stdout
