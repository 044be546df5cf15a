"""The decomposition's algebra on made losses, where every term is known, and on a small model end to end."""

from itertools import chain, combinations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.frozen import SwappableModel
from tasks.moe.registry import moe_layers
from tasks.risk.decomposition import TERMS, decompose, swap_terms, term_figures, two_expert_terms
from tasks.risk.holdout import stratified_draws
from tasks.risk.scoring import Requests, score
from tasks.risk.swaps import SwapLosses
from tests.seeded_models import VOCABULARY, seeded_checkpoint

REQUESTS, BLOCKS = 5, 6


def subsets(of):
    return [frozenset(own) for own in chain.from_iterable(combinations(of, n) for n in range(len(of) + 1))]


def moebius(loss, blocks):
    """The Moebius terms m(X) = sum over Y in X of (-1)^(|X| - |Y|) N(Y), all 2^B of them."""
    known = {own: loss(own, "frozen") for own in subsets(range(blocks))}
    return {own: sum((-1) ** (len(own) - len(part)) * known[part] for part in subsets(own)) for own in known}


def arbitrary_loss(seed=0, blocks=BLOCKS, requests=REQUESTS):
    """A loss with terms of every order; routes that are free add something of their own."""
    terms = {
        own: np.random.default_rng([seed, *own, 99]).normal(size=requests) for own in subsets(range(blocks))
    }

    def loss(chosen, routes):
        value = sum(own for block, own in terms.items() if block <= chosen)
        return value + (0.1 * len(chosen) ** 2 if routes == "free" else 0.0)

    return loss


def test_higher_order_is_the_sum_of_the_moebius_terms_from_the_third_order_on():
    loss = arbitrary_loss()
    made, terms = swap_terms(loss, BLOCKS), moebius(loss, BLOCKS)
    assert len(terms) == 64 and not made.sampled

    def order(least, most):
        return sum(own for block, own in terms.items() if least <= len(block) <= most)

    assert made.additive == pytest.approx(order(1, 1))
    assert made.interaction == pytest.approx(order(2, 2))
    assert made.higher_order == pytest.approx(order(3, 6))
    assert made.route_change == pytest.approx(np.full(REQUESTS, 0.1 * 36))


def test_a_loss_linear_in_the_blocks_has_neither_interaction_nor_higher_order():
    slope = np.random.default_rng(1).normal(size=(BLOCKS, REQUESTS))
    made = swap_terms(lambda chosen, routes: 2.0 + slope[sorted(chosen)].sum(axis=0), BLOCKS)
    assert made.interaction == pytest.approx(np.zeros(REQUESTS), abs=1e-12)
    assert made.higher_order == pytest.approx(np.zeros(REQUESTS), abs=1e-12)
    assert made.single == pytest.approx(slope)


def test_damage_that_is_routing_weight_times_fragility_is_separable_alone():
    """Two requests, two blocks with phi = 3 and 5; A of request 0 is (0.25, 0.75), of request 1 (0.5, 0.5).
    Request 0 (fit): 0.75 + 3.75 = 4.5; request 1 (holdout): 1.5 + 2.5 = 4. phi of a block from request 0:
    0.75 / 0.25 = 3 and 3.75 / 0.75 = 5."""
    affinity = np.array([[0.25, 0.5], [0.75, 0.5]])
    phi = np.array([3.0, 5.0])
    swaps = swap_terms(lambda chosen, routes: sum((phi[b] * affinity[b] for b in chosen), np.zeros(2)), 2)
    made = decompose(swaps, affinity, np.array([True, False]))
    assert made.fragility == pytest.approx(phi)
    assert made.separable == pytest.approx([4.5, 4.0])
    assert made.separability == pytest.approx([0, 0], abs=1e-12) and made.bias == pytest.approx(0)


def test_bias_is_zero_for_fit_ratios_and_not_for_a_fragility_from_elsewhere():
    """The fit ratios give back the fit sum of the additive part, whatever the loss: sum_r sum_b A phi =
    sum_b sum_r single. With phi = 0 bias is all of the fit mean."""
    affinity, fit = np.random.default_rng(0).random((BLOCKS, REQUESTS)), np.arange(REQUESTS) < 3
    swaps = swap_terms(arbitrary_loss(), BLOCKS)
    assert decompose(swaps, affinity, fit).bias == pytest.approx(0, abs=1e-12)
    given = decompose(swaps, affinity, fit, fragility=np.zeros(BLOCKS))
    assert given.bias == pytest.approx(swaps.additive[fit].mean()) and given.bias != pytest.approx(0)
    assert sum(given.terms().values()) == pytest.approx(swaps.total)
    assert decompose(swaps, affinity, fit, fragility=np.array([np.nan] + [1.0] * 5)).unrouted == 1


def test_blocks_without_fit_routing_are_counted_and_their_damage_is_separability():
    """Block 1 is routed to by the holdout request alone: its damage 0.8 cannot be separable."""
    affinity = np.array([[1.0, 0.5], [0.0, 0.5]])
    single = np.array([[0.2, 0.1], [0.0, 0.8]])
    swaps = swap_terms(lambda chosen, routes: single[sorted(chosen)].sum(axis=0), 2)
    made = decompose(swaps, affinity, np.array([True, False]))
    assert made.unrouted == 1 and made.fragility[1] == 0
    assert made.separability == pytest.approx([0, 0.8]) and made.separable == pytest.approx([0.2, 0.1])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_terms_add_up_and_shares_to_one(seed, blocks):
    affinity = np.random.default_rng(seed).random((blocks, REQUESTS))
    fit = np.arange(REQUESTS) < 2
    made = decompose(swap_terms(arbitrary_loss(seed, blocks), blocks), affinity, fit)
    terms = made.terms()
    assert tuple(terms) == TERMS
    assert sum(terms.values()) == pytest.approx(made.swaps.total)
    assert terms["separability"][fit].mean() == pytest.approx(0, abs=1e-9)
    rows = np.flatnonzero(~fit)
    figures = term_figures(made, rows, stratified_draws(np.zeros(len(rows)), 30, 0))
    assert sum(figures[name]["share"] for name in TERMS) == pytest.approx(1)
    assert sum(figures[name]["mean"] for name in TERMS) == pytest.approx(figures["total"]["mean"])


def test_sampled_pairs_have_an_interval_that_holds_the_truth_as_often_as_it_says():
    """12 blocks, 66 pairs, 20 of them drawn: the 95 % interval holds the full sum in 91 to 98.5 % of draws."""
    loss = pairwise_loss(12)
    truth = swap_terms(loss, 12).interaction
    held = []
    for seed in range(400):
        made = swap_terms(loss, 12, pairs=20, seed=seed)
        assert made.sampled and len(made.pairs) == 20
        held.append(np.abs(made.interaction - truth) <= made.sampling_error())
    assert 0.91 <= np.mean(held) <= 0.985


def pairwise_loss(blocks):
    values = np.random.default_rng(3).normal(1, 1, size=(blocks, blocks, 2))

    def loss(chosen, routes):
        return sum((values[pair] for pair in combinations(sorted(chosen), 2)), np.zeros(2))

    return loss


def test_every_pair_is_drawn_once_where_all_but_one_are():
    loss = pairwise_loss(7)
    whole, most = swap_terms(loss, 7), swap_terms(loss, 7, pairs=20)
    missing = [pair for pair in whole.pairs[:, 0] if np.abs(most.pairs[:, 0] - pair).min() > 1e-9]
    assert whole.all_pairs == 21 and len(missing) == 1
    assert swap_terms(loss, 7, pairs=21).sampling_error() == pytest.approx([0, 0])
    with pytest.raises(ValueError, match="at least 2"):
        swap_terms(loss, 7, pairs=1)


def test_the_rest_is_named_for_what_it_is_where_pairs_were_sampled():
    made = decompose(swap_terms(pairwise_loss(7), 7, pairs=9), np.ones((7, 2)), np.array([True, False]))
    figures = term_figures(made, np.array([1]), np.zeros((1, 1), dtype=int))
    assert "higher_order" not in figures
    assert (
        figures["rest_with_sampling_error"]["sampling_error"] == figures["interaction"]["sampling_error"] > 0
    )
    # Together they are what all pairs give: this loss has no higher order and no single terms.
    whole = swap_terms(pairwise_loss(7), 7).interaction
    assert figures["beyond_additive"]["mean"] == pytest.approx(whole[1])
    assert "sampling_error" not in figures["beyond_additive"]


def test_frozen_routes_that_are_not_the_references_are_refused():
    with pytest.raises(RuntimeError, match="not the reference's"):
        swap_terms(lambda chosen, routes: np.array([1.0 if routes == "free" else 1.1]), 2)


def test_an_affinity_of_other_blocks_and_a_missing_fit_request_are_refused():
    swaps = swap_terms(arbitrary_loss(), BLOCKS)
    with pytest.raises(ValueError, match=r"affinity is \(2, 5\)"):
        decompose(swaps, np.ones((2, REQUESTS)), np.ones(REQUESTS, dtype=bool))
    with pytest.raises(ValueError, match="no request"):
        decompose(swaps, np.ones((BLOCKS, REQUESTS)), np.zeros(REQUESTS, dtype=bool))


numbers = st.floats(-100, 100, allow_nan=False)


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(
    arrays(float, n, elements=st.floats(0, 1)), arrays(float, n, elements=numbers), arrays(float, n, elements=numbers)
)))  # fmt: skip
def test_the_two_expert_identity_is_exact(drawn):
    a, first, second = drawn
    token = (first + second) / 2 + (a - 0.5) * (first - second)
    assert token == pytest.approx(a * first + (1 - a) * second, abs=1e-9)
    assert sum(two_expert_terms(a, first, second)) == pytest.approx(token.mean(), abs=1e-9)


def test_the_two_expert_terms_by_hand():
    """a = (1, 0), f1 = (2, 0), f2 = (0, 4): D = (2, 4), mean 3. Mean of f1 + f2 over two: (1 + 2) / 2 = 1.5.
    E[a] = 1/2, so nothing is separable. f1 - f2 = (2, -4), mean -1, a - E[a] = (1/2, -1/2):
    Cov = (1/2 * 3 + 1/2 * 3) / 2 = 1.5."""
    assert two_expert_terms(np.array([1.0, 0]), np.array([2.0, 0]), np.array([0.0, 4])) == (1.5, 0.0, 1.5)


# --- a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A reference of 2 layers x 3 experts in float64, and an instance: the same but for noise on its experts."""
    folder = seeded_checkpoint(tmp_path_factory.mktemp("six"), num_hidden_layers=2, num_experts=3)
    reference, instance = (load_model(folder, torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    for layer in moe_layers(instance):
        for matrix in layer.matrices().values():
            matrix += 0.03 * torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype)
    return reference, instance


@pytest.fixture(scope="module")
def requests():
    random = np.random.default_rng(0)
    lengths, prompts = [20, 13, 31, 16, 24], np.array([8, 5, 12, 9, 3])
    frame = pd.DataFrame({"id": list("abcde"), "class": "c", "split": ["fit"] * 3 + ["holdout"] * 2})
    return Requests(frame, [random.integers(2, VOCABULARY, size=n).tolist() for n in lengths], prompts)


@pytest.fixture(scope="module")
def losses(models, requests):
    return SwapLosses(*models, requests, 64, "expert")


@pytest.mark.parametrize("damage", ["dnll", "kl"])
def test_a_model_of_six_experts_end_to_end(losses, requests, damage):
    loss = losses.loss(damage)
    fit = (requests.frame["split"] == "fit").to_numpy()
    made = decompose(swap_terms(loss, 6), losses.affinity(), fit)
    beyond = sum(own for block, own in moebius(loss, 6).items() if len(block) >= 3)
    assert made.swaps.higher_order == pytest.approx(beyond, abs=1e-12)
    frame = made.frame()
    assert frame[list(TERMS)].sum(axis=1).to_numpy() == pytest.approx(frame["total"].to_numpy(), abs=1e-12)
    for name in {*TERMS, "total"} - {"bias"}:  # the model is not so simple that a term is missing
        assert frame[name].abs().max() > 1e-6, name


def test_total_is_the_damage_that_the_scorer_measures(models, requests, losses):
    reference, instance = models
    scores, _, hidden = score(reference, requests, "reference", 64)
    other, _, _ = score(instance, requests, "instance", 64, hidden)
    for row in range(len(requests.ids)):
        own = scores.scored(row, "response")
        measured = losses.losses(frozenset(range(6)), "free")
        dnll = (other.nll[own].astype(float) - scores.nll[own].astype(float)).mean()
        total = measured["dnll"][row] - losses.losses(frozenset(), "free")["dnll"][row]
        assert total == pytest.approx(dnll, abs=1e-5)
        assert measured["kl"][row] == pytest.approx(other.kl[own].mean(), abs=1e-5)


def test_frozen_routes_with_nothing_swapped_reproduce_the_reference(losses):
    frozen, free = (losses.losses(frozenset(), routes) for routes in ("frozen", "free"))
    assert np.array_equal(frozen["dnll"], free["dnll"])
    assert np.abs(frozen["kl"]).max() < 1e-15


def test_a_swap_leaves_no_trace(models, requests, losses):
    reference, _ = models
    before, _, _ = score(reference, requests, "reference", 64)
    losses.losses(frozenset([1, 4]), "frozen")
    after, _, _ = score(reference, requests, "reference", 64)
    assert np.array_equal(before.nll, after.nll)


def test_layers_swap_all_their_experts_and_their_affinity_is_the_experts_sum(models, requests, losses):
    layers = SwapLosses(*models, requests, 64, "layer")
    assert len(layers.blocks) == 2
    expected = losses.losses(frozenset([3, 4, 5]), "frozen")["kl"]
    assert layers.losses(frozenset([1]), "frozen")["kl"] == pytest.approx(expected, abs=1e-15)
    assert layers.affinity() == pytest.approx(
        np.ones((2, 5))
    )  # norm_topk_prob: the weights of a token add up to 1
    assert losses.affinity().reshape(2, 3, 5).sum(axis=1) == pytest.approx(layers.affinity())


def test_a_request_alone_gives_what_it_gives_in_a_batch_and_counts_its_tokens(models, requests, losses):
    alone = Requests(requests.frame.iloc[[3]], [requests.sequences[3]], requests.prompt_length[[3]])
    own = SwapLosses(*models, alone, 64, "expert")
    assert own.forward_tokens == 16
    for blocks in (frozenset([0]), frozenset(range(6))):
        assert own.losses(blocks, "frozen")["dnll"][0] == pytest.approx(
            losses.losses(blocks, "frozen")["dnll"][3], abs=1e-6
        )
    assert own.forward_tokens == 16 * 3
    assert own.affinity()[:, 0] == pytest.approx(losses.affinity()[:, 3], abs=1e-6)


def test_prompts_are_scored_without_their_responses(models, requests):
    prompts = SwapLosses(*models, requests, 64, "layer", part="prompt")
    assert prompts.forward_tokens == requests.prompt_length.sum()
    scores, _, _ = score(models[0], requests, "reference", 64)
    own = [scores.nll[scores.scored(row, "prompt")].mean() for row in range(5)]
    assert prompts.losses(frozenset(), "free")["dnll"] == pytest.approx(own, abs=1e-5)


def test_an_instance_of_another_reference_is_refused(models, requests, tmp_path):
    other = load_model(seeded_checkpoint(tmp_path, num_hidden_layers=2), torch.float64)
    with pytest.raises(InputError, match="not one of this reference"):
        SwapLosses(models[0], other, requests, 64, "expert")
    with pytest.raises(InputError, match=r"torch\.float32"):
        SwapLosses(models[0], load_model(tmp_path), requests, 64, "expert")


def test_routes_of_other_passes_are_refused(models, requests):
    pair, none = SwappableModel(*models), np.zeros((2, 3), dtype=bool)
    with torch.inference_mode(), pair.swapped(none) as routes:
        models[0](torch.tensor([[3, 4, 5]]))
    with torch.inference_mode(), pair.swapped(none, routes), pytest.raises(RuntimeError, match="pass 0"):
        models[0](torch.tensor([[3, 4, 5, 6]]))
    models[0](torch.tensor([[3, 4, 5, 6]]))  # and nothing stays installed
