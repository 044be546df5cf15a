"""Switch Transformers behind the experts protocol: what its own classes compute, drops included."""

import numpy as np
import pytest
import torch
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.experts import run_experts
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import install_physical_experts, model_hash, physical_load
from tasks.moe.switch import SWITCH, SwitchExperts
from tests.seeded_models import VOCABULARY, seeded_checkpoint

PHYSICAL = [*range(8), 2, 5, 5]


@pytest.fixture()
def model(tmp_path):
    return load_model(seeded_checkpoint(tmp_path / "switch", "switch_transformers"))


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in (70, 9, 41)]


def test_a_dropped_token_by_hand():
    """Two experts of capacity 1; tokens 0 and 1 choose expert 0, token 2 expert 1: token 1 finds expert 0 full."""
    config = SwitchTransformersConfig(d_model=2, d_ff=2, num_experts=2, expert_capacity=1)
    block = SwitchTransformersSparseMLP(config).eval()
    block.router.classifier.weight.data = torch.eye(2)  # logits are the hidden states
    for number, expert in enumerate(block.experts.values()):
        expert.wi.weight.data = torch.eye(2)
        expert.wo.weight.data = torch.eye(2) * (number + 1)
    hidden = torch.tensor([[[1.0, 0], [3, 0], [0, 1]]])
    seen = []
    experts = SwitchExperts(block.experts, "experts", SWITCH.matrices, SWITCH.activation)

    def keep(*entered):
        seen.append(entered)
        return run_experts(experts, *entered)

    with torch.no_grad():
        plain = block(hidden)
        experts.install(keep)
        ours = block(hidden)
        experts.install(None)
        assert torch.equal(block(hidden), plain)
    _, index, weight = seen[0]
    assert index.tolist() == [[0], [2], [1]]  # 2: no expert
    probability = 1 / (1 + np.exp(-1))  # of 1 against 0: 0.73106
    np.testing.assert_allclose(weight[:, 0], [probability, 0, probability], rtol=1e-6)
    # relu of the hidden state, once and doubled, times the probability; nothing for the token that was dropped.
    expected = torch.tensor([[[probability, 0], [0, 0], [0, 2 * probability]]], dtype=torch.float32)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours, plain)


def test_layers_are_the_encoders_then_the_decoders(model):
    layers = moe_layers(model)
    # Blocks 1 and 3 of the encoder's 4, then block 1 of the decoder's 2: numbers go on through the stacks.
    assert [layer.layer for layer in layers] == [1, 3, 5]
    keys = [layer.key(6, "down_proj") for layer in layers]
    assert keys == [
        "encoder.block.1.layer.1.mlp.experts.expert_6.wo",
        "encoder.block.3.layer.1.mlp.experts.expert_6.wo",
        "decoder.block.1.layer.2.mlp.experts.expert_6.wo",
    ]
    for layer in layers:
        views = layer.matrices()
        assert list(views) == ["up_proj", "down_proj"]
        views["up_proj"][3].fill_(0.5)
        assert (model.get_parameter(layer.key(3, "up_proj") + ".weight") == 0.5).all()


def hidden_states(model, sequences, batch_tokens=10_000):
    batches = list(prefill(model, sequences, batch_tokens, "test"))
    return [
        batch.hidden[at] for row in range(len(sequences)) for batch in batches
        for at, own in enumerate(batch.rows) if own == row
    ]  # fmt: skip


@pytest.mark.parametrize("dispatch", ["round_robin", "random"])
def test_replicas_keep_the_output_and_the_drops(model, sequences, dispatch):
    with measure_expert_inputs(model) as inputs:
        before = hidden_states(model, sequences)
    layers = [LayerPlan(layer.layer, PHYSICAL, [0] * len(PHYSICAL)) for layer in moe_layers(model)]
    install_physical_experts(model, ReplicationPlan(model_hash(model), 32, dispatch, 0, layers), {})
    after = hidden_states(model, sequences)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for own, load in zip(inputs, physical_load(model), strict=True):
        assert np.bincount(PHYSICAL, weights=load).tolist() == own.load.tolist()
    assert (sum(physical_load(model))[[2, 8, 5, 9, 10]] > 0).all()  # every copy computes somewhere


def test_dispatch_does_not_depend_on_the_batch(model, sequences):
    layers = [LayerPlan(layer.layer, PHYSICAL, [0] * len(PHYSICAL)) for layer in moe_layers(model)]
    install_physical_experts(model, ReplicationPlan(model_hash(model), 32, "random", 0, layers), {})
    hidden_states(model, sequences)
    together = physical_load(model)
    hidden_states(model, sequences, batch_tokens=1)
    alone = [now - first for now, first in zip(physical_load(model), together, strict=True)]
    assert [load.tolist() for load in alone] == [load.tolist() for load in together]


def test_generation_runs_through_replicas_as_through_the_model(model, sequences):
    """The encoder once, then the decoder with its cache, one token a time."""
    ids = torch.tensor([sequences[0][:30]])
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(ids),
    }
    before = model.generate(ids, **options)
    layers = [LayerPlan(layer.layer, PHYSICAL, [0] * len(PHYSICAL)) for layer in moe_layers(model)]
    install_physical_experts(model, ReplicationPlan(model_hash(model), 32, "round_robin", 0, layers), {})
    assert torch.equal(model.generate(ids, **options), before)
    encoder, _, decoder = physical_load(model)
    assert encoder.sum() <= 30 and decoder.sum() == 6  # one position a call: nothing is over capacity


def test_experts_of_other_parts_are_an_error():
    block = SwitchTransformersSparseMLP(SwitchTransformersConfig(d_model=4, d_ff=4, num_experts=2))
    block.experts["expert_1"].wi = torch.nn.Identity()
    with pytest.raises(
        InputError, match=r"experts\[1\] \(SwitchTransformersDenseActDense\): has no Linear 'wi'"
    ):
        SWITCH.adapt(block.experts, "experts", SWITCH)
