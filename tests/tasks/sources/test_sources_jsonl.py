import json
from pathlib import Path

import pytest

from tasks.contracts import InputError
from tasks.sources.jsonl import read_rows

GOOD = {"id": "a", "class": "math", "prompt": "1 + 1 =", "response": "2"}
SHARED = Path(__file__).parents[4] / "shared/data/requests/requests.jsonl"


def write(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_rows_are_read_in_order(tmp_path):
    rows = read_rows(write(tmp_path, GOOD, {**GOOD, "id": 7, "source": "ignored", "response": None}, ""))
    assert [(row.id, row.class_name, row.prompt, row.response) for row in rows] == [
        ("a", "math", "1 + 1 =", "2"),
        ("7", "math", "1 + 1 =", ""),
    ]


def test_lines_end_at_a_line_feed_alone(tmp_path):
    text = "one\u2028two\u0085three\x0bfour"
    rows = read_rows(write(tmp_path, {**GOOD, "prompt": text}))
    assert [row.prompt for row in rows] == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"requests\.jsonl:2: not JSON"),
        ("[1, 2]", r"requests\.jsonl:2: list, expected an object"),
        ({"id": "b", "class": "math", "response": "2"}, r"requests\.jsonl:2: no 'prompt'"),
        ({**GOOD, "id": "b", "prompt": "  "}, r"requests\.jsonl:2: 'prompt' is empty"),
        ({**GOOD, "id": "b", "prompt": 3}, r"requests\.jsonl:2: 'prompt' is int, expected text"),
        ({**GOOD, "id": "b", "class": None}, r"requests\.jsonl:2: 'class' is NoneType"),
        ({**GOOD, "id": "b", "id_": 1, "response": ["2"]}, r"requests\.jsonl:2: 'response' is list"),
        (GOOD, r"requests\.jsonl:2: id 'a' was used before, at .*requests\.jsonl:1"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        read_rows(write(tmp_path, GOOD, line))


def test_bytes_that_are_no_text_and_empty_files(tmp_path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"id": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"bytes\.jsonl:1: not JSON"):
        read_rows(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(InputError, match="no rows"):
        read_rows(path)
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "absent.jsonl")


@pytest.mark.shared
def test_the_shared_requests_are_read():
    rows = read_rows(SHARED)
    assert len(rows) == 602
    assert len({row.class_name for row in rows}) == 7
