"""Swaps under frozen routes in every decoder-only family, and passes that begin where a swap does."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.frozen import SwappableModel
from tasks.moe.registry import FAMILIES, moe_layers
from tasks.risk.scoring import Requests
from tasks.risk.swaps import SwapLosses
from tests.seeded_models import VOCABULARY, seeded_checkpoint

DECODERS = sorted(set(FAMILIES) - {"switch_transformers"})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def disturbed(folder, dtype=torch.float32):
    """The checkpoint's model with noise on its experts' matrices."""
    model, generator = load_model(folder, dtype), torch.Generator().manual_seed(5)
    for layer in moe_layers(model):
        for matrix in layer.matrices().values():
            matrix += 0.03 * torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype)
    return model


@pytest.fixture(scope="module", params=DECODERS)
def family(request, tmp_path_factory):
    folder = seeded_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return load_model(folder), disturbed(folder)


@pytest.fixture(scope="module")
def requests():
    random = np.random.default_rng(0)
    lengths, prompts = [20, 13, 31, 16], np.array([8, 5, 12, 9])
    frame = pd.DataFrame({"id": list("abcd"), "class": "c", "split": "fit"})
    return Requests(frame, [random.integers(2, VOCABULARY, size=n).tolist() for n in lengths], prompts)


def test_passes_that_begin_at_the_swap_give_the_same_bits(family, requests):
    """Every single layer, every pair right after its lower layer (as `swap_terms` asks), all layers with free
    routes, and single experts: with and without the skip."""
    top = len(moe_layers(family[0])) - 1
    layers = [frozenset(own) for own in ([0], [0, top], [top - 1], [top - 1, top], [top], range(top + 1))]
    asked = {
        "layer": [*((own, "frozen") for own in layers), (layers[-1], "free"), (layers[0], "free")],
        "expert": [(frozenset([8 * top + 3]), "frozen"), (frozenset([8 * top + 3, 8 * top + 4]), "frozen")],
    }
    for level, runs in asked.items():
        # 64 tokens a batch: two passes for the four requests
        fast, slow = (SwapLosses(*family, requests, 64, level, skip=skip) for skip in (True, False))
        for blocks, routes in runs:
            one, other = fast.losses(blocks, routes), slow.losses(blocks, routes)
            for damage in ("dnll", "kl"):
                assert np.array_equal(one[damage], other[damage]), (level, sorted(blocks), routes)
        assert one["kl"].max() > 1e-6
        assert fast.forward_tokens < slow.forward_tokens == 80 * (1 + len(set(runs)))  # each once


def test_nothing_stays_behind(family, requests):
    reference, _ = family
    ids = torch.tensor([requests.sequences[0]])
    with torch.inference_mode():
        before = reference(ids).logits
        losses = SwapLosses(*family, requests, 64, "layer")
        losses.losses(frozenset([1]), "frozen")
        assert torch.equal(reference(ids).logits, before)
    for module in reference.modules():
        assert "forward" not in vars(module) and not module._forward_hooks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return seeded_checkpoint(tmp_path_factory.mktemp("frozen"))


def test_a_pair_costs_what_lies_above_its_upper_layer(checkpoint, requests):
    """3 layers, all of experts. Alone: layer 1 costs 2 of 3 layers; {1, 2} right after it 1 of 3, {0, 2} after
    {1} all of them, as it shares nothing with {1}: the reference's inputs of layer 0 are the tokens."""
    losses = SwapLosses(load_model(checkpoint), disturbed(checkpoint), requests, 2048, "layer")
    paid = []
    for blocks in ([1], [1, 2], [0, 2], [1, 2]):
        before = losses.forward_tokens
        losses.losses(frozenset(blocks), "frozen")
        paid.append(round(3 * (losses.forward_tokens - before) / 80, 6))
    assert paid == [2, 1, 3, 0]  # the last was known
    assert losses.run_tokens(1) == pytest.approx(80 * 2 / 3) and losses.run_tokens(None) == 80


def test_another_instance_shares_the_references_pass(checkpoint, requests):
    reference, instance = load_model(checkpoint), disturbed(checkpoint)
    first = SwapLosses(reference, load_model(checkpoint), requests, 64, "layer")
    assert first.losses(frozenset([0, 1, 2]), "free")["kl"] == pytest.approx(np.zeros(4), abs=1e-12)
    second, alone = first.of(instance), SwapLosses(reference, instance, requests, 64, "layer")
    assert second.forward_tokens == 0
    for blocks, routes in ((frozenset(), "frozen"), (frozenset([1]), "frozen"), (frozenset([0, 2]), "free")):
        one, other = second.losses(blocks, routes), alone.losses(blocks, routes)
        assert np.array_equal(one["kl"], other["kl"]) and np.array_equal(one["dnll"], other["dnll"])
    spared = second.of(instance, spare_first=True).losses(frozenset([1]), "frozen")["kl"]
    assert not np.array_equal(spared, second.losses(frozenset([1]), "frozen")["kl"])


def test_more_passes_than_were_kept_are_refused(checkpoint):
    pair = SwappableModel(load_model(checkpoint), disturbed(checkpoint))
    none = np.zeros((3, 8), dtype=bool)
    with torch.inference_mode(), pair.swapped(none), pair.keeping([1]) as inputs:
        pair.reference(torch.tensor([[3, 4, 5]]))
    assert list(inputs) == [1] and len(inputs[1]) == 1
    with torch.inference_mode(), pair.resuming(1, inputs):
        pair.reference(torch.tensor([[3, 4, 5]]))
        with pytest.raises(RuntimeError, match="only 1 passes"):
            pair.reference(torch.tensor([[3, 4, 5]]))
    with torch.inference_mode(), pair.keeping([0]) as inputs:  # nothing enters a first decoder layer
        pair.reference(torch.tensor([[3, 4, 5]]))
    assert inputs == {}


def test_an_instance_whose_router_differs_is_refused(checkpoint):
    other = disturbed(checkpoint)
    moe_layers(other)[1].router_rows()[0, 0] += 1
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.gate\.weight' differs"):
        SwappableModel(load_model(checkpoint), other)


def test_a_loss_that_is_no_number_names_the_request(checkpoint, requests):
    broken = load_model(checkpoint)
    moe_layers(broken)[1].matrices()["down_proj"][:] = float("nan")
    losses = SwapLosses(load_model(checkpoint), broken, requests, 64, "layer")
    with pytest.raises(InputError, match="request 'a' with 1 of 3 blocks"):
        losses.losses(frozenset([1]), "frozen")


def test_an_encoder_decoder_is_refused(tmp_path):
    model = load_model(seeded_checkpoint(tmp_path, "switch_transformers"))
    with pytest.raises(InputError, match="encoder-decoder"):
        SwappableModel(model, model)
