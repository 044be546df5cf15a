"""Signals read inside the prefill against those of recorded routing, and a prompt of four tokens by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.contracts import InputError, PrefillRouting
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import PrefillBatch, prefill
from tasks.moe.record import observe_picks
from tasks.moe.registry import moe_layers
from tasks.moe.strength import PickSums, PickValues
from tasks.risk.features import fragility_signals, prefill_signals
from tasks.risk.online import Signals, batch_signals, read_signals
from tasks.risk.scoring import Requests, score
from tests.seeded_models import seeded_checkpoint

FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama_moe", "switch_transformers")
LENGTHS = (3, 17, 9, 30, 4)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    # a router temperature makes gate_prob differ from the routing weights
    overrides = {} if request.param == "switch_transformers" else {"router_temperature": 0.5}
    folder = tmp_path_factory.mktemp("online") / request.param
    return load_model(seeded_checkpoint(folder, request.param, **overrides))


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 300, (length,), generator=generator).tolist() for length in lengths]


def tables(model):
    generator = np.random.default_rng(0)
    shape = len(moe_layers(model)), moe_layers(model)[0].num_experts
    return generator.uniform(1, 9, shape), generator.normal(0, 1, shape)


def recorded(model, own):
    """Scores and routing of the same prompts as scoring makes them; each has a response of one token."""
    frame = pd.DataFrame({"id": [str(row) for row in range(len(own))]})
    lengths = np.array([len(prompt) for prompt in own])
    scores, routing, _ = score(model, Requests(frame, [[*p, 5] for p in own], lengths), "W4", 60)
    return scores, routing


@pytest.mark.parametrize("align", ["token", "predictor"])
def test_equal_to_recorded_routing(model, align):
    own, (load, phi) = prompts(), tables(model)
    scores, routing = recorded(model, own)
    expected = prefill_signals(scores, routing, load, ("gate_prob", "router_row_norm"), align)
    in_halves = model.config.is_encoder_decoder
    fragility = {} if in_halves else {"W3": phi, "W2": np.abs(phi)}
    signals = Signals(align, fragility=fragility, load=load)
    found = read_signals(model, own, scores.ids, signals, 60, "test", progress=False)
    assert found["prompt_tokens"].tolist() == list(LENGTHS)
    for name in (
        "log_ppl",
        "log_length",
        "routing_frequency",
        "log_fwp_gate_prob",
        "log_fwp_router_row_norm",
    ):
        # losses of another batch shape differ by float32 rounding
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert np.abs(found["log_fwp_gate_prob"] - found["log_ppl"]).max() > 1e-3
    if in_halves:
        assert (~routing.visited).any()  # the case of layers that a token does not pass
        return
    own_signals = fragility_signals(scores, routing, fragility, align)
    assert sorted(own_signals) == sorted(set(found) - set(expected) - {"prompt_tokens"})
    for name in own_signals:
        np.testing.assert_allclose(found[name], own_signals[name], rtol=2e-5, atol=2e-6, err_msg=name)
    for instance, own_phi in fragility.items():
        for row, (start, stop) in enumerate(zip(routing.offset[:-1], routing.offset[1:], strict=True)):
            by_token = by_hand(routing, own_phi)[start:stop]
            assert found[f"separable_{instance}"][row] == pytest.approx(by_token.mean(), rel=1e-5)
            weight = by_hand(routing, np.maximum(own_phi, 0))[start:stop]
            shift = 0 if align == "token" else 1
            weight = weight[2 - shift : LENGTHS[row] - shift]
            nll = scores.nll[scores.scored(row, "prompt")].astype(np.float64)
            expected_fwp = (weight * nll).sum() / weight.sum()
            assert found[f"log_fwp_measured_{instance}"][row] == pytest.approx(expected_fwp, rel=1e-4)


def by_hand(routing: PrefillRouting, phi: np.ndarray) -> np.ndarray:
    """sum over layers and picks of weight x phi, a plain loop: [T]."""
    total = np.zeros(len(routing.index))
    for token, (index, weight) in enumerate(zip(routing.index, routing.weight, strict=True)):
        for layer in range(index.shape[0]):
            for pick in range(index.shape[1]):
                total[token] += float(weight[layer, pick]) * phi[layer, index[layer, pick]]
    return total


def test_sums_equal_recorded_routing_to_rounding(model):
    """The same batches, so that the same float32 values are added up; padding gets nothing."""
    own, (load, phi) = prompts(), tables(model)
    values = PickValues(True, {"load": load}, {"phi": phi, "one": np.ones_like(phi)})
    recordings = list(prefill(model, own, 60, "recorded", record=True))  # one at a time: hooks add up
    summed = list(prefill(model, own, 60, "summed", values=values))
    for batch, other in zip(recordings, summed, strict=True):
        assert other.routing is None and torch.equal(batch.hidden, other.hidden)
        expected = torch.zeros(*batch.ids.shape, 4, dtype=torch.float64)
        for number, (layer, passed) in enumerate(zip(batch.routing, batch.visited, strict=True)):
            chosen, weight = layer.index.clamp(max=load.shape[1] - 1), layer.weight.double()
            parts = [
                layer.gate_prob.double().mean(-1),
                torch.from_numpy(load)[number][chosen].mean(-1),
                (torch.from_numpy(phi)[number][chosen] * weight).sum(-1),
                weight.sum(-1),
            ]
            expected += torch.stack(parts, -1) * passed[..., None]
        torch.testing.assert_close(other.sums, expected, rtol=1e-12, atol=1e-12)
        assert not other.sums[~batch.mask].any() and other.sums[batch.mask].any(dim=-1).sum() > len(own)


def test_batches_change_no_signal(model):
    own, (load, phi) = prompts(), tables(model)
    signals = Signals("token", fragility={} if model.config.is_encoder_decoder else {"W2": phi}, load=load)
    ids = [str(row) for row in range(len(own))]
    alone, together = (read_signals(model, own, ids, signals, size, "test", False) for size in (1, 500))
    np.testing.assert_allclose(alone, together, rtol=2e-4, atol=2e-5)
    again = read_signals(model, own, ids, signals, 500, "test", False)
    assert together.equals(again)


def test_four_tokens_by_hand_tell_the_alignments_apart():
    # A prompt of tokens 0..3 and one of padding, one layer. The losses of tokens 2 and 3 are 1 and 3 (token 1,
    # predicted from position 0 alone, is left out). gate_prob of the positions: 7, 0.5, 1, 0.25;
    # weight x phi: 1, 2, 3, 6.
    mask = torch.tensor([[True, True, True, True, False]])
    sums = torch.tensor([[[7, 1, 1], [0.5, 2, 2], [1, 3, 3], [0.25, 6, 6], [0, 0, 0]]], dtype=torch.float64)
    batch = PrefillBatch(
        [0], torch.zeros(1, 5, dtype=torch.int64), mask, mask, torch.zeros(1, 5, 1), None, [mask], sums
    )
    values = PickValues(True, {}, {"separable_W3": np.ones((1, 1)), "log_fwp_measured_W3": np.ones((1, 1))})

    def found(align):
        signals = Signals(align, ("gate_prob", "measured"), {"W3": np.ones((1, 1))})
        return batch_signals(batch, values, signals, np.array([1.0, 3.0]), np.array([2]), np.array([4]))

    # token: w = 1/1, 1/0.25 = 1, 4; mean 2.5; w~ = 0.4, 1.6; log FWP = (0.4 * 1 + 1.6 * 3) / 2 = 2.6
    # measured: w = 3, 6; log FWP = (3 * 1 + 6 * 3) / 9 = 7/3; separable: (1 + 2 + 3 + 6) / 4 = 3
    token = found("token")
    assert token["log_fwp_gate_prob"] == pytest.approx([2.6])
    assert token["log_fwp_measured_W3"] == pytest.approx([7 / 3])
    # predictor, positions 1 and 2: w = 1/0.5, 1/1 = 2, 1; w~ = 4/3, 2/3; log FWP = (4/3 + 2) / 2 = 5/3
    # measured: w = 2, 3; log FWP = (2 * 1 + 3 * 3) / 5 = 11/5
    predictor = found("predictor")
    assert predictor["log_fwp_gate_prob"] == pytest.approx([5 / 3])
    assert predictor["log_fwp_measured_W3"] == pytest.approx([11 / 5])
    for own in (token, predictor):
        assert own["separable_W3"] == pytest.approx([3.0])
        assert own["log_ppl"] == pytest.approx([2.0])
        assert own["log_length"] == pytest.approx([np.log(4)])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("online") / "qwen"))


def test_picks_that_reach_no_expert(qwen):
    """They count as the router's choice and weigh nothing, as in recorded routing."""
    own = prompts((9, 9))
    layer = moe_layers(qwen)[0]
    forward = layer.router.forward

    def dropping(hidden):
        logits, weight, index = forward(hidden)
        return logits, weight, index.masked_fill(index < 3, 8)  # three experts are full

    layer.router.forward = dropping
    try:
        scores, routing = recorded(qwen, own)
        phi = tables(qwen)[1]
        signals = Signals("token", fragility={"W3": phi})
        found = read_signals(qwen, own, scores.ids, signals, 500, "test", False)
    finally:
        layer.router.forward = forward
    expected = prefill_signals(scores, routing, np.ones_like(phi), ("gate_prob", "router_row_norm"), "token")
    assert (routing.weight == 0).any()
    for name in ("log_fwp_gate_prob", "log_fwp_router_row_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5)
    assert found["separable_W3"][1] == pytest.approx(by_hand(routing, phi)[9:].mean(), rel=1e-5)


def test_what_cannot_be_read_is_refused(qwen):
    phi = tables(qwen)[1]
    with pytest.raises(InputError, match=r"separable_W3 has values for \(2, 8\).*the model has \(3, 8\)"):
        read_signals(qwen, [[1, 2, 3]], ["a"], Signals("token", fragility={"W3": phi[:2]}), 10, "test", False)
    with pytest.raises(ValueError, match="2 tokens"):
        read_signals(qwen, [[1, 2]], ["a"], Signals("token"), 10, "test", False)
    with pytest.raises(ValueError, match="'entropy'"):
        Signals("token", ("entropy",))
    with pytest.raises(ValueError, match="either recorded or summed"):
        next(prefill(qwen, [[1]], 10, "both", record=True, values=PickValues(True)))
    with pytest.raises(ValueError, match="at least one"):
        next(prefill(qwen, [[1]], 10, "none", values=PickValues()))


def test_a_broken_scorer_is_named(qwen):
    weight = qwen.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[7] = float("nan")
    try:
        with pytest.raises(InputError, match="loss of prompt 'b' is not a finite number"):
            read_signals(qwen, [[2, 3, 4, 5], [2, 3, 4]], ["b", "a"], Signals("token"), 100, "test", False)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_sums_need_every_layer(qwen):
    layers = moe_layers(qwen)
    sums = PickSums(layers, PickValues(True))
    with pytest.raises(RuntimeError, match="0 of 3 MoE layers"):
        sums.pop()
    with observe_picks(layers, sums), torch.inference_mode():
        qwen(torch.arange(4)[None])
        assert sums.pop()[False].shape == (4, 1)
    assert all(not layer.router._forward_hooks for layer in layers)
