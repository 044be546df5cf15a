import pytest

from tasks.contracts import InputError
from tasks.sources.rows import Row
from tasks.sources.tokens import Tokens
from tests.seeded_models import seeded_tokenizer

BOS, EOS = 0, 1  # of the seeded tokenizer, which adds neither by itself


@pytest.fixture(scope="module")
def tokenizer():
    return seeded_tokenizer()


def test_one_fixed_token_is_prepended_where_the_tokenizer_adds_none(tokenizer):
    bare = tokenizer("Hello").input_ids
    with_bos, without = Tokens(tokenizer, bos=True, chat_template=False), Tokens(tokenizer, False, False)
    assert with_bos.sequence("Hello") == [BOS, *bare] and with_bos.first_token == "bos prepended"
    assert without.sequence("Hello") == bare and without.first_token == "none"


def test_eos_stands_in_for_a_missing_bos():
    tokenizer = seeded_tokenizer()
    tokenizer.bos_token = None
    tokens = Tokens(tokenizer, bos=True, chat_template=False)
    assert tokens.prefix == [EOS] and tokens.first_token == "eos prepended"


def test_a_token_that_the_tokenizer_adds_is_not_added_twice():
    from tokenizers.processors import TemplateProcessing

    tokenizer = seeded_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
    )
    for bos in (True, False):
        tokens = Tokens(tokenizer, bos=bos, chat_template=False)
        assert tokens.sequence("Hello") == tokenizer("Hello").input_ids
        assert tokens.sequence("Hello").count(BOS) == 1 and tokens.first_token == "added by the tokenizer"


def test_a_blank_goes_between_prompt_and_response_once(tokenizer):
    tokens = Tokens(tokenizer, bos=True, chat_template=False)
    assert tokens.response("A:", "yes", 99)[0] == " yes"
    assert tokens.response("A:", " yes", 99)[0] == " yes"
    assert tokens.response("A:\n", "yes", 99)[0] == "yes"
    text, ids = tokens.response("A:", "one two three four five six", 4)
    assert len(ids) == 4 and " one two three four five six".startswith(text)


def test_chat_template_is_applied():
    tokenizer = seeded_tokenizer()
    with pytest.raises(InputError, match="no chat template"):
        Tokens(tokenizer, bos=True, chat_template=True)
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turns + "[assistant]"
    tokens = Tokens(tokenizer, bos=True, chat_template=True)
    row = tokens.row(Row("a", "math", "jsonl", "1 + 1 =", "2"), response_tokens=8)
    assert row.prompt == "[user] 1 + 1 =\n[assistant]"
    assert row.prompt_ids == [BOS, *tokenizer(row.prompt).input_ids]
    assert row.response == " 2"


def test_a_passage_is_cut_at_the_first_blank_that_is_far_enough(tokenizer):
    tokens = Tokens(tokenizer, bos=True, chat_template=False)
    text = " ".join(f"word{number}" for number in range(60))
    row = tokens.passage(Row("a", "code", "code", text, None), prompt_tokens=40, response_tokens=12)
    assert row is not None
    assert text.startswith(row.prompt + row.response)
    assert row.response.startswith(" ") and len(row.response_ids) == 12
    shorter = row.prompt.rpartition(" ")[0]
    assert len(tokens.sequence(shorter)) < 40 <= len(row.prompt_ids)
    assert tokens.passage(Row("a", "code", "code", "too short", None), 40, 12) is None
    assert tokens.passage(Row("a", "code", "code", row.prompt + " x", None), 40, 12) is None
