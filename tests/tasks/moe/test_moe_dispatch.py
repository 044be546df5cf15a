import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.moe.dispatch import DISPATCHES, mix, request_key

SEEDS = st.integers(0, 2**40)
REQUESTS = st.integers(0, 2**63)


def choose(rule, seed, layer, request, positions, copies):
    positions = np.asarray(positions)
    requests = np.full((len(positions), 1), request, dtype=np.uint64)
    copies = np.full((len(positions), 1), copies)
    return DISPATCHES[rule](seed, layer, requests, positions[:, None], copies)[:, 0]


def test_mix_is_the_published_splitmix64():
    # the first output of SplitMix64 seeded with 0; one zero word is one step from state 0
    assert int(mix(0)) == 0xE220A8397B1DCDAF


@given(SEEDS, st.integers(0, 100), REQUESTS, st.integers(0, 1000), st.integers(1, 200), st.integers(1, 5))
def test_round_robin_shares_consecutive_tokens_evenly(seed, layer, request, start, length, copies):
    chosen = choose("round_robin", seed, layer, request, np.arange(start, start + length), copies)
    counts = np.bincount(chosen, minlength=copies)
    assert len(counts) == copies
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("rule", DISPATCHES)
@given(SEEDS, REQUESTS, st.permutations(range(20)), st.integers(1, 4))
def test_a_choice_depends_on_its_own_token_alone(rule, seed, request, order, copies):
    together = choose(rule, seed, 3, request, np.arange(20), copies)
    shuffled = choose(rule, seed, 3, request, np.array(order), copies)
    alone = [choose(rule, seed, 3, request, [position], copies)[0] for position in range(20)]
    assert together.tolist() == alone
    assert shuffled.tolist() == together[order].tolist()


def test_random_is_even_over_many_tokens_and_unlike_between_layers_requests_and_seeds():
    base = choose("random", 0, 0, 1, np.arange(4000), 2)
    assert abs(base.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)  # four standard errors of a fair coin
    for other in [(1, 0, 1), (0, 1, 1), (0, 0, 2)]:
        agreement = (choose("random", *other, np.arange(4000), 2) == base).mean()
        assert abs(agreement - 0.5) < 4 * 0.5 / np.sqrt(4000)


def test_a_request_key_ignores_padding_on_either_side_but_not_order():
    right = request_key(np.array([[5, 6, 7, 0, 0]]), np.array([[1, 1, 1, 0, 0]], dtype=bool))
    left = request_key(np.array([[9, 9, 5, 6, 7]]), np.array([[0, 0, 1, 1, 1]], dtype=bool))
    bare = request_key(np.array([[5, 6, 7]]), np.ones((1, 3), dtype=bool))
    assert right == left == bare
    assert bare != request_key(np.array([[6, 5, 7]]), np.ones((1, 3), dtype=bool))
