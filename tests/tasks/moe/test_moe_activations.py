import numpy as np
import pytest
import torch

from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tests.seeded_models import VOCABULARY, seeded_checkpoint


@pytest.fixture(scope="module", params=["qwen2_moe", "qwen3_moe"])
def model(request, tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 30, 2, 17)]


def test_sums_of_squares_equal_those_of_every_kept_input(model, sequences):
    """Against a plain loop: sequences alone, expert inputs kept, activations made anew from the weights."""
    layers = moe_layers(model)
    expected = [
        {name: np.zeros(view.shape[::2]) for name, view in layer.matrices().items()} for layer in layers
    ]
    load = np.zeros((len(layers), 8), dtype=int)

    def keep(position):
        views = layers[position].matrices()

        def hook(_module, inputs):
            hidden, index, _ = inputs
            for token, picks in zip(hidden, index, strict=True):
                for expert in picks.tolist():
                    gate, up = (views[name][expert] @ token for name in ("gate_proj", "up_proj"))
                    inner = torch.nn.functional.silu(gate) * up
                    load[position, expert] += 1
                    for name, value in (("gate_proj", token), ("up_proj", token), ("down_proj", inner)):
                        expected[position][name][expert] += value.double().numpy() ** 2

        return hook

    handles = [
        layer.experts.module.register_forward_pre_hook(keep(place)) for place, layer in enumerate(layers)
    ]
    for sequence in sequences:
        list(prefill(model, [sequence], 100, "kept"))
    for handle in handles:
        handle.remove()

    with measure_expert_inputs(model) as inputs:
        list(prefill(model, sequences, 80, "measured"))  # batches with padding
    assert load.sum(axis=1).tolist() == [sum(map(len, sequences)) * 2] * len(layers)
    for position, own in enumerate(inputs):
        assert own.load.tolist() == load[position].tolist()
        for name, squares in own.squares().items():
            np.testing.assert_allclose(squares, expected[position][name], rtol=1e-4)


def test_measuring_leaves_the_outputs_and_the_model(model, sequences):
    before = [dict(vars(layer.experts.module)) for layer in moe_layers(model)]

    def hidden():
        batches = list(prefill(model, sequences, 80, "hidden"))
        return torch.cat([batch.hidden[batch.mask] for batch in batches])

    plain = hidden()
    with measure_expert_inputs(model):
        torch.testing.assert_close(hidden(), plain, rtol=0, atol=1e-4)
    assert [dict(vars(layer.experts.module)) for layer in moe_layers(model)] == before
    assert torch.equal(hidden(), plain)
