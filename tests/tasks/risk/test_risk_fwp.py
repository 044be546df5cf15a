"""FWP by hand, its invariants, and the vectorised form against a plain one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts import PrefillRouting, TokenScores
from tasks.risk.fwp import (
    expected_damage,
    fwp,
    log_fwp,
    measured_weight,
    normalised,
    prompt_tokens,
    segment_mean,
    separable,
    strength_report,
    token_strength,
    weight_report,
    weighted_log_ppl,
)

positive = st.floats(0.01, 100)
pairs = st.lists(st.tuples(st.floats(0, 20), positive), min_size=1, max_size=30)


def routing_of(gate_prob, index=None, norms=None, offset=None):
    gate_prob = np.asarray(gate_prob, dtype=np.float32)
    index = np.zeros(gate_prob.shape, np.uint16) if index is None else np.asarray(index, np.uint16)
    norms = np.ones((gate_prob.shape[1], 8), np.float32) if norms is None else np.asarray(norms, np.float32)
    offset = np.array([0, len(gate_prob)]) if offset is None else np.asarray(offset)
    return PrefillRouting(offset, index, gate_prob, gate_prob, norms)


def test_four_tokens_by_hand_tell_the_alignments_apart():
    # A prompt of tokens 0..3, one layer, one pick; a response of one token whose loss (50) must not enter.
    # Losses: token 1 costs 9 (predicted from position 0 alone: left out), token 2 costs 1, token 3 costs 3.
    # Strengths of positions 0..3: 7, 0.5, 1, 0.25.
    scores = TokenScores(["a"], np.array([0, 4]), np.array([4]), np.array([9.0, 1.0, 3.0, 50.0]), None)
    routing = routing_of(np.array([7, 0.5, 1, 0.25]).reshape(4, 1, 1))
    strength = token_strength(routing, "gate_prob")

    # token: w = 1/1, 1/0.25 = 1, 4; mean 2.5; w~ = 0.4, 1.6; log FWP = (0.4 * 1 + 1.6 * 3) / 2 = 2.6
    tokens = prompt_tokens(scores, routing, "token")
    assert log_fwp(tokens.nll, strength[tokens.position], tokens.offset) == pytest.approx([2.6])
    # predictor: positions 1, 2: w = 1/0.5, 1/1 = 2, 1; mean 1.5; w~ = 4/3, 2/3; log FWP = (4/3 + 2) / 2 = 5/3
    tokens = prompt_tokens(scores, routing, "predictor")
    assert log_fwp(tokens.nll, strength[tokens.position], tokens.offset) == pytest.approx([5 / 3])
    # plain: (1 + 3) / 2 = 2
    assert segment_mean(tokens.nll, tokens.offset) == pytest.approx([2.0])


def test_strengths_by_hand():
    # Two tokens, two layers, two picks. gate_prob of token 0: (0.5 + 0.3 + 0.2 + 0.2) / 4 = 0.3.
    # Norms: layer 0 is 1, 2, 3 and layer 1 is 4, 5, 6. Token 0 picks 0, 2 and 1, 1: (1 + 3 + 5 + 5) / 4
    # = 3.5;
    # token 1 picks 1, 0 and 2, 0: (2 + 1 + 6 + 4) / 4 = 3.25.
    gate_prob = [[[0.5, 0.3], [0.2, 0.2]], [[0.4, 0.4], [0.1, 0.1]]]
    index = [[[0, 2], [1, 1]], [[1, 0], [2, 0]]]
    routing = routing_of(gate_prob, index, norms=[[1, 2, 3], [4, 5, 6]])
    assert token_strength(routing, "gate_prob") == pytest.approx([0.3, 0.25])
    assert token_strength(routing, "router_row_norm") == pytest.approx([3.5, 3.25])
    with pytest.raises(ValueError, match="'entropy'"):
        token_strength(routing, "entropy")


@given(pairs, positive)
def test_a_constant_strength_gives_perplexity(tokens, strength):
    nll = np.array([loss for loss, _ in tokens])
    assert np.log(fwp(nll, np.full(len(nll), strength))) == pytest.approx(nll.mean(), rel=1e-12, abs=1e-12)


@given(pairs, positive)
def test_scaling_the_strengths_changes_nothing(tokens, scale):
    nll, strength = np.array(tokens).T
    assert fwp(nll, scale * strength) == pytest.approx(fwp(nll, strength), rel=1e-9)


@given(pairs)
def test_fwp_lies_between_the_least_and_the_largest_loss(tokens):
    nll, strength = np.array(tokens).T
    assert np.exp(nll.min()) * (1 - 1e-9) <= fwp(nll, strength) <= np.exp(nll.max()) * (1 + 1e-9)


def random_requests(seed=0, requests=7, layers=3, experts=5, picks=2):
    generator = np.random.default_rng(seed)
    length = generator.integers(3, 12, requests)
    offset = np.concatenate([[0], np.cumsum(length + 3)])  # four response tokens each
    starts = np.concatenate([[0], np.cumsum(length)])
    shape = (starts[-1], layers, picks)
    index = generator.integers(0, experts, shape)
    routing = routing_of(
        generator.uniform(0.05, 1, shape), index, generator.uniform(0.5, 2, (layers, experts)), starts
    )
    nll = generator.exponential(2, offset[-1])
    return TokenScores([str(r) for r in range(requests)], offset, length, nll, None), routing


@pytest.mark.parametrize("align", ["token", "predictor"])
@pytest.mark.parametrize("strength", ["gate_prob", "router_row_norm"])
def test_vectorised_equals_the_plain_loop(align, strength):
    scores, routing = random_requests()
    tokens = prompt_tokens(scores, routing, align)
    got = log_fwp(tokens.nll, token_strength(routing, strength)[tokens.position], tokens.offset)
    for request, (start, length) in enumerate(zip(routing.offset[:-1], scores.prompt_length, strict=True)):
        weights, losses = [], []
        for t in range(2, length):  # token t is predicted by prediction t - 1
            at = start + (t if align == "token" else t - 1)
            chosen = [
                routing.gate_prob[at, layer, pick]
                if strength == "gate_prob"
                else routing.router_row_norm[layer, routing.index[at, layer, pick]]
                for layer in range(3)
                for pick in range(2)
            ]
            weights.append(1 / np.mean(chosen, dtype=np.float64))
            losses.append(scores.nll[scores.offset[request] + t - 1])
        assert got[request] == pytest.approx(np.dot(weights, losses) / np.sum(weights), rel=1e-6)


def test_measured_and_separable_by_hand():
    # Three tokens, two layers, two picks, phi of layer 0: 1, -2, 3 and of layer 1: 0, 4, -1 nats.
    # Token 0: 0.6 * 1 + 0.4 * 3 and 0.5 * 4 - 0.5 * 1:  1.8 + 1.5 = 3.3;  without the negative: 1.8 + 2   = 3.8
    # Token 1: -0.3 * 2 + 0.7 * 1 and 0.2 * 0 - 0.8 * 1:  0.1 - 0.8 = -0.7; without the negative: 0.7 + 0   = 0.7
    # Token 2: its layer 1 dropped both picks (weight 0): -0.5 * 2 + 0.5 * 3 = 0.5;              1.5
    index = [[[0, 2], [1, 2]], [[1, 0], [0, 2]], [[1, 2], [1, 0]]]
    weight = [[[0.6, 0.4], [0.5, 0.5]], [[0.3, 0.7], [0.2, 0.8]], [[0.5, 0.5], [0.0, 0.0]]]
    phi = np.array([[1.0, -2, 3], [0, 4, -1]])
    routing = routing_of(weight, index, norms=np.ones((2, 3)), offset=[0, 2, 3])
    assert expected_damage(routing, phi) == pytest.approx([3.3, -0.7, 0.5])
    assert measured_weight(routing, phi) == pytest.approx([3.8, 0.7, 1.5])
    # Requests of tokens 0, 1 and of token 2: (3.3 - 0.7) / 2 = 1.3, and 0.5.
    assert separable(routing, phi) == pytest.approx([1.3, 0.5])
    # By A_prompt instead: request 0 gives expert (0, 0) 0.6 and 0.7, on average 0.65, and so on.
    affinity = np.array([[0.65, 0.15, 0.2], [0.1, 0.25, 0.65]])
    assert (affinity * phi).sum() == pytest.approx(1.3)
    # Weights 3.8 and 0.7 have mean 2.25: log FWP of losses 1 and 3 is (3.8 * 1 + 0.7 * 3) / 2.25 / 2.
    offset = np.array([0, 2, 3])
    shares = normalised(measured_weight(routing, phi), offset)
    assert shares == pytest.approx([3.8 / 2.25, 0.7 / 2.25, 1])
    losses = np.array([1.0, 3, 2])
    assert weighted_log_ppl(losses, shares, offset) == pytest.approx([5.9 / 4.5, 2])
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        separable(routing, phi.T)


def test_a_request_that_no_fragile_expert_touches_has_fwp_equal_to_ppl():
    losses, offset = np.array([1.0, 3, 5]), np.array([0, 2, 3])
    shares = normalised(np.array([0.0, 0, 7]), offset)
    assert shares.tolist() == [1, 1, 1]
    assert weighted_log_ppl(losses, shares, offset).tolist() == [2, 5]


@given(st.floats(0.01, 100))
def test_equal_fragility_with_weights_that_sum_to_one_is_perplexity(phi):
    scores, routing = random_requests()
    weight = routing.weight / routing.weight.sum(axis=-1, keepdims=True)
    own = PrefillRouting(routing.offset, routing.index, weight, routing.gate_prob, routing.router_row_norm)
    tokens = prompt_tokens(scores, own, "token")
    shares = normalised(measured_weight(own, np.full((3, 5), phi))[tokens.position], tokens.offset)
    report = weight_report(tokens, shares)
    assert report["equals_ppl"] is True
    assert separable(own, np.full((3, 5), phi)) == pytest.approx(np.full(7, 3 * phi))  # 3 layers, each phi


def test_renormalised_routing_weights_are_perplexity():
    # norm_topk_prob: the k weights of a token and layer sum to 1, so their mean is always 1/k.
    scores, routing = random_requests()
    weight = routing.gate_prob / routing.gate_prob.sum(axis=-1, keepdims=True)
    tokens = prompt_tokens(scores, routing, "token")
    report = strength_report(tokens, token_strength(routing_of(weight, offset=routing.offset), "gate_prob"))
    assert report["equals_ppl"] is True
    assert report["correlation_log_ppl"] == pytest.approx(1, abs=1e-9)
    informative = strength_report(tokens, token_strength(routing, "gate_prob"))
    assert informative["equals_ppl"] is False
    assert informative["std_weight"] > 0.1


def test_what_cannot_be_weighed_is_refused():
    scores, routing = random_requests()
    other = PrefillRouting(
        routing.offset + 1, routing.index, routing.weight, routing.gate_prob, routing.router_row_norm
    )
    other.offset[0] = 0
    with pytest.raises(ValueError, match="same prompts"):
        prompt_tokens(scores, other, "token")
    with pytest.raises(ValueError, match="positive"):
        fwp(np.ones(3), np.array([1.0, 0.0, 1.0]))
    short = TokenScores(["a"], np.array([0, 3]), np.array([2]), np.ones(3), None)
    with pytest.raises(ValueError, match="2 tokens"):
        prompt_tokens(short, routing_of(np.ones((2, 1, 1))), "token")
    with pytest.raises(ValueError, match="'previous'"):
        prompt_tokens(scores, routing, "previous")
