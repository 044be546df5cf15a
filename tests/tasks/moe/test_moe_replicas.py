import copy

import numpy as np
import pytest
import torch

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import head_logits, prefill
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import (
    install_physical_experts,
    model_hash,
    physical_experts,
    physical_load,
    reset_physical_load,
)
from tests.seeded_models import VOCABULARY, seeded_checkpoint

EXPERTS, TOP_K = 8, 2
LENGTHS = [17, 5, 1, 40, 23, 23, 9, 31, 2, 12]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("reference"), "qwen2_moe"))


@pytest.fixture
def model(reference):
    return copy.deepcopy(reference)


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in LENGTHS]


def plan_for(model, replicas=(3, 5, 3), dispatch="round_robin", bits=0, **changes):
    """Experts 3 (twice) and 5 get replicas in every MoE layer."""
    plan = ReplicationPlan(
        model_hash(model), 32, dispatch, 0,
        [LayerPlan(layer.layer, [*range(EXPERTS), *replicas], [0] * EXPERTS + [bits] * len(replicas))
         for layer in moe_layers(model)],
    )  # fmt: skip
    return ReplicationPlan(**{**plan.__dict__, **changes})


def one(experts, expert, hidden):
    return experts.output(expert, experts.inner(expert, hidden))


def logits(model, sequences, batch_tokens=10_000):
    found = {}
    for batch in prefill(model, sequences, batch_tokens, "test"):
        for place, row in enumerate(batch.rows):
            found[row] = head_logits(model, batch.hidden[place, : len(sequences[row])])
    return torch.cat([found[row] for row in range(len(sequences))])


@pytest.mark.parametrize("dispatch", ["round_robin", "random"])
def test_unquantized_replicas_leave_the_logits(reference, model, sequences, dispatch):
    """Sums run in the plain model's order; a matrix product of fewer rows may differ in its last bits."""
    install_physical_experts(model, plan_for(model, dispatch=dispatch), {})
    torch.testing.assert_close(logits(model, sequences), logits(reference, sequences), rtol=0, atol=1e-4)
    assert all(load[EXPERTS:].min() > 0 for load in physical_load(model))  # and the replicas did take part


def test_without_replicas_the_logits_are_equal_bit_for_bit(reference, model, sequences):
    install_physical_experts(model, plan_for(model, replicas=()), {})
    assert torch.equal(logits(model, sequences), logits(reference, sequences))


@pytest.mark.parametrize("dispatch", ["round_robin", "random"])
def test_batching_changes_no_decision(model, sequences, dispatch):
    install_physical_experts(model, plan_for(model, dispatch=dispatch), {})
    results = []
    for batch_size in (1, 2, 8):  # at least so many sequences a batch
        batch_tokens = batch_size * max(LENGTHS) if batch_size > 1 else 1
        reset_physical_load(model)
        results.append((logits(model, sequences, batch_tokens), np.stack(physical_load(model))))
    for other, load in results[1:]:
        assert (load == results[0][1]).all()
        torch.testing.assert_close(other, results[0][0], rtol=0, atol=1e-4)


def test_counts_are_the_real_tokens_times_k(model, sequences):
    install_physical_experts(model, plan_for(model), {})
    routed = np.zeros((2, EXPERTS), dtype=int)
    for batch in prefill(model, sequences, 200, "test", record=True):
        for position, routing in enumerate(batch.routing):
            routed[position] += np.bincount(routing.index[batch.mask].reshape(-1), minlength=EXPERTS)
    for position, load in enumerate(physical_load(model)):
        assert load.sum() == sum(LENGTHS) * TOP_K
        logical = np.bincount([*range(EXPERTS), 3, 5, 3], weights=load, minlength=EXPERTS)
        assert (logical == routed[position]).all()


def test_a_physical_expert_computes_with_its_own_stored_weights_bit_for_bit(model):
    """The replica has weights of its own: its tokens get their output, the others the original's."""
    stored = {0: {EXPERTS: {name: view[3] * 3 for name, view in moe_layers(model)[0].matrices().items()}}}
    plain = moe_layers(copy.deepcopy(model))[0].experts
    install_physical_experts(model, plan_for(model, replicas=(3,)), stored)
    layer, physical = moe_layers(model)[0], physical_experts(model)[0]
    assert torch.equal(physical.matrices()["up_proj"][EXPERTS], stored[0][EXPERTS]["up_proj"])
    assert torch.equal(layer.matrices()["up_proj"], physical.matrices()["up_proj"][:EXPERTS])

    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    index, weight = torch.full((6, 1), 3), torch.ones(6, 1)
    ids = torch.arange(2, 8)[None]
    with torch.inference_mode():
        model.base_model(input_ids=ids)  # tells which request the six tokens belong to
        chosen = physical.choose(index.numpy(), physical._watch.latest)[:, 0]
        output = layer.experts.module(hidden, index, weight)
        assert sorted(set(chosen)) == [3, EXPERTS]
        for expert in (3, EXPERTS):
            own = torch.from_numpy(chosen == expert)
            assert torch.equal(output[own], one(physical.experts, expert, hidden[own]))
        own = torch.from_numpy(chosen == 3)
        assert torch.equal(output[own], one(plain, 3, hidden[own]))
        own = ~own
        assert not torch.allclose(output[own], one(plain, 3, hidden[own]))


@pytest.mark.parametrize("dispatch", ["round_robin", "random"])
def test_generation_with_a_cache_dispatches_as_each_row_alone(model, sequences, dispatch):
    """Left padding, several rows and cached steps: each row generates what it generates alone."""
    stored = {position: {EXPERTS: {name: view[3] * 0.5 for name, view in layer.matrices().items()}}
              for position, layer in enumerate(moe_layers(model))}  # fmt: skip
    install_physical_experts(model, plan_for(model, replicas=(3,), dispatch=dispatch), stored)
    prompts = [sequences[1], sequences[6]]
    width = max(map(len, prompts))
    ids = torch.tensor([[1] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    reset_physical_load(model)
    together = model.generate(ids, attention_mask=mask, **options)[:, width:]
    load = np.stack(physical_load(model))
    assert load.sum(axis=1).tolist() == [(sum(map(len, prompts)) + 2 * 7) * TOP_K] * 2
    reset_physical_load(model)
    for row, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert alone.tolist() == together[row].tolist()
    assert (np.stack(physical_load(model)) == load).all()


def test_a_cached_step_continues_its_request_and_positions(model, sequences):
    install_physical_experts(model, plan_for(model), {})
    ids = torch.tensor([sequences[0]])
    watch = physical_experts(model)[0]._watch
    with torch.inference_mode():
        whole = model(ids).logits
        first = model(ids[:, :10], use_cache=True)
        prompt_key = watch.latest.request[0]
        second = model(ids[:, 10:], cache=first.cache, use_cache=True)
    assert watch.latest.position.tolist() == list(range(10, 17))
    assert set(watch.latest.request) == {prompt_key}
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole, rtol=0, atol=1e-4)


def test_a_cached_step_with_other_rows_is_refused(model, sequences):
    install_physical_experts(model, plan_for(model), {})
    ids = torch.tensor([sequences[0]])
    with torch.inference_mode(), pytest.raises(InputError, match="2 rows, but the cache was filled with 1"):
        model(ids.repeat(2, 1), cache=model(ids, use_cache=True).cache, use_cache=True)


def test_a_plan_for_another_model_is_refused(model, tmp_path):
    other = load_model(seeded_checkpoint(tmp_path / "other", "qwen2_moe", num_experts=4))
    with pytest.raises(InputError, match="another model"):
        install_physical_experts(model, plan_for(other, replicas=()), {})


def test_a_plan_that_leaves_out_an_expert_is_refused(model):
    layers = [LayerPlan(layer.layer, [*range(7), 0], [0] * 8) for layer in moe_layers(model)]
    with pytest.raises(InputError, match="does not list its 8 experts first"):
        install_physical_experts(model, plan_for(model, layers=layers), {})


def test_an_unknown_dispatch_rule_is_refused(model):
    with pytest.raises(InputError, match="dispatch is 'nearest', expected one of"):
        install_physical_experts(model, plan_for(model, dispatch="nearest"), {})


def test_a_pick_without_an_expert_has_no_physical_one(model):
    """Expert number 8 of 8 is none: nothing computed, nothing counted."""
    install_physical_experts(model, plan_for(model), {})
    layer, physical = moe_layers(model)[0], physical_experts(model)[0]
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    index, weight = torch.tensor([[3, EXPERTS], [EXPERTS, EXPERTS], [3, 5]]), torch.ones(3, 2)
    with torch.inference_mode():
        model.base_model(input_ids=torch.arange(2, 5)[None])
        reset_physical_load(model)
        output = layer.experts.module(hidden, index, weight)
        torch.testing.assert_close(output[:1], one(layer.experts, 3, hidden[:1]))
        both = one(layer.experts, 3, hidden[2:]) + one(layer.experts, 5, hidden[2:])
        torch.testing.assert_close(output[2:], both)
    assert not output[1].any() and physical.load.sum() == 3
    chosen = physical.choose(index.numpy(), physical._watch.latest)
    assert (chosen[index.numpy() == EXPERTS] == -1).all() and (chosen[index.numpy() < EXPERTS] >= 0).all()


def test_a_copied_variant_has_weights_and_counts_of_its_own(model, sequences):
    install_physical_experts(model, plan_for(model), {})
    before = logits(model, sequences)
    load = np.stack(physical_load(model))
    duplicate = copy.deepcopy(model)
    for physical in physical_experts(duplicate):
        physical.matrices()["down_proj"].zero_()
    assert not torch.allclose(logits(duplicate, sequences), before)
    assert (np.stack(physical_load(model)) == load).all()
    assert torch.equal(logits(model, sequences), before)
