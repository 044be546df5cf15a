import numpy as np
import pytest
import torch

from tasks.moe.checkpoint import load_model
from tasks.moe.hessians import HessianSums
from tasks.moe.layerwise import walk_layers
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tests.seeded_models import FAMILIES, VOCABULARY, seeded_checkpoint
from tests.seeded_native_models import ENCODER_DECODERS, NATIVE

ALL = [*FAMILIES, *NATIVE, *ENCODER_DECODERS]


@pytest.fixture(scope="module", params=ALL)
def checkpoint(request, tmp_path_factory):
    return seeded_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("hessians")))


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 21, 2, 12)]


def test_they_equal_a_plain_loop_over_tokens(checkpoint, sequences):
    """The loop: every sequence alone, token after token, with the routing that was recorded."""
    model = load_model(checkpoint)
    layers = moe_layers(model)
    inputs: dict[int, torch.Tensor] = {}

    def keep(position):
        def hook(_module, args, options):
            inputs[position] = layers[position].experts.entered(args, options)[0]

        return hook

    for position, layer in enumerate(layers):
        layer.experts.module.register_forward_pre_hook(keep(position), with_kwargs=True)
    routed = 0
    expected = [{} for _ in layers]  # per layer: (expert, "hidden" | "inner") -> sum of outer products
    tokens = np.zeros((len(layers), layers[0].num_experts), dtype=int)
    for sequence in sequences:
        (batch,) = prefill(model, [sequence], 1000, "alone", record=True)
        routed += batch.picks()[0]
        for position, layer in enumerate(layers):
            own = batch.routing[position]
            reached = own.reached(layer.num_experts)[batch.visited[position]]  # [n, k], no padding here
            for x, picks in zip(inputs[position], reached.tolist(), strict=True):
                for expert in picks:
                    if expert == layer.num_experts:
                        continue  # dropped
                    with torch.inference_mode():
                        inner = layer.experts.inner(expert, x[None])[0]
                    tokens[position, expert] += 1
                    for name, value in (("hidden", x.double()), ("inner", inner.double())):
                        at = (expert, name)
                        expected[position][at] = expected[position].get(at, 0) + torch.outer(value, value)

    # 24 tokens a batch: rows of 21, 12 + 9 and 2, so that one batch is padded
    steps = walk_layers(checkpoint, sequences, 24, "reference", "measured")
    for position, step in enumerate(steps):
        own = step.hessians()
        assert own["hidden"].tokens.tolist() == own["inner"].tokens.tolist() == tokens[position].tolist()
        for (expert, name), total in expected[position].items():
            scale = float(total.diagonal().mean())
            torch.testing.assert_close(own[name].total[expert].double(), total, rtol=1e-3, atol=1e-4 * scale)
    assert position == len(layers) - 1
    assert tokens.sum(axis=1).tolist() == routed.tolist()
    if not model.config.is_encoder_decoder:
        assert set(routed) == {sum(map(len, sequences)) * layers[0].top_k}


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "switch_transformers"])
def test_neither_batches_nor_their_padding_matter(family, sequences, tmp_path):
    checkpoint = seeded_checkpoint(tmp_path, family)
    alone, together = (
        [step.hessians() for step in walk_layers(checkpoint, sequences, size, "reference", "batches")]
        for size in (1, 1000)
    )
    for one, other in zip(alone, together, strict=True):
        for name in ("hidden", "inner"):
            assert torch.equal(one[name].tokens, other[name].tokens)
            torch.testing.assert_close(one[name].total, other[name].total, rtol=1e-3, atol=1e-3)


def test_experts_with_no_token_and_with_one(model):
    experts = moe_layers(model)[0].experts
    x, y = torch.zeros(64), torch.zeros(64)
    x[0], x[1], y[2] = 2.0, 3.0, 5.0
    sums = HessianSums(experts)
    none = experts.num_experts  # a dropped pick
    sums.add(torch.stack([x, y, x]), torch.tensor([[1, 2], [2, none], [none, none]]))
    hessians = sums.hessians()
    assert hessians["hidden"].tokens.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert not hessians["hidden"].total[0].any() and not hessians["inner"].total[0].any()
    assert torch.equal(hessians["hidden"].total[1], torch.outer(x, x))  # 4, 6; 6, 9
    assert hessians["hidden"].total[2, 2, 2] == 25 and hessians["hidden"].total[2, 0, 1] == 6
    with torch.inference_mode():
        inner = experts.inner(1, x[None])[0]
    torch.testing.assert_close(hessians["inner"].total[1], torch.outer(inner, inner))


def test_an_expert_picked_twice_by_a_token_counts_it_once(model):
    sums = HessianSums(moe_layers(model)[0].experts)
    sums.add(torch.ones(1, 64), torch.tensor([[3, 3]]))
    assert sums.hessians()["hidden"].tokens.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert (sums.hessians()["hidden"].total[3] == 1).all()


@pytest.mark.parametrize("family", ["qwen2_moe", "llama_moe"])
def test_threads_change_no_bit(family, sequences, tmp_path):
    checkpoint = seeded_checkpoint(tmp_path, family)

    def walk(threads):
        torch.set_num_threads(threads)
        return [step.hessians() for step in walk_layers(checkpoint, sequences, 24, "reference", "threads")]

    before = torch.get_num_threads()
    try:
        one, three = walk(1), walk(3)
    finally:
        torch.set_num_threads(before)
    for first, second in zip(one, three, strict=True):
        for name in ("hidden", "inner"):
            assert torch.equal(first[name].total, second[name].total)
