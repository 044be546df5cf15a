from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tasks.contracts import InputError
from tasks.evaluation.definitions import Benchmark, read_benchmarks
from tasks.evaluation.harness import MoELanguageModel, run_benchmarks
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.moe.record import record_routing
from tests.seeded_models import seeded_checkpoint

SHARED = Path(__file__).parents[4] / "shared/data"
SIX = ["mmlu", "gsm8k", "truthfulqa_mc1", "piqa", "winogrande", "hellaswag"]
ALL = {"requests": None, "data": SHARED}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = seeded_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    return load_model(folder), load_tokenizer(folder)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, item, number) for number, item in enumerate(arguments)]


PAIRS = [
    ("Anna has 12 apples.\nAnswer:", " A"),
    ("Anna has 12 apples.\nAnswer:", " B"),
    ("One fox", " who lived near the river"),
    ("Once upon a time there was a small fox who lived", " near"),
    ("", "no context"),
]


def test_log_likelihoods_are_those_of_lm_eval(loaded):
    model, tokenizer = loaded
    plain = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=2)
    ours = MoELanguageModel(model, tokenizer, batch_size=2)
    expected = plain.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", PAIRS))
    assert [pair[0] for pair in found] == pytest.approx([pair[0] for pair in expected], abs=1e-4)
    assert [pair[1] for pair in found] == [pair[1] for pair in expected]
    texts = [("Once upon a time there was a small fox.\n" * 3,), ("def area(width):",)]
    rolled = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert rolled == pytest.approx(
        plain.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True), abs=1e-3
    )


def test_load_is_that_of_the_real_tokens_alone(loaded):
    """Against one unpadded pass of each distinct sequence, recorded at the router."""
    model, tokenizer = loaded
    ours = MoELanguageModel(model, tokenizer, batch_size=8)
    ours.loglikelihood(instances("loglikelihood", PAIRS))
    load, tokens = np.zeros_like(ours.load), 0
    passes = set()
    for context, continuation in PAIRS:
        ids = tokenizer(context + continuation).input_ids
        passes.add(tuple(ids[:-1] if context else [0, *ids[:-1]]))
    with record_routing(model) as recorder, torch.inference_mode():
        for ids in sorted(passes):
            model(torch.tensor([ids]))
            tokens += len(ids)
            for layer, routing in enumerate(recorder.pop()):
                load[layer] += np.bincount(routing.index.flatten().numpy(), minlength=load.shape[1])
    # " A" and " B" differ in their last token alone and share one pass: four passes for five pairs
    assert len(passes) == 4
    assert ours.forward_tokens == tokens
    assert (ours.load == load).all()
    assert (ours.load.sum(axis=1) == tokens * 2).all()
    ours.check_load()
    ours.load[1, 0] += 1
    with pytest.raises(RuntimeError, match="expert load"):
        ours.check_load()


def test_a_row_beyond_the_model_is_refused_not_cut(loaded):
    model, tokenizer = loaded
    ours = MoELanguageModel(model, tokenizer, batch_size=8)
    with pytest.raises(InputError, match="the model reads at most 2048"):
        ours.loglikelihood(instances("loglikelihood", [("zq" * 2000, " A")]))


def questions(count: int) -> Benchmark:
    rows = [
        {"row": number, "question": f"What is {number}?", "choices": list("wxyz"), "answer": number % 4}
        for number in range(count)
    ]
    config = read_config("mmlu_packaged")
    return Benchmark("mmlu_packaged", config, rows)


def read_config(name: str) -> dict:
    import yaml

    from tasks.evaluation.definitions import DEFINITIONS

    return yaml.safe_load((DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))


def test_multiple_choice_by_hand(loaded):
    """Each question against the logits after its prompt, written out here."""
    model, tokenizer = loaded
    table = run_benchmarks(model, tokenizer, [questions(6)], batch_size=4).tables["mmlu_packaged"]
    assert table["row"].tolist() == list(range(6))
    for number, row in table.iterrows():
        prompt = f"What is {number}?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer(prompt).input_ids])).logits[0, -1]
        # the seeded tokenizer has no " A": a blank, then the letter
        letters = [tokenizer(f" {letter}").input_ids for letter in "ABCD"]
        assert all(len(ids) == 2 for ids in letters)
        blank = logits.log_softmax(-1)[letters[0][0]]
        with torch.inference_mode():
            after = model(torch.tensor([[*tokenizer(prompt).input_ids, letters[0][0]]])).logits[0, -1]
        expected = np.array([float(blank + after.log_softmax(-1)[ids[1]]) for ids in letters])
        assert row["log_probs"] == pytest.approx(expected, abs=1e-4)
        right = int(number) % 4
        assert row["correct"] == (expected.argmax() == right)
        shares = np.exp(expected) / np.exp(expected).sum()
        assert row["log_prob_right"] == pytest.approx(np.log(shares[right]), abs=1e-4)


def test_perplexity_and_repeatability(loaded):
    model, tokenizer = loaded
    texts = ["Once upon a time there was a small fox.", "def area(width, height):\n    return width * height"]
    rows = [{"row": number, "text": text} for number, text in enumerate(texts)]
    benchmark = Benchmark("heldout_perplexity", read_config("heldout_perplexity"), rows)
    first = run_benchmarks(model, tokenizer, [benchmark, questions(3)], batch_size=4)
    table = first.tables["heldout_perplexity"]
    for text, (_, row) in zip(texts, table.iterrows(), strict=True):
        ids = torch.tensor([[0, *tokenizer(text).input_ids]])
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        assert row["nll"] == pytest.approx(float(loss), rel=1e-5)
        assert row["tokens"] == ids.shape[1] - 1
    again = run_benchmarks(model, tokenizer, [benchmark, questions(3)], batch_size=4)
    assert (first.load == again.load).all() and first.tables["heldout_perplexity"].equals(table)
    assert again.tables["mmlu_packaged"].astype(str).equals(first.tables["mmlu_packaged"].astype(str))


@pytest.mark.shared
def test_the_six_benchmarks_of_the_paper_run(loaded):
    model, tokenizer = loaded
    names = [name for name in SIX if name != "gsm8k"]
    benchmarks = read_benchmarks(names, ALL, dict.fromkeys(names, 2), seed=0)
    found = run_benchmarks(model, tokenizer, benchmarks, batch_size=4)
    choices = {name: len(found.tables[name]["log_probs"][0]) for name in names}
    assert choices == {
        "mmlu": 4,
        "truthfulqa_mc1": choices["truthfulqa_mc1"],
        "piqa": 2,
        "winogrande": 2,
        "hellaswag": 4,
    }
    assert all(np.isfinite(found.tables[name]["log_prob_right"]).all() for name in names)
    assert "correct_norm" in found.tables["piqa"] and "correct_norm" not in found.tables["mmlu"]


def test_generation_is_counted_and_scored(loaded):
    model, tokenizer = loaded
    config = read_config("gsm8k")
    config["generation_kwargs"]["max_gen_toks"] = 8
    rows = [{"row": 0, "question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}]
    found = run_benchmarks(model, tokenizer, [Benchmark("gsm8k", config, rows)], batch_size=4)
    prompt = len(tokenizer("Question: What is 1 + 1?\nAnswer:").input_ids)
    # one pass over the prompt gives the first token, then one pass for each further one but the last
    assert prompt < found.forward_tokens <= prompt + 7
    assert (found.load.sum(axis=1) == found.forward_tokens * 2).all()
    assert list(found.tables["gsm8k"].columns) == ["row", "correct", "answer"]


def test_winogrande_rows_by_hand():
    """The blank is filled with each option, and what follows it is the continuation."""
    from tasks.evaluation.harness import _task

    rows = [{"row": 0, "sentence": "The cup is in the box, so _ is full.", "option1": "the cup",
             "option2": "the box", "answer": "2"}]  # fmt: skip
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        task = _task(Benchmark("winogrande", read_config("winogrande"), rows), Path(folder))
        task.build_all_requests(limit=None, rank=0, world_size=1)
        arguments = [instance.args for instance in task.instances]
        assert arguments == [
            ("The cup is in the box, so the cup", " is full."),
            ("The cup is in the box, so the box", " is full."),
        ]
        assert task.doc_to_text(task.task_docs[0]) == 1
