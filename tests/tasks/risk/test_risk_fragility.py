"""Fragility's estimators against exact swaps and against finite differences of a small model's loss."""

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.registry import moe_layers
from tasks.risk.fragility import (
    agreement,
    estimate_sums,
    reference_gradients,
    router_row_norm,
    swap_fragility,
)
from tasks.risk.scoring import Requests
from tasks.risk.swaps import SwapLosses
from tests.seeded_models import VOCABULARY, seeded_checkpoint

LAYERS, EXPERTS = 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeded_checkpoint(tmp_path_factory.mktemp("six"), num_hidden_layers=LAYERS, num_experts=EXPERTS)


@pytest.fixture(scope="module")
def reference(folder):
    return load_model(folder, torch.float64)


def moved(folder, size, only=None):
    """The reference with noise of this size on its experts, or on the one expert `only` (layer, expert)."""
    model = load_model(folder, torch.float64)
    generator = torch.Generator().manual_seed(5)
    for place, layer in enumerate(moe_layers(model)):
        for matrix in layer.matrices().values():
            noise = size * torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype)
            for expert in range(EXPERTS):
                if only in (None, (place, expert)):
                    matrix[expert] += noise[expert]
    return model


@pytest.fixture(scope="module")
def requests():
    random = np.random.default_rng(0)
    lengths, prompts = [20, 13, 31, 16, 24, 18], np.array([8, 5, 12, 9, 3, 4])
    frame = pd.DataFrame({"id": list("abcdef"), "class": "c", "split": "fit"})
    return Requests(frame, [random.integers(2, VOCABULARY, size=n).tolist() for n in lengths], prompts)


def sums_of(reference, instance, requests, **options):
    return estimate_sums(reference_gradients(reference, requests, **options).passes, reference, instance)


def swap_of(reference, instance, requests, damage="dnll", spare_first=False):
    losses = SwapLosses(reference, instance, requests, 64, "expert", spare_first=spare_first)
    return swap_fragility(losses, range(LAYERS), damage).phi


@pytest.fixture(scope="module")
def slightly(folder):
    return moved(folder, 1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_taylor_is_the_swap_where_errors_are_small(reference, slightly, requests, first):
    """At noise of 1e-4 the first order is nearly all there is: what it leaves, and a square from one draw, are
    below a hundredth of the largest."""
    swap = swap_of(reference, slightly, requests, spare_first=not first)
    sums = sums_of(reference, slightly, requests)
    row, near = 0 if first else 1, 0.01 * np.abs(swap).max()
    assert swap.shape == (LAYERS, EXPERTS)
    assert sums.linear[row] / sums.affinity[row] == pytest.approx(swap, abs=near)
    assert sums.taylor("dnll", first) == pytest.approx(swap, abs=near)
    assert agreement(swap, sums.linear[row] / sums.affinity[row], True, [0, 1])["mean"] == 1


def test_position_0_counts_where_it_is_counted(reference, slightly, requests):
    sums = sums_of(reference, slightly, requests)
    swaps = [swap_of(reference, slightly, requests, spare_first=spare) for spare in (False, True)]
    scale = np.abs(swaps[0]).max()
    assert np.abs(swaps[0] - swaps[1]).max() > 0.05 * scale
    assert np.abs(sums.taylor("dnll", True) - sums.taylor("dnll", False)).max() > 0.05 * scale
    assert (sums.weight[1] < sums.weight[0]).any()


def test_the_square_is_the_divergence_to_second_order(folder, reference, requests):
    """KL is 1/2 d' F d to second order. A draw of signs is off by about its own size, 6 requests and 40 draws
    thus by 1 / sqrt(240), 6 %, in one expert."""
    instance = moved(folder, 3e-3)
    square = sums_of(reference, instance, requests, probes=40).taylor("kl")
    assert square == pytest.approx(swap_of(reference, instance, requests, "kl"), rel=0.3)


def test_sums_of_parts_add_up_to_those_of_the_whole(reference, slightly, requests):
    passes = reference_gradients(reference, requests).passes
    whole = estimate_sums(passes, reference, slightly)
    parts = estimate_sums(passes[:2], reference, slightly) + estimate_sums(passes[2:], reference, slightly)
    assert parts.requests == whole.requests == 6
    for name in ("linear", "square", "error", "weight", "affinity"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))


def test_only_the_expert_that_differs_is_fragile(folder, reference, requests):
    instance = moved(folder, 0.01, only=(1, 2))
    sums = sums_of(reference, instance, requests)
    for phi in (swap_of(reference, instance, requests), sums.taylor("dnll"), sums.output_error()):
        assert phi[1, 2] != 0
        others = np.delete(phi.ravel(), 5)
        assert np.abs(others).max() < 1e-12


def test_output_error_by_hand(folder, reference, requests):
    """down_proj of expert (0, 1) doubled: its output error is its own output, whose norms are averaged by weight."""
    instance = load_model(folder, torch.float64)
    moe_layers(instance)[0].matrices()["down_proj"][1] *= 2
    total = weight_sum = 0.0
    seen = []
    experts = moe_layers(reference)[0].experts
    handle = experts.module.register_forward_pre_hook(lambda _, entered: seen.append(entered))
    with torch.inference_mode():
        for sequence in requests.sequences:
            reference(torch.tensor([sequence]))
            hidden, index, weight = (tensor[:-1] for tensor in seen.pop())
            token, pick = torch.nonzero(index == 1, as_tuple=True)
            output = experts.output(1, experts.inner(1, hidden[token]))
            total += float((output.norm(dim=1) * weight[token, pick]).sum())
            weight_sum += float(weight[token, pick].sum())
    handle.remove()
    found = sums_of(reference, instance, requests).output_error()
    assert found[0, 1] == pytest.approx(total / weight_sum)


def test_costs_are_counted_in_tokens(reference, slightly, requests):
    """A run that swaps an expert of layer 1 of 2 computes one layer: half. With the reference's pass:
    1 + 3 + 3 / 2 of the tokens."""
    tokens = sum(len(sequence) for sequence in requests.sequences)
    losses = SwapLosses(reference, slightly, requests, 64, "expert")
    swap = swap_fragility(losses, range(LAYERS), "dnll")
    assert swap.cost.forward_tokens == losses.forward_tokens == 5.5 * tokens
    assert losses.run_tokens(None) + sum(map(losses.run_tokens, range(6))) == 5.5 * tokens
    one = swap_fragility(
        losses.of(slightly), [1], "dnll"
    )  # the reference's pass is shared, and still its cost
    assert one.cost.forward_tokens == 2.5 * tokens and np.isnan(one.phi[0]).all()
    assert one.phi[1] == pytest.approx(swap.phi[1])
    cost = reference_gradients(reference, requests, probes=3).cost
    assert (cost.forward_tokens, cost.backward_tokens) == (tokens, 4 * tokens)


def test_router_row_norms_have_mean_1_in_each_layer(reference):
    phi = router_row_norm(reference)
    assert phi.shape == (LAYERS, EXPERTS) and phi.mean(axis=1) == pytest.approx([1, 1])
    rows = moe_layers(reference)[1].router_rows().norm(dim=1)
    assert phi[1] == pytest.approx((rows / rows.mean()).tolist())


def test_agreement_by_hand():
    """Layer 0: (1, 2, 3) against (1, 2, 4) orders alike, 1. Layer 1: (1, 2, 3) against (3, 2, 1) is -1; so their
    mean is 0. At the top expert (3) of layer 0 the estimate is 4, of layer 1 it is 1: off by 3 at worst. Layer
    2 has two known experts: no correlation, and at its top expert (-5 against 2) the wrong sign."""
    swap = np.array([[1, 2, 3], [1, 2, 3], [np.nan, 1, -5]], dtype=float)
    other = np.array([[1, 2, 4], [3, 2, 1], [0, 1, 2]], dtype=float)
    found = agreement(swap, other, True, [1, 3, 5])
    assert found["layers"] == pytest.approx({"1": 1.0, "3": -1.0}) and found["mean"] == pytest.approx(0)
    assert found["worst_factor"] == pytest.approx(3) and found["wrong_sign"] == 1
    assert "worst_factor" not in agreement(swap, other, False, [1, 3, 5])


def test_an_expert_without_a_token_has_no_fragility(folder, reference):
    """One request of 4 tokens, top 2 of 3 experts: where an expert has no token, all estimates say so alike."""
    frame = pd.DataFrame({"id": ["a"], "class": "c", "split": "fit"})
    rng = np.random.default_rng(1)
    instance, found = moved(folder, 0.01), False
    for _ in range(10):
        one = Requests(frame, [rng.integers(2, VOCABULARY, size=4).tolist()], np.array([3]))
        swap, sums = swap_of(reference, instance, one), sums_of(reference, instance, one)
        for phi in (sums.taylor("dnll"), sums.output_error()):
            assert np.array_equal(np.isnan(swap), np.isnan(phi))
        found |= bool(np.isnan(swap).any())
    assert found


def test_layer_blocks_and_unknown_settings_are_refused(reference, slightly, requests):
    with pytest.raises(ValueError, match="level 'layer'"):
        swap_fragility(SwapLosses(reference, slightly, requests, 64, "layer"), [0], "kl")
    with pytest.raises(ValueError, match="probes is 0"):
        reference_gradients(reference, requests, probes=0)
    with pytest.raises(ValueError, match="damage is 'ppl'"):
        sums_of(reference, slightly, requests).taylor("ppl")


def test_a_broken_reference_is_named(folder, requests):
    broken = load_model(folder, torch.float64)
    moe_layers(broken)[1].matrices()["down_proj"][:] = float("inf")
    with pytest.raises(InputError, match="sequence 'a' is not a finite number"):
        reference_gradients(broken, requests)
