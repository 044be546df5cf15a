import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tasks.contracts import LayerPlan, ReplicationPlan
from tasks.replication.load import (
    before_and_after,
    count_load,
    lis,
    lis_by_batch,
    lis_even_split,
    rank_correlation,
)


def test_lis_of_a_hand_worked_table():
    # layer 0: 4 experts, 8 + 4 + 2 + 2 = 16 tokens: 4 * 8 / 16 = 2
    # layer 1: even: 4 * 5 / 20 = 1
    # layer 2: one expert has everything: 4 * 7 / 7 = 4
    load = np.array([[8, 4, 2, 2], [5, 5, 5, 5], [0, 7, 0, 0]])
    assert lis(load).tolist() == [2.0, 1.0, 4.0]


def test_lis_after_replication_is_measured_against_physical_or_logical_experts():
    # the 8 tokens of expert 0 split 4 + 4 over two copies: the largest of [4, 4, 2, 2 | 4] is 4, the sum 16
    physical = np.array([4, 4, 2, 2, 4])
    assert lis(physical) == 5 * 4 / 16
    assert lis(physical, experts=4) == 4 * 4 / 16
    assert lis_even_split(np.array([8, 4, 2, 2]), replicas=1) == 4 * max(8 / 2, 4) / 16
    assert lis_even_split(np.array([8, 6, 2, 0]), replicas=1) == 4 * max(8 / 2, 6) / 16
    assert lis_even_split(np.array([8, 6, 2, 0]), replicas=2) == 4 * max(8 / 2, 6 / 2, 2) / 16


def test_a_layer_without_tokens_has_no_lis():
    assert np.isnan(lis(np.array([[0, 0, 0], [1, 1, 1]]))).tolist() == [True, False]


def test_lis_refuses_a_negative_load():
    with pytest.raises(ValueError, match="negative"):
        lis(np.array([1, -1]))


@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, 1000)))
def test_lis_is_at_least_one_and_at_most_the_number_of_experts(load):
    score = lis(load)
    seen = load.sum(axis=1) > 0
    assert np.isnan(score[~seen]).all()
    assert (score[seen] >= 1 - 1e-12).all() and (score[seen] <= load.shape[1] + 1e-12).all()


@given(st.data())
def test_lis_is_at_most_m_over_k_when_each_token_takes_k_distinct_experts(data):
    experts = data.draw(st.integers(1, 8))
    top_k = data.draw(st.integers(1, experts))
    picks = data.draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=20))
    index = np.array([pick[:top_k] for pick in picks])[None]
    load = count_load(index, np.ones(index.shape[:2], dtype=bool), experts)
    assert load.sum() == len(picks) * top_k
    assert 1 - 1e-12 <= lis(load)[0] <= experts / top_k + 1e-12


@given(arrays(np.int64, st.integers(2, 9), elements=st.integers(1, 1000)), st.integers(0, 3))
def test_splitting_the_heaviest_never_raises_lis(load, replicas):
    assert lis_even_split(load, replicas) <= lis(load) + 1e-12


def test_load_leaves_out_padding_and_dropped_picks():
    # sequence 0: tokens pick (0, 1), (1, 2); sequence 1: (2, dropped), then padding that would pick (0, 0)
    index = np.array([[[0, 1], [1, 2]], [[2, 3], [0, 0]]])
    mask = np.array([[True, True], [True, False]])
    assert count_load(index, mask, experts=3).tolist() == [[1, 2, 1], [0, 0, 1]]


def test_lis_by_batch_of_a_hand_worked_table():
    # two experts, one layer; batches of two sequences: [3, 1] + [1, 3] = [4, 4]: 1; the last, [3, 1]: 1.5
    load = np.array([[[3, 1]], [[1, 3]], [[3, 1]]])
    batches = lis_by_batch(load, batch_size=2, quantile=0.5)
    assert {name: values.tolist() for name, values in batches.items()} == {
        "mean": [1.25],
        "quantile": [1.25],
        "max": [1.5],
    }


def test_rank_correlation_handles_ties_and_constants():
    # ranks of [1, 2, 2, 3] are [1, 2.5, 2.5, 4]; against [1, 2, 3, 4]: 4.5 / sqrt(4.5 * 5)
    left = np.array([[1, 2, 2, 3], [5, 5, 5, 5], [1, 2, 3, 4]])
    right = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 2, 1]])
    score = rank_correlation(left, right)
    assert score[0] == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(score[1])
    assert score[2] == pytest.approx(-1)


def test_without_routing_drift_the_gap_to_the_even_split_is_the_uneven_share_alone():
    # 10 tokens of expert 0 split 6 + 4: 3 * 6 / 16 = 1.125 against the even 3 * 5 / 16 = 0.9375
    plan = ReplicationPlan("", 0, "round_robin", 0, [LayerPlan(1, [0, 1, 2, 0], [0, 8, 0, 8])])
    values = before_and_after(np.array([[10, 4, 2]]), np.array([[6, 4, 2, 4]]), plan, 1)
    assert values["lis_even_split"].tolist() == [3 * 5 / 16]
    assert values["lis_logical"].tolist() == [3 * 6 / 16]
    assert values["lis_even_split_gap"] == pytest.approx(3 / 16)
    assert values["routing_drift"].tolist() == [0.0]
    # one token moves from expert 1 to expert 2: a share of 1 / 16
    moved = before_and_after(np.array([[10, 4, 2]]), np.array([[6, 3, 3, 4]]), plan, 1)
    assert moved["routing_drift"].tolist() == [1 / 16]
