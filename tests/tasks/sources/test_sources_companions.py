import pytest

from tasks.contracts import InputError
from tasks.params import load_params
from tasks.sources import companions
from tasks.sources.rows import Question, Row
from tasks.sources.tokens import TokenRow, Tokens
from tests.seeded_models import seeded_tokenizer
from tests.tiny_run import ROOT


@pytest.fixture(scope="module")
def tokens():
    return Tokens(seeded_tokenizer(), bos=True, chat_template=False)


def text_row(name: str, text: str) -> Row:
    return Row(name, "code", "code", text, None)


def test_calibration_has_exactly_the_tokens_asked_for(tokens):
    rows = [text_row("a", "one two three"), text_row("b", "four five six"), text_row("c", "seven")]
    first = len(tokens.sequence("one two three"))
    made = companions.calibration(rows, tokens, first + 2)
    assert [row_id for row_id, _ in made] == ["a", "b"]
    assert (
        made[0][1] == tokens.sequence("one two three") and made[1][1] == tokens.sequence("four five six")[:2]
    )
    with pytest.raises(InputError, match=r"calibration_tokens is 999, but .* lower it to"):
        companions.calibration(rows, tokens, 999)


def test_long_texts_are_cut(tokens):
    rows = [text_row("a", "word " * 400), text_row("b", "word " * 400)]
    lengths = [len(ids) for _, ids in companions.calibration(rows, tokens, 700)]
    assert lengths == [companions.SEQUENCE_TOKENS, 700 - companions.SEQUENCE_TOKENS]


def test_held_out_text_stays_within_its_tokens_and_near_them(tokens):
    rows = [text_row(str(number), f"word{number} and more " * 20) for number in range(9)]
    texts, count = companions.held_out_text(rows, tokens, 300)
    assert count == sum(len(tokens.bare(text)) for _, text in texts)
    assert 290 <= count <= 300
    assert all(source.prompt.startswith(text) for source, (_, text) in zip(rows, texts, strict=False))
    with pytest.raises(InputError, match="held-out text has"):
        companions.held_out_text(rows, tokens, 10**6)


def test_questions_are_short_enough_or_refused(tokens):
    short = Question("maths", "1 + 1?", ("1", "2", "3", "4"), 1)
    long = Question("maths", "why? " * 90, ("1", "2", "3", "4"), 1)
    rows = [
        Row(name, "stem", "mmlu", "", "", item) for name, item in (("a", long), ("b", short), ("c", short))
    ]
    assert [row_id for row_id, _ in companions.questions(rows, tokens, asked(2, 60, 60))] == ["b", "c"]
    with pytest.raises(InputError, match="3 questions wanted, but the source has 2 of at most 60 tokens"):
        companions.questions(rows, tokens, asked(3, 60, 60))
    assert short.prompt == "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"


def test_the_longest_question_gives_way_until_the_mean_is_kept(tokens):
    sizes = {"a": 9, "b": 1, "c": 4, "d": 2}
    rows = [
        Row(name, "stem", "mmlu", "", "", Question("maths", "why? " * size, ("1", "2", "3", "4"), 1))
        for name, size in sizes.items()
    ]
    length = {row.id: len(tokens.sequence(row.question.prompt)) for row in rows}
    mean = (length["b"] + length["c"]) // 2  # a and b come first; a gives way to c, the next that is shorter
    assert [row_id for row_id, _ in companions.questions(rows, tokens, asked(2, 999, mean))] == ["c", "b"]
    with pytest.raises(InputError, match="tokens each at least: raise it"):
        companions.questions(rows, tokens, asked(2, 999, length["b"] - 1))


def asked(questions: int, limit: int, mean: int):
    params = load_params(ROOT / "params.yaml").prepare_requests
    wanted = {"questions": questions, "question_tokens": limit, "question_mean_tokens": mean}
    return params.model_copy(update=wanted)


def test_rows_that_a_request_quotes_are_left_out():
    question = Question(
        "law", "Which court may hear an appeal against a ruling of the board?", ("a", "b", "c", "d"), 0
    )
    rows = [
        Row("asked", "law", "mmlu", "Q: ...", "", question),
        text_row("quoted", "def area(width, height):\n    return width * height  # in square metres"),
        text_row("free", "def volume(width, height, depth):\n    return width * height * depth"),
        text_row("short", "yes"),
    ]
    prompts = [
        "Question: which court may hear an appeal against a ruling of the board?\n(A) a (B) b",
        "Explain: def area(width, height): return width*height # in square metres",
        "oh yes it is",  # a short text inside another is no quotation
    ]
    requests = [TokenRow(str(number), "x", prompt, "", [1], [1]) for number, prompt in enumerate(prompts)]
    kept, left_out = companions.without_requests(rows, requests)
    assert [row.id for row in kept] == ["free", "short"] and left_out == 2
