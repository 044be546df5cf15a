from __future__ import annotations

import re

import pytest

from tasks.sources.synthetic import DOMAINS, choice_rows, documents, question_rows


@pytest.mark.parametrize("domain", DOMAINS)
def test_rows_depend_on_domain_seed_and_index_alone(domain: str) -> None:
    assert documents(domain, 30, seed=1)[:10] == documents(domain, 10, seed=1)
    assert not set(documents(domain, 200, seed=1)) & set(documents(domain, 200, seed=2))
    assert len(set(documents(domain, 200, seed=1))) == 200


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_document_is_its_prompt_and_response(domain: str) -> None:
    rows = question_rows(domain, 40, seed=3)
    assert [row.prompt + row.response for row in rows] == documents(domain, 40, seed=3)
    assert all(row.prompt and row.response.strip() for row in rows)
    words = [len(row.prompt.split()) for row in rows]
    assert max(words) > 3 * min(words)  # short and long prompts


def test_sums_are_right() -> None:
    text = "".join(documents("arithmetic", 100, seed=0))
    found = re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", text)
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    assert len(found) > 100
    assert all(operations[sign](int(x), int(y)) == int(z) for x, sign, y, z in found)


@pytest.mark.parametrize("domain", DOMAINS)
def test_choices_differ_and_the_answer_moves(domain: str) -> None:
    rows = choice_rows(domain, 60, seed=0)
    assert all(len(set(row.choices)) == 4 for row in rows)
    assert {row.answer for row in rows} == {0, 1, 2, 3}
    if domain == "records":  # the right order repeats the buyer, the wrong ones have others
        for row in rows:
            buyer = re.findall(r'"buyer": "\w+"', row.question)[0]
            assert [buyer in choice for choice in row.choices].index(True) == row.answer
            assert sum(buyer in choice for choice in row.choices) == 1
    if domain == "arithmetic":  # the right choice is the one that works out the numbers of the question
        numbers = [set(re.findall(r"\d+", row.question)) for row in rows]
        firsts = [set(re.findall(r"\d+", row.choices[row.answer].split("=")[0])) for row in rows]
        assert all(first <= asked for first, asked in zip(firsts, numbers, strict=True))


def test_unknown_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="arithmetic"):
        documents("poems", 1, seed=0)
