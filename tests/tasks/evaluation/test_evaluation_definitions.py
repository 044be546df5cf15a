import json
from pathlib import Path

import pytest

from tasks.contracts import InputError
from tasks.evaluation.definitions import benchmark_names, read_benchmarks

SHARED = Path(__file__).parents[4] / "shared/data"
SIX = ["mmlu", "gsm8k", "truthfulqa_mc1", "piqa", "winogrande", "hellaswag"]


@pytest.fixture
def requests(tmp_path) -> Path:
    rows = [
        {
            "id": str(number),
            "subject": "x",
            "question": f"q\u2028{number}",
            "choices": list("abcd"),
            "answer": 1,
        }
        for number in range(9)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "questions.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def read(names: list[str], requests: Path, limit: dict[str, int] | None = None, seed: int = 0, data=None):
    return read_benchmarks(names, {"requests": requests, "data": data}, limit or {}, seed)


def test_every_definition_names_itself():
    assert benchmark_names() == sorted([*SIX, "mmlu_packaged", "heldout_perplexity"])


def test_rows_keep_their_number_and_order(requests):
    (whole,) = read(["mmlu_packaged"], requests)
    assert [row["row"] for row in whole.rows] == list(range(9)) and whole.rows[3]["question"] == "q\u20283"
    (some,) = read(["mmlu_packaged"], requests, {"mmlu_packaged": 4})
    numbers = [row["row"] for row in some.rows]
    assert len(numbers) == 4 and numbers == sorted(numbers)
    assert [row["id"] for row in some.rows] == [str(number) for number in numbers]
    seeds = [tuple(row["row"] for row in read(["mmlu_packaged"], requests, {"mmlu_packaged": 4}, s)[0].rows)
             for s in range(5)]  # fmt: skip
    assert len(set(seeds)) > 1


def test_bad_names_and_files_are_input_errors(requests):
    with pytest.raises(InputError, match="unknown benchmark 'mmlu_package'; did you mean 'mmlu_packaged'"):
        read(["mmlu_package"], requests)
    with pytest.raises(InputError, match="unknown benchmark 'hella'"):
        read(["mmlu_packaged"], requests, {"hella": 3})
    with pytest.raises(InputError, match=r"'piqa' reads piqa/validation\.jsonl .*data_dir, which is empty"):
        read(["piqa"], requests)
    with pytest.raises(InputError, match=r"'piqa': no file .*validation\.jsonl"):
        read(["piqa"], requests, data=requests)
    with pytest.raises(InputError, match=r"'heldout_perplexity': no file .*perplexity\.jsonl"):
        read(["heldout_perplexity"], requests)
    (requests / "perplexity.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(InputError, match=r"perplexity\.jsonl:2: no field 'text'"):
        read(["heldout_perplexity"], requests)
    (requests / "perplexity.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        read(["heldout_perplexity"], requests)


@pytest.mark.shared
@pytest.mark.parametrize("name", SIX)
def test_the_shared_files_have_the_fields(name, requests):
    (benchmark,) = read([name], requests, {name: 5}, data=SHARED)
    assert len(benchmark.rows) == 5
