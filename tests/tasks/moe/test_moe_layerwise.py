import hashlib
import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.layerwise import HiddenStream, LayerStep, walk_layers
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tasks.quant.grid import Grid
from tasks.quant.methods import quantize
from tests.seeded_models import FAMILIES, VOCABULARY, seeded_checkpoint
from tests.seeded_native_models import ENCODER_DECODERS, NATIVE

DECODERS = [*FAMILIES, *NATIVE]
BATCH = 40


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """Family -> its seeded checkpoint."""
    return cache(lambda family: seeded_checkpoint(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def qwen(checkpoint_of):
    return checkpoint_of("qwen3_moe")


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 30, 2, 17)]


@pytest.fixture(autouse=True)
def one_thread():
    """The walk runs each batch on one thread; so must the prefill that it is compared with, to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def last_hidden(model, sequences):
    """[B, S, H] after the last decoder layer, before the final norm, of each batch of an ordinary prefill."""
    seen = []
    handle = model.base_model.layers[-1].register_forward_hook(
        lambda _module, _args, output: seen.append(output)
    )
    for _ in prefill(model, sequences, BATCH, "ordinary prefill"):
        pass
    handle.remove()
    return seen


def coarse(matrices):
    """The matrices of a layer at 2 bits, per channel."""
    grid = Grid(2, 0, True)
    return {name: quantize("rtn", matrix, grid).dequantize() for name, matrix in matrices.items()}


def write(layer, matrices):
    for name, matrix in matrices.items():
        layer.matrices()[name].copy_(matrix)


def held(model):
    """Names of the parameters that take memory."""
    return [name for name, parameter in model.named_parameters() if parameter.device.type != "meta"]


@pytest.mark.parametrize("family", DECODERS)
def test_hidden_states_are_those_of_a_prefill_and_one_layer_is_held(checkpoint_of, sequences, family):
    stream = HiddenStream(checkpoint_of(family), sequences, BATCH)
    model = stream.partial.model
    assert held(model) == []  # the embedding is freed
    for number in range(model.config.num_hidden_layers):
        with stream.layer(number) as layer:
            names = held(model)
            assert names and all(name.startswith(f"model.layers.{number}.") for name in names)
            assert layer is None or layer.layer == number
            stream.advance(number)
    assert held(model) == []
    loaded = load_model(checkpoint_of(family))
    moe_layers(loaded)  # experts in modules of their own move together here as there: the sums' order follows
    for own, expected in zip(stream.hidden, last_hidden(loaded, sequences), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("family", DECODERS)
def test_quantized_inputs_are_those_of_the_instance(checkpoint_of, sequences, family):
    """As inputs="quantized" works: measured, replaced, moved on; against a model whose experts were replaced."""
    instance = load_model(checkpoint_of(family))
    for layer in moe_layers(instance):
        write(layer, coarse(layer.matrices()))
    stream = HiddenStream(checkpoint_of(family), sequences, BATCH)
    for number in range(instance.config.num_hidden_layers):
        with stream.layer(number) as layer:
            if layer is not None:
                stream.measure(number, layer)
                step = LayerStep(layer, lambda: pytest.fail("measured"), "quantized")
                step.replace(coarse(step.matrices()))
            stream.advance(number)
    for own, expected in zip(stream.hidden, last_hidden(instance, sequences), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_the_walk_sees_the_inputs_that_were_asked_for(checkpoint_of, sequences, family, tmp_path):
    """Reference inputs do not care for replaced matrices; quantized ones are those of a checkpoint whose
    shallower layers were replaced."""

    def walk(folder, inputs, replace=None):
        found = []
        for step in walk_layers(folder, sequences, BATCH, inputs, inputs):
            assert step.layer.layer == layers[len(found)].layer
            found.append({name: own.total.clone() for name, own in step.hessians().items()})
            if replace is not None:
                step.replace(replace(step.matrices()))
        return found

    def equal(one, other):
        return all(torch.equal(one[name], other[name]) for name in ("hidden", "inner"))

    folder = checkpoint_of(family)
    model = load_model(folder)
    layers = moe_layers(model)
    reference, unmoved = walk(folder, "reference"), walk(folder, "quantized")
    ignored, moved = walk(folder, "reference", coarse), walk(folder, "quantized", coarse)
    assert len(reference) == len(layers) > 1
    for position in range(len(layers)):
        assert equal(reference[position], unmoved[position]) and equal(reference[position], ignored[position])
        assert equal(reference[position], moved[position]) == (position == 0)
    write(layers[0], coarse(layers[0].matrices()))
    model.save_pretrained(tmp_path)
    assert equal(walk(tmp_path, "reference")[1], moved[1])


def test_a_step_is_over_when_the_next_is_asked_for(qwen, sequences):
    steps = walk_layers(qwen, sequences, BATCH, "reference", "steps")
    first = next(steps)
    assert first.hessians()["hidden"].total.shape == (8, 64, 64)
    next(steps)
    with pytest.raises(RuntimeError, match="layer 0 was left"):
        first.hessians()
    assert first.matrices()["up_proj"].device.type == "meta"


def test_hessians_come_before_the_experts_are_replaced(qwen, sequences):
    steps = walk_layers(qwen, sequences, BATCH, "quantized", "late")
    step = next(steps)
    step.replace(coarse(step.matrices()))
    with pytest.raises(RuntimeError, match="layer 0 was left or replaced"):
        step.hessians()
    steps = walk_layers(qwen, sequences, BATCH, "quantized", "early")
    step = next(steps)
    before = step.hessians()["inner"].total.clone()
    step.replace(coarse(step.matrices()))
    assert torch.equal(step.hessians()["inner"].total, before)
    step.leave()
    with pytest.raises(RuntimeError, match="gone"):
        step.hessians()


def test_replacing_never_writes_to_the_checkpoint(qwen, sequences):
    """A float32 checkpoint is mapped, not copied."""
    file = qwen / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    for step in walk_layers(qwen, sequences, BATCH, "quantized", "replaced"):
        step.replace({name: torch.zeros_like(matrix) for name, matrix in step.matrices().items()})
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


def test_a_matrix_that_does_not_fit(qwen, sequences):
    steps = walk_layers(qwen, sequences, BATCH, "quantized", "misfit")
    step = next(steps)
    with pytest.raises(
        InputError, match=r"layer 0: 'up_proj' \[8, 64, 32\]: expected one of .*\[8, 32, 64\]"
    ):
        step.replace({"up_proj": torch.zeros(8, 64, 32)})
    with pytest.raises(InputError, match="'side_proj'"):
        step.replace({"side_proj": torch.zeros(8, 32, 64)})


@pytest.mark.parametrize(
    ("given", "inputs", "message"),
    [
        ([[1, 2]], "mixed", "calibration: inputs is 'mixed', expected one of"),
        ([], "reference", "calibration: there are no calibration sequences"),
        ([[1], []], "reference", "calibration: sequence 1 is empty"),
    ],
)
def test_input_that_cannot_be_walked(qwen, given, inputs, message):
    with pytest.raises(InputError, match=message):
        walk_layers(qwen, given, BATCH, inputs, "calibration")


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape(qwen, sequences, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    name = "model.layers.1.self_attn.q_proj.weight"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"1 missing \({name}\)"):
        list(walk_layers(tmp_path, sequences, BATCH, "reference", "lacking"))
    save_file({**without, name: tensors[name][:, :32].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"1 of another shape .*{name}"):
        list(walk_layers(tmp_path, sequences, BATCH, "reference", "other shape"))


def test_experts_that_are_not_finite(qwen, sequences, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"'{name}' holds NaN"):
        list(walk_layers(tmp_path, sequences, BATCH, "reference", "broken"))


def test_shards_are_read_as_one_file_is(qwen, sequences, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole, sharded = (
        [
            step.hessians()["inner"].total
            for step in walk_layers(folder, sequences, BATCH, "reference", "shards")
        ]
        for folder in (qwen, tmp_path)
    )
    assert all(torch.equal(one, other) for one, other in zip(whole, sharded, strict=True))
