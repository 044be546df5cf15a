import pytest

from tasks.contracts import InputError
from tasks.sources import packaged, split
from tasks.sources.rows import Question


def test_every_class_and_question_is_there():
    rows = packaged.rows()
    assert {row.class_name for row in rows} == set(packaged.CLASSES)
    # lm-eval ships 282 worked examples, one of them twice; one has five choices
    questions = [row for row in rows if row.id.startswith("mmlu/")]
    assert len(questions) == 281
    assert sum(row.question is not None for row in questions) == 280


def test_questions_parse_by_hand():
    row = next(row for row in packaged.rows() if row.id == "mmlu/abstract_algebra/0")
    assert row.class_name == "stem"
    assert row.question == Question(
        "abstract_algebra",
        "Statement 1 | Every element of a group generates a cyclic subgroup of the group. "
        "Statement 2 | The symmetric group S_10 has 10 elements.",
        ("True, True", "False, False", "True, False", "False, True"),
        2,
    )
    assert row.prompt.startswith("Q: Statement 1 |") and row.prompt.endswith("A: Let's think step by step.")
    assert row.response is not None and row.response.startswith("A cyclic group is")


def test_texts_take_turns_so_that_any_prefix_holds_every_class():
    for role in split.ROLES:
        texts = packaged.texts(role)
        heads = {row_id.split("/")[0] for row_id, _ in texts[: len(packaged.CLASSES)]}
        assert {"code", "documentation"} <= heads
        assert all(len(text) > 20 for _, text in texts)
    assert {"mmlu", "bbh"} <= {row_id.split("/")[0] for row_id, _ in packaged.texts("upcycling")[:7]}
    with pytest.raises(ValueError, match="expected one of"):
        packaged.texts("training")


def test_one_passage_of_every_file_comes_first():
    rows = [row for row in packaged.by_turns(packaged.rows()) if row.class_name == "code"]
    files = [row.id.partition(":")[0] for row in rows]
    assert len(set(files[: len(packaged.MODULES)])) == len(packaged.MODULES)


def test_no_machine_path_in_rows():
    """The rows are those of the interpreter, not of where it is installed."""
    assert not any("/site-packages/" in row.id or row.id.startswith("/") for row in packaged.rows())


def test_missing_module_is_an_input_error(monkeypatch):
    monkeypatch.setattr(packaged, "MODULES", ["argparse", "no_such_module"])
    with pytest.raises(InputError, match=r"no no_such_module\.py"):
        list(packaged._code())


def test_passages_by_hand():
    # 600 + 2 + 600 = 1202 >= 1000 characters make a passage; the last 600 are a short rest and left out
    seen: set[str] = set()
    a, b, c = "a" * 600, "b" * 600, "c" * 600
    assert packaged._passages([a, b, c], seen) == [a + "\n\n" + b]
    assert packaged._passages([c, "d" * 600, "e" * 600], seen) == [
        "d" * 600 + "\n\n" + "e" * 600
    ]  # c was had
    many = packaged._passages((f"{number:04d}" * 250 for number in range(16)), set())
    assert [passage[:4] for passage in many] == [f"{number:04d}" for number in range(0, 16, 2)]
