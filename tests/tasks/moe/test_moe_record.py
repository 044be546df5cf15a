from pathlib import Path

import pytest
import torch

from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.record import record_routing
from tasks.moe.registry import moe_layers
from tests.seeded_models import seeded_checkpoint


def recorded_and_inputs(model, ids: torch.Tensor):
    """Routing per layer, and the router's inputs [T, H] caught beside it."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.router.register_forward_pre_hook(lambda _module, given: inputs.append(given[0].clone()))
        for layer in moe_layers(model)
    ]
    with record_routing(model) as recorder, torch.inference_mode():
        model(ids)
        routing = recorder.pop()
    for hook in hooks:
        hook.remove()
    return routing, inputs


@pytest.mark.parametrize("temperature", [1.0, 0.01])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_recorded_equals_recomputed(
    tmp_path: Path, family: str, top_k: int, normalised: bool, temperature: float
) -> None:
    folder = seeded_checkpoint(
        tmp_path / "model",
        family,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalised,
        router_temperature=temperature,
    )
    model = load_model(folder)
    ids = torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(0))
    routing, inputs = recorded_and_inputs(model, ids)
    assert len(routing) == len(moe_layers(model)) == len(inputs)
    for layer, own, hidden in zip(moe_layers(model), routing, inputs, strict=True):
        logits = hidden @ layer.router_rows().T  # [14, 8]
        probability = torch.softmax(logits, -1)
        value, index = probability.topk(top_k, -1)
        if normalised:
            value = value / value.sum(-1, keepdim=True)
        assert own.index.shape == own.weight.shape == own.gate_prob.shape == (14, top_k)
        assert torch.equal(own.index, index)
        torch.testing.assert_close(own.weight, value)
        # FWP's strength: over all experts, before any renormalisation, of the unflattened logits
        torch.testing.assert_close(own.gate_prob, torch.softmax(logits / temperature, -1).gather(-1, index))


def test_every_expert_selected_sums_to_one(tmp_path: Path) -> None:
    model = load_model(seeded_checkpoint(tmp_path / "model", num_experts_per_tok=8))
    routing, _ = recorded_and_inputs(model, torch.arange(5)[None])
    for own in routing:
        torch.testing.assert_close(own.gate_prob.sum(-1), torch.ones(5))
        assert own.index.sort(-1).values.tolist() == [list(range(8))] * 5


def test_ties_are_broken_alike(tmp_path: Path) -> None:
    model = load_model(seeded_checkpoint(tmp_path / "model"))
    for layer in moe_layers(model):
        layer.router_rows().zero_()  # all experts tie, for every token
    first, _ = recorded_and_inputs(model, torch.arange(6)[None])
    again, _ = recorded_and_inputs(model, torch.arange(6)[None])
    for own, same in zip(first, again, strict=True):
        assert torch.equal(own.index, same.index)
        assert (own.index[:, 0] != own.index[:, 1]).all()
        torch.testing.assert_close(own.gate_prob, torch.full((6, 2), 1 / 8))


def test_pop_needs_a_forward_and_the_hooks_go_away(tmp_path: Path) -> None:
    model = load_model(seeded_checkpoint(tmp_path / "model"))
    with record_routing(model) as recorder:
        with pytest.raises(RuntimeError, match="0 of 3 routers ran"):
            recorder.pop()
        with torch.inference_mode():
            model(torch.arange(4)[None])
        assert len(recorder.pop()) == 3
        with pytest.raises(RuntimeError):
            recorder.pop()  # popped means forgotten
    assert all(not layer.router._forward_hooks for layer in moe_layers(model))


def dropping(router, experts: int, dropped: torch.Tensor):
    """Make a router's forward send the picks where `dropped` [T, k] to no expert, as one over capacity does."""
    own = router.forward

    def forward(hidden: torch.Tensor):
        logits, weight, index = own(hidden)
        return logits, weight, index.masked_fill(dropped, experts)

    router.forward = forward


def test_picks_that_reach_no_expert(tmp_path: Path) -> None:
    """They keep the router's choice and its strength, weigh nothing, add nothing, and are no load."""
    model = load_model(seeded_checkpoint(tmp_path / "model"))
    ids = torch.randint(0, 300, (1, 6), generator=torch.Generator().manual_seed(0))
    plain, inputs = recorded_and_inputs(model, ids)
    layer = moe_layers(model)[0]
    dropped = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 0], [0, 1]], dtype=torch.bool)
    dropping(layer.router, 8, dropped)
    routing, again = recorded_and_inputs(model, ids)
    assert torch.equal(inputs[0], again[0])
    own, before = routing[0], plain[0]
    assert torch.equal(own.routed, ~dropped) and all(other.routed.all() for other in routing[1:])
    assert torch.equal(own.index, before.index) and torch.equal(own.gate_prob, before.gate_prob)
    assert torch.equal(own.weight, before.weight * ~dropped)
    assert torch.equal(own.reached(8), before.index.masked_fill(dropped, 8))
    with torch.inference_mode():
        output = layer.experts.module(inputs[0], own.reached(8), before.weight)
        torch.testing.assert_close(output, layer.experts.module(inputs[0], before.index, own.weight))
        assert not output[1].any()
    with measure_expert_inputs(model) as measured, torch.inference_mode():
        model(ids)
    assert measured[0].load.tolist() == torch.bincount(own.index[own.routed], minlength=8).tolist()
    kept = torch.zeros(6, 8).scatter(1, own.index, own.routed.float())  # [T, E]
    torch.testing.assert_close(
        torch.from_numpy(measured[0].squares()["up_proj"]).float(), kept.T @ inputs[0].square()
    )
