import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tasks.evaluation.paired import (
    accuracy,
    compare_accuracy,
    compare_mean,
    mcnemar_exact,
    smallest_visible_difference,
)


def test_mcnemar_by_hand():
    # 1 against 6: 2 (C(7,0) + C(7,1)) / 2^7 = 2 · 8 / 128 = 0.125
    assert mcnemar_exact(1, 6) == mcnemar_exact(6, 1) == 0.125
    # 0 against 6: 2 / 64; equal sides and no discordant question: 1
    assert mcnemar_exact(0, 6) == 0.03125
    assert mcnemar_exact(3, 3) == mcnemar_exact(0, 0) == 1.0


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_binomial_test(gained, lost):
    expected = binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert mcnemar_exact(gained, lost) == pytest.approx(expected, rel=1e-9)


def test_smallest_visible_difference_by_hand():
    # 20 discordant: 5 against 15 has p = 0.0414, 6 against 14 has p = 0.115: (15 - 5) / 100
    assert smallest_visible_difference(100, 20) == 0.1
    # below 6 discordant questions nothing is significant; with 6 all must fall on one side: 6 / 100
    assert smallest_visible_difference(100, 0) == smallest_visible_difference(100, 6) == 0.06
    assert smallest_visible_difference(5, 2) is None


@given(st.integers(6, 60))
def test_the_smallest_visible_difference_is_where_the_test_turns(discordant):
    visible = smallest_visible_difference(100, discordant)
    assert visible is not None
    lost = round((discordant - visible * 100) / 2)
    assert mcnemar_exact(discordant - lost, lost) <= 0.05
    if discordant - 2 * lost >= 2:
        assert mcnemar_exact(discordant - lost - 1, lost + 1) > 0.05


def test_compare_accuracy_by_hand():
    # ten questions: the model gains 1 and loses 3, so the difference is -2 / 10; its standard error is
    # sqrt(1 + 3 - 4 / 10) / 10 = sqrt(3.6) / 10; p = 2 (1 + 4) / 16 = 0.625
    reference = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=bool)
    model = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 0], dtype=bool)
    found = compare_accuracy(model, reference)
    assert found["difference"] == -0.2
    assert found["difference_stderr"] == pytest.approx(3.6**0.5 / 10)
    assert found["p_value"] == 0.625
    assert found["smallest_visible_difference"] == 0.6


def test_accuracy_by_hand():
    # 3 of 4: sqrt(0.75 · 0.25 / 3) = 0.25
    assert accuracy(np.array([1, 1, 1, 0], dtype=bool)) == {"accuracy": 0.75, "n": 4, "stderr": 0.25}
    assert accuracy(np.array([True])) == {"accuracy": 1.0, "n": 1}


def test_compare_mean_by_hand():
    # sums of 2 and 4 tokens: differences 1 and 0.5 over 6 tokens: 0.25 a token;
    # rests 1 - 0.5 = 0.5 and 0.5 - 1 = -0.5: sqrt(2 / 1 · 0.5) / 6 = 1 / 6
    found = compare_mean(np.array([5.0, 8.5]), np.array([4.0, 8.0]), np.array([2, 4]))
    assert found["difference"] == pytest.approx(0.25)
    assert found["difference_stderr"] == pytest.approx(1 / 6)
    assert compare_mean(np.array([5.0]), np.array([4.0]), np.array([2])) == {"difference": 0.5}


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 9)), min_size=2, max_size=9))
def test_a_constant_shift_per_token_has_no_error(clusters):
    values, weights = (np.array(column) for column in zip(*clusters, strict=True))
    found = compare_mean(values + 0.5 * weights, values, weights)
    assert found["difference"] == pytest.approx(0.5)
    assert found["difference_stderr"] == pytest.approx(0.0, abs=1e-6)
