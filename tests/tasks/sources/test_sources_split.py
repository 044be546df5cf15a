from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.sources import packaged, split


def test_no_row_and_no_text_serves_two_roles():
    roles_of_id: dict[str, set[str]] = {}
    roles_of_text: dict[str, set[str]] = {}
    for row in packaged.rows():
        roles_of_id.setdefault(row.id, set()).add(row.role)
        roles_of_text.setdefault(split.normalised(row.prompt), set()).add(row.role)
    assert len(roles_of_id) == len(packaged.rows()) > 1000
    assert all(len(roles) == 1 for roles in roles_of_id.values())
    assert all(len(roles) == 1 for roles in roles_of_text.values())


def test_no_paragraph_of_running_text_serves_two_roles():
    """Passages may differ and still share a paragraph: topics quote each other, licences repeat."""
    roles: dict[str, set[str]] = {}
    for row in packaged.rows():
        if row.source in ("code", "documentation"):
            for paragraph in row.prompt.split("\n\n"):
                if len(key := split.normalised(paragraph)) >= packaged.RUNNING_TEXT:
                    roles.setdefault(key, set()).add(row.role)
    shared = [key for key, held in roles.items() if len(held) > 1]
    assert len(roles) > 1000
    assert not shared


def test_passages_of_a_file_share_a_role():
    roles: dict[str, set[str]] = {}
    for row in packaged.rows():
        roles.setdefault(row.id.partition(":")[0], set()).add(row.role)
    assert all(len(held) == 1 for held in roles.values())


@pytest.mark.parametrize("source", split.SHARES)
def test_shares_are_met(source):
    share = split.SHARES[source]
    assert sum(share) == pytest.approx(1)
    found = Counter(split.role(f"row-{number}", source) for number in range(4000))
    for role, expected in zip(split.ROLES, share, strict=True):
        # standard error at most sqrt(0.25 / 4000) = 0.008; four of them
        assert found[role] / 4000 == pytest.approx(expected, abs=0.032)


def test_role_is_a_fixed_function_of_id_and_source():
    """Golden: a change here moves rows between roles and needs a VERSION of every step that reads them."""
    assert split.role("code/json:3", "code") == split.role("code/json:7", "code")
    assert [split.role(f"mmlu/anatomy/{n}", "mmlu") for n in range(5)] == GOLDEN_ANATOMY
    with pytest.raises(KeyError):
        split.role("x", "no such source")


GOLDEN_ANATOMY = ["requests", "benchmark", "requests", "benchmark", "benchmark"]


@given(st.text())
def test_normalised_ignores_layout(text):
    assert split.normalised(text) == split.normalised("  " + text + "\n\n(")
    assert split.normalised(split.normalised(text)) == split.normalised(text)


def test_normalised_by_hand():
    assert split.normalised("Q: Is (A) 1\n(B) two_3?") == "qisa1btwo3"
