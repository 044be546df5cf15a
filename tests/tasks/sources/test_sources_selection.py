from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.params import PrepareRequests, load_params
from tasks.sources.selection import choose, merge_small_classes, quotas, split_fit_holdout
from tasks.sources.tokens import TokenRow


def params(**changes) -> PrepareRequests:
    values = {"count": 8, "min_class_size": 2, "long_prompt_tokens": 10, "long_share": 0.5}
    values["mean_tokens"] = 1000
    return load_params().prepare_requests.model_copy(update={**values, **changes})


def made(class_name: str, *lengths: int) -> list[TokenRow]:
    """Rows whose prompts have these many tokens, with a response of two."""
    return [
        TokenRow(f"{class_name}-{number}", class_name, "p", "r", [1] * length, [2, 2])
        for number, length in enumerate(lengths)
    ]


def test_small_classes_join_the_next_smallest():
    # a has 2 rows, b 3, c 9; three are needed: a -> b gives b 5, c 9
    rows = made("c", *[5] * 9) + made("a", 5, 5) + made("b", 5, 5, 5)
    groups, merged = merge_small_classes(rows, count=9, min_class_size=3)
    assert {name: len(group) for name, group in groups.items()} == {"b": 5, "c": 9}
    assert merged == {"a": "b"}
    assert {row.class_name for row in groups["b"]} == {"b"}


def test_a_merged_class_that_merges_again_is_reported_where_it_ended():
    # 4 are needed: a (1) -> b (2) gives b 3; b (3) -> c (4) gives c 7; then c 7 and d 9 are left
    rows = made("a", 5) + made("b", 5, 5) + made("c", *[5] * 4) + made("d", *[5] * 9)
    groups, merged = merge_small_classes(rows, count=8, min_class_size=4)
    assert sorted(groups) == ["c", "d"]
    assert merged == {"a": "c", "b": "c"}


def test_count_too_small_for_all_classes_merges_too():
    # 8 requests of at least 4 a class: two classes of the three
    rows = made("a", *[5] * 5) + made("b", *[5] * 6) + made("c", *[5] * 7)
    groups, merged = merge_small_classes(rows, count=8, min_class_size=4)
    assert merged == {"a": "b"} and sorted(groups) == ["b", "c"]


def test_fewer_than_two_classes_is_an_input_error():
    with pytest.raises(
        InputError, match=r"fewer than two classes have 2 requests each.*usable rows \{'a': 4\}"
    ):
        merge_small_classes(made("a", 5, 5, 5, 5), count=4, min_class_size=2)
    with pytest.raises(InputError, match="usable rows none"):
        merge_small_classes([], count=4, min_class_size=2)


def test_quotas_by_hand():
    assert quotas({"a": 9, "b": 9, "c": 9}, 7) == {"a": 3, "b": 2, "c": 2}
    assert quotas({"a": 1, "b": 9, "c": 9}, 9) == {"a": 1, "b": 4, "c": 4}
    with pytest.raises(InputError, match="9 requests wanted, but only 4 rows"):
        quotas({"a": 1, "b": 3}, 9)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8), st.data())
def test_quotas_sum_and_are_even(sizes, data):
    table = {f"class-{number}": size for number, size in enumerate(sizes)}
    count = data.draw(st.integers(1, sum(sizes)))
    given_ = quotas(table, count)
    assert sum(given_.values()) == count
    assert all(0 <= given_[name] <= size for name, size in table.items())
    open_classes = [given_[name] for name, size in table.items() if given_[name] < size]
    if open_classes:  # nobody who could give more gives less than another by more than one
        assert max(given_.values()) - min(open_classes) <= 1


def grouped(rows: list[TokenRow]) -> dict[str, list[TokenRow]]:
    groups: dict[str, list[TokenRow]] = {}
    for row in rows:
        groups.setdefault(row.class_name, []).append(row)
    return groups


def test_long_prompts_are_preferred_until_the_share_is_met():
    # 4 of each class; b has no long prompt (10 tokens or more), so a must give all four of the half
    groups = grouped(made("a", *[20] * 6, *[5] * 6) + made("b", *[5] * 12))
    chosen = choose(groups, params())
    assert Counter((row.class_name, len(row.prompt_ids)) for row in chosen) == {("a", 20): 4, ("b", 5): 4}
    with pytest.raises(InputError, match=r"5 of 8 prompts .* only 4 can: lower long_share to 0\.5"):
        choose(groups, params(long_share=0.6))


def test_rows_that_a_user_gives_may_have_fewer_long_prompts(capsys):
    groups = grouped(made("a", 20, *[5] * 6) + made("b", *[5] * 12))
    chosen = choose(groups, params(source="jsonl"))
    assert sum(len(row.prompt_ids) >= 10 for row in chosen) == 1
    assert "only 1 of 8 prompts have 10 tokens" in capsys.readouterr().out


def test_the_mean_is_met_by_exchange_or_refused():
    # each class: 4 rows of 9 + 2 tokens, 4 of 3 + 2; the least mean is 5
    groups = grouped(made("a", *[9] * 4, *[3] * 4) + made("b", *[9] * 4, *[3] * 4))
    short = params(long_share=0.0, mean_tokens=7)
    chosen = choose(groups, short)
    assert sum(row.tokens for row in chosen) <= 8 * 7
    assert len({row.id for row in chosen}) == 8
    assert [row.tokens for row in choose(groups, short.model_copy(update={"mean_tokens": 5}))] == [5] * 8
    with pytest.raises(InputError, match=r"5\.0 tokens on average at the least.* raise it to 5"):
        choose(groups, short.model_copy(update={"mean_tokens": 4}))


def test_choice_depends_on_the_seed_and_on_nothing_else():
    rows = made("a", *range(1, 30)) + made("b", *range(1, 30))
    first = [row.id for row in choose(grouped(rows), params())]
    assert first == [row.id for row in choose(grouped(rows[::-1]), params())]
    assert first != [row.id for row in choose(grouped(rows), params(seed=1))]


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([0.25, 0.5, 0.75]))
def test_splits_are_stratified(seed, share):
    rows = made("a", *[5] * 8) + made("b", *[5] * 4)
    splits = split_fit_holdout(rows, params(seed=seed, holdout_share=share))
    held = Counter(row.class_name for row, part in zip(rows, splits, strict=True) if part == "holdout")
    assert held == {"a": 8 * share, "b": 4 * share}


def test_an_empty_split_is_an_input_error():
    rows = made("a", *[5] * 8) + made("b", 5, 5)
    with pytest.raises(InputError, match=r"class 'b' has 2 requests.*its holdout split is empty"):
        split_fit_holdout(rows, params(holdout_share=0.2))
    with pytest.raises(InputError, match="its fit split is empty"):
        split_fit_holdout(rows, params(holdout_share=0.9))
