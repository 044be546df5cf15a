import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tasks import prepare_requests
from tasks.contracts import REQUEST_COLUMNS, InputError, read_json
from tasks.params import PrepareRequests, load_params
from tasks.sources import split
from tasks.sources.rows import Question
from tests.seeded_models import seeded_tokenizer

SHARED = Path(__file__).parents[3] / "shared/data/requests/requests.jsonl"


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """A folder with the seeded tokenizer: about one token every two characters, so lengths here are
    doubled.
    """
    folder = tmp_path_factory.mktemp("reference")
    seeded_tokenizer().save_pretrained(folder)
    return folder


def params(**changes) -> PrepareRequests:
    small = {
        "count": 32,
        "mean_tokens": 420,
        "prompt_tokens": 500,
        "response_tokens": 40,
        "long_prompt_tokens": 300,
        "long_share": 0.5,
        "min_class_size": 4,
        "calibration_tokens": 900,
        "perplexity_tokens": 600,
        "questions": 12,
        "question_mean_tokens": 10**4,
        "question_tokens": 300,
    }
    return load_params().prepare_requests.model_copy(update={**small, **changes})


@pytest.fixture(scope="module")
def packaged(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaged") / "requests"
    return folder, prepare_requests.run(reference, params(), folder)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_packaged_requests_are_what_the_contract_says(packaged):
    folder, metrics = packaged
    table = pd.read_parquet(folder / "requests.parquet")
    assert tuple(table.columns) == REQUEST_COLUMNS
    assert len(table) == table["id"].nunique() == metrics["requests"] == 32
    assert Counter(table["split"]) == {"fit": metrics["fit"], "holdout": metrics["holdout"]}
    assert set(table["class"]) == set(metrics["classes"])
    assert all(4 <= size <= 5 for size in Counter(table["class"]).values())
    assert table["prompt_ids"].map(len).max() <= 500 and table["response_ids"].map(len).max() <= 40
    assert table["response_ids"].map(len).min() >= 1
    assert (table["prompt_ids"].map(len) >= 300).mean() == metrics["long_share"] >= 0.5
    tokens = (table["prompt_ids"].map(len) + table["response_ids"].map(len)).mean()
    assert tokens == metrics["mean_tokens"] <= 420
    assert (table["prompt_ids"].map(lambda ids: ids[0]) == 0).all()  # the bos token
    assert read_json(folder / "requests.json")["version"] == prepare_requests.VERSION


def test_the_token_ids_are_those_of_the_texts(packaged):
    tokenizer = seeded_tokenizer()
    table = pd.read_parquet(packaged[0] / "requests.parquet")
    for row in table.to_dict("records"):
        assert list(row["prompt_ids"]) == [0, *tokenizer(row["prompt"]).input_ids]
        assert tokenizer.decode(row["response_ids"]) == row["response"]


def test_the_companions_have_the_sizes_asked_for(packaged):
    folder, metrics = packaged
    calibration = pd.read_parquet(folder / "calibration.parquet")
    assert calibration["ids"].map(len).sum() == metrics["calibration_tokens"] == 900
    texts, questions = lines(folder / "perplexity.jsonl"), lines(folder / "questions.jsonl")
    assert 580 <= metrics["perplexity_tokens"] <= 600 and {"id", "text"} == set(texts[0])
    assert len(questions) == metrics["questions"] == 12
    assert {"id", "subject", "question", "choices", "answer"} == set(questions[0])
    assert all(len(row["choices"]) == 4 and row["answer"] in range(4) for row in questions)
    assert len({row["subject"] for row in questions}) > 4


def test_no_row_serves_two_roles(packaged):
    folder, _ = packaged
    served = {
        "requests": pd.read_parquet(folder / "requests.parquet")["id"].tolist(),
        "calibration": pd.read_parquet(folder / "calibration.parquet")["id"].tolist(),
        "text": [row["id"] for row in lines(folder / "perplexity.jsonl")],
        "questions": [row["id"] for row in lines(folder / "questions.jsonl")],
    }
    everything = [row_id for ids in served.values() for row_id in ids]
    assert len(everything) == len(set(everything))


def test_runs_are_equal_byte_for_byte(reference, packaged, tmp_path):
    prepare_requests.run(reference, params(), tmp_path / "again")
    for path in sorted(packaged[0].iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_synthetic_domains_are_classes_and_share_no_text(reference, tmp_path):
    metrics = prepare_requests.run(reference, params(source="synthetic"), tmp_path / "requests")
    assert set(metrics["classes"]) == {"arithmetic", "records", "stories", "dialogue"}
    requests = pd.read_parquet(tmp_path / "requests/requests.parquet")
    keys = [split.normalised(text) for text in requests["prompt"]]
    keys += [split.normalised(row["text"]) for row in lines(tmp_path / "requests/perplexity.jsonl")]
    fields = ("subject", "question", "choices", "answer")
    for row in lines(tmp_path / "requests/questions.jsonl"):
        keys.append(split.normalised(Question(*(row[field] for field in fields)).prompt))
    assert len(keys) == len(set(keys))


def own_rows(folder: Path, changes: dict[int, dict] | None = None) -> Path:
    rows = []
    for number in range(24):
        name = ["math", "code"][number % 2]
        row = {"id": f"{name}-{number}", "class": name, "prompt": f"{name} number {number}: " + "x " * number}
        rows.append({**row, "response": f"answer {number}", **(changes or {}).get(number, {})})
    path = folder / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def jsonl_params(file: Path, **changes) -> PrepareRequests:
    values = params(source="jsonl", count=16, **changes)
    return values.model_copy(update={"jsonl": values.jsonl.model_copy(update={"file": str(file)})})


def test_a_file_gives_requests_and_the_rest_is_packaged(reference, tmp_path):
    file = own_rows(
        tmp_path, {0: {"response": ""}, 1: {"prompt": "y " * 400}, 2: {"prompt": "math number 4: x x x x"}}
    )
    metrics = prepare_requests.run(reference, jsonl_params(file), tmp_path / "requests")
    assert metrics["left_out"] == {"empty_response": 1, "prompt_too_long": 1, "repeated_prompt": 1}
    assert metrics["classes"]["math"]["fit"] + metrics["classes"]["math"]["holdout"] == 8
    assert len(lines(tmp_path / "requests/questions.jsonl")) == 12


def test_a_packaged_question_that_is_also_a_request_is_left_out(reference, packaged, tmp_path):
    question = lines(packaged[0] / "questions.jsonl")[0]
    file = own_rows(tmp_path, {0: {"prompt": f"Answer this: {question['question']}"}})
    rows = jsonl_params(file, prompt_tokens=1000).model_copy(update={"count": 24})
    metrics = prepare_requests.run(reference, rows, tmp_path / "requests")
    assert metrics["left_out"]["other_role_holds_a_request"] >= 1
    assert question["id"] not in [row["id"] for row in lines(tmp_path / "requests/questions.jsonl")]


def test_bad_input_ends_before_anything_is_written(reference, tmp_path):
    file = own_rows(tmp_path, {5: {"prompt": None}})
    with pytest.raises(InputError, match=r"mine\.jsonl:6: 'prompt' is NoneType"):
        prepare_requests.run(reference, jsonl_params(file), tmp_path / "requests")
    with pytest.raises(InputError, match="fewer than two classes"):
        one = own_rows(tmp_path, {number: {"class": "math"} for number in range(24)})
        prepare_requests.run(reference, jsonl_params(one), tmp_path / "requests")
    assert not (tmp_path / "requests").exists()


def test_small_classes_are_merged_and_said(reference, tmp_path, capsys):
    changes = {number: {"class": "poetry"} for number in (0, 2)}
    metrics = prepare_requests.run(
        reference, jsonl_params(own_rows(tmp_path, changes)), tmp_path / "requests"
    )
    assert metrics["merged"] == {"poetry": "math"}
    assert "class poetry has too few rows for 4 requests: merged into math" in capsys.readouterr().out


@pytest.mark.shared
def test_the_shared_requests(reference, tmp_path):
    values = jsonl_params(SHARED, min_class_size=8).model_copy(update={"count": 84})
    metrics = prepare_requests.run(reference, values, tmp_path / "requests")
    assert metrics["requests"] == 84 and len(metrics["classes"]) >= 6
    assert metrics["left_out"]["empty_response"] > 0


def test_responses_drawn_by_the_reference(tiny_reference, tmp_path):
    """As long as asked for, the same again, prompts and split those of the given responses."""
    own = {
        "source": "synthetic",
        "count": 16,
        "mean_tokens": 160,
        "prompt_tokens": 192,
        "response_tokens": 24,
    }
    own |= {"long_prompt_tokens": 32, "long_share": 0.0, "perplexity_tokens": 200, "questions": 4}
    given = prepare_requests.run(tiny_reference, params(**own), tmp_path / "given")
    metrics = prepare_requests.run(tiny_reference, params(**own, responses="sampled"), tmp_path / "a")
    prepare_requests.run(tiny_reference, params(**own, responses="sampled"), tmp_path / "b")
    assert (metrics["responses"], given["responses"]) == ("sampled", "given")
    frame, again = (pd.read_parquet(tmp_path / name / "requests.parquet") for name in "ab")
    pd.testing.assert_frame_equal(frame, again)
    assert set(map(len, frame["response_ids"])) == {24}
    assert len({tuple(ids) for ids in frame["response_ids"]}) > 12  # drawn, not one answer to all
    ends = read_json(tiny_reference / "config.json")["eos_token_id"]
    assert not any(ends in ids for ids in frame["response_ids"])


def test_drawn_responses_follow_the_reference(tiny_reference):
    """4,000 first tokens after one prompt: the likeliest come as often as the model says, to four standard errors."""
    import torch

    from tasks.moe.checkpoint import load_model
    from tasks.sources.sampled import _draw

    model = load_model(tiny_reference)
    prompt = [1, 5, 9, 12]
    torch.manual_seed(0)
    drawn = _draw(model, [prompt] * 4000, 1)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].float()
    logits[model.config.eos_token_id] = -torch.inf
    chance = logits.softmax(dim=-1)
    count = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(chance))
    for token in chance.topk(5).indices:
        p = float(chance[token])
        assert abs(float(count[token]) / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_responses_that_do_not_fit_the_context_are_refused(tiny_reference, tmp_path):
    own = {
        "source": "synthetic",
        "count": 16,
        "mean_tokens": 10**6,
        "prompt_tokens": 192,
        "response_tokens": 10**5,
    }
    own |= {"long_prompt_tokens": 32, "long_share": 0.0, "responses": "sampled"}
    with pytest.raises(InputError, match="100000 of response more than the model's context"):
        prepare_requests.run(tiny_reference, params(**own), tmp_path / "requests")
    assert not (tmp_path / "requests").exists()
