"""Every fused family: where its layers are, what its router does, its experts, against computations by hand."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.experts import run_experts
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.prefill import head_logits, prefill
from tasks.moe.record import record_routing
from tasks.moe.registry import FAMILIES, moe_layers
from tasks.moe.replicas import install_physical_experts, model_hash, physical_experts, physical_load
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors
from tasks.prepare_reference import describe
from tests.seeded_models import VOCABULARY, seeded_checkpoint

FUSED = [
    "qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
]  # fmt: skip
MOE_LAYERS = {"qwen2_moe": [1, 2], "deepseek_v2": [1, 2], "deepseek_v3": [1, 2]}
KEYS = {
    "mixtral": (
        "model.layers.2.block_sparse_moe.experts.7.w2",
        "model.layers.2.block_sparse_moe.experts.7.w2.weight",
    ),
    "gpt_oss": ("model.layers.2.mlp.experts.7.down_proj", "model.layers.2.mlp.experts.down_proj"),
    "granitemoe": (
        "model.layers.2.block_sparse_moe.experts.7.down_proj",
        "model.layers.2.block_sparse_moe.output_linear.weight",
    ),
}


@pytest.fixture(scope="module", params=FUSED)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return seeded_checkpoint(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def reference(folder):
    return load_model(folder)


@pytest.fixture
def model(reference):
    return copy.deepcopy(reference)


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 30, 2, 17)]


def test_every_fused_family_is_in_the_table():
    assert set(FUSED) <= set(FAMILIES)


def test_layers_and_keys(family, reference, folder):
    layers, source = moe_layers(reference), CheckpointTensors(folder)
    assert [layer.layer for layer in layers] == MOE_LAYERS.get(family, [0, 1, 2])
    pattern = FAMILIES[family].pattern()
    named = set()
    for layer, own in zip(layers, stored_layers(reference, source), strict=True):
        read = {matrix.name: matrix.read(folder, slice(0, 8)) for matrix in own.matrices}
        assert (layer.num_experts, layer.top_k, layer.router_temperature) == (8, 2, 1.0)
        assert layer.router_rows().shape == (8, 64)
        assert reference.get_submodule(layer.name).experts is layer.experts.module
        for matrix, view in layer.matrices().items():
            assert view.shape == ((8, 64, 32) if matrix == "down_proj" else (8, 32, 64))
            assert all(re.fullmatch(pattern, key) for key in layer.keys(matrix))
            assert torch.equal(read[matrix], view)  # the checkpoint's own tensors
            named |= set(layer.tensors(matrix))
    expected = "model.layers.2.mlp.experts.7.down_proj"
    key, tensor = KEYS.get(family, (expected, f"{expected}.weight"))
    assert layers[-1].keys("down_proj")[7] == key and layers[-1].tensors("down_proj")[-1] == tensor
    # Nothing else in the checkpoint is a routed expert's matrix; biases stay outside.
    assert named <= set(source.files)
    rest = [name for name in source.files if name not in named]
    expertlike = [name for name in rest if re.search(r"\.experts?\.|_linear", name)]
    assert [name for name in expertlike if not name.endswith("_bias")] == []
    assert not any(re.fullmatch(pattern, name.removesuffix(".weight")) for name in rest)


def test_a_reference_is_described_from_its_own_tensors(family, folder, reference):
    described = describe(folder)
    layers = len(moe_layers(reference))
    assert described["expert_parameters"] == layers * 8 * 3 * 32 * 64 and described["stored_bits"] == 32
    assert (described["moe_layers"], described["experts"], described["top_k"]) == (layers, 8, 2)


def test_parameters_are_the_matrices_and_nothing_else(reference):
    for layer in moe_layers(reference):
        elements = sum(view.numel() for view in layer.matrices().values())
        assert sum(parameter.numel() for parameter in layer.experts.parameters()) == elements
        own = {id(parameter) for parameter in reference.parameters()}
        assert {id(parameter) for parameter in layer.experts.parameters()} <= own


def expected_routing(family: str, config, router, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A router written by hand from the family's description: weights [T, E] (0 if not chosen), strength [T, E]."""
    logits = hidden @ router.weight.T + (router.bias if family == "gpt_oss" else 0.0)
    score = logits.sigmoid() if family == "deepseek_v3" else logits.softmax(-1)
    strength = score / score.sum(-1, keepdim=True)
    weights = torch.zeros_like(score)
    for token in range(len(hidden)):
        rank = score[token] + (router.e_score_correction_bias if family == "deepseek_v3" else 0.0)
        allowed = torch.ones(8, dtype=torch.bool)
        if family.startswith("deepseek"):  # 4 groups of 2 experts; the best 2 groups compete
            groups = rank.view(4, 2)
            best = groups.max(1).values if family == "deepseek_v2" else groups.sum(1)
            allowed = torch.isin(torch.arange(8) // 2, best.argsort(descending=True)[:2])
        chosen = torch.where(allowed, rank, -torch.inf).argsort(descending=True)[:2]
        own = score[token, chosen]
        if family in ("gpt_oss", "granitemoe"):
            own = logits[token, chosen].softmax(-1)  # over the selected alone
        elif family in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
            own = own / own.sum()
        if family.startswith("deepseek"):
            own = own * config.routed_scaling_factor
        weights[token, chosen] = own
    return weights, strength


def inputs_of(modules):
    """Hooks that keep the first argument of each module's latest call, and the list they fill."""
    kept: list[torch.Tensor | None] = [None] * len(modules)

    def keep(place):
        def hook(_module, given):
            kept[place] = given[0].detach().reshape(-1, given[0].shape[-1]).clone()

        return hook

    return [module.register_forward_pre_hook(keep(place)) for place, module in enumerate(modules)], kept


def test_recorded_routing_is_what_the_family_describes(family, model):
    layers = moe_layers(model)
    hooks, hidden = inputs_of([layer.router for layer in layers])
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with record_routing(model) as recorder, torch.inference_mode():
        model(ids)
        routing = recorder.pop()
    for hook in hooks:
        hook.remove()
    for layer, own, inputs in zip(layers, routing, hidden, strict=True):
        with torch.inference_mode():
            weights, strength = expected_routing(family, model.config, layer.router, inputs)
        assert own.index.shape == own.weight.shape == own.gate_prob.shape == own.routed.shape == (18, 2)
        assert own.routed.all() and torch.equal(own.reached(8), own.index)
        torch.testing.assert_close(torch.zeros(18, 8).scatter(1, own.index, own.weight), weights)
        assert (own.index[:, 0] != own.index[:, 1]).all()
        torch.testing.assert_close(own.gate_prob, strength.gather(1, own.index))
    assert not any(layer.experts.module._forward_pre_hooks for layer in layers)


def expert_by_hand(
    family: str, module, matrices, expert: int, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """inner and output of one expert on hidden [n, H] from its [out, in] matrices."""
    gate, up = (hidden @ matrices[name][expert].T for name in ("gate_proj", "up_proj"))
    if family == "gpt_oss":
        gate, up = gate + module.gate_up_proj_bias[expert, 0::2], up + module.gate_up_proj_bias[expert, 1::2]
        clipped, bounded = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
        inner = (bounded + 1) * clipped * torch.sigmoid(1.702 * clipped)
        return inner, inner @ matrices["down_proj"][expert].T + module.down_proj_bias[expert]
    inner = functional.silu(gate) * up
    return inner, inner @ matrices["down_proj"][expert].T


def test_an_expert_computes_what_its_matrices_say(family, reference):
    layer = moe_layers(reference)[-1]
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        for expert in (0, 5):
            inner, output = expert_by_hand(family, layer.experts.module, layer.matrices(), expert, hidden)
            torch.testing.assert_close(layer.experts.inner(expert, hidden), inner, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.experts.output(expert, inner), output, rtol=1e-5, atol=1e-5)
        if family == "gpt_oss":  # the clamp is reached, and biases are not zero
            gate = hidden @ layer.matrices()["gate_proj"][0].T
            assert (gate > 2.0).any() and layer.experts.module.down_proj_bias.abs().min() > 0


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_ours_equals_the_familys_own_forward(family, model, top_k):
    """The module's forward of transformers, run eagerly, on picks with an expert without tokens."""
    layer = moe_layers(model)[0]
    generator = torch.Generator().manual_seed(top_k)
    hidden, weight = torch.randn(11, 64, generator=generator), torch.rand(11, top_k, generator=generator)
    index = torch.rand(11, 8, generator=generator).argsort(1)[:, :top_k]
    if top_k < 8:
        index[index == 6] = index[0, 0]  # expert 6 has no tokens; a token may hold an expert twice
    with torch.inference_mode():
        ours = layer.experts.module(hidden, index, weight)
        assert model.config._experts_implementation == EXPERTS_IMPLEMENTATION
        torch.testing.assert_close(run_experts(layer.experts, hidden, index, weight), ours, rtol=0, atol=0)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(layer.experts.module(hidden, index, weight), ours, rtol=1e-5, atol=1e-5)


def all_hidden(model, sequences, batch_tokens=80):
    found = {}
    for batch in prefill(model, sequences, batch_tokens, "test"):
        for place, row in enumerate(batch.rows):
            found[row] = batch.hidden[place, : len(sequences[row])]
    return torch.cat([found[row] for row in range(len(sequences))])


def test_prefill_in_batches_equals_the_model_alone_logits_included(model, sequences):
    hidden = all_hidden(model, sequences)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])
        torch.testing.assert_close(head_logits(model, hidden), logits.float(), rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.1


def plan_of(model) -> ReplicationPlan:
    layers = [LayerPlan(layer.layer, [*range(8), 3, 5, 3], [0] * 11) for layer in moe_layers(model)]
    return ReplicationPlan(model_hash(model), 32, "round_robin", 0, layers)


def test_replicas_equal_their_source(family, reference, model, sequences):
    install_physical_experts(model, plan_of(model), {})
    torch.testing.assert_close(
        all_hidden(model, sequences), all_hidden(reference, sequences), rtol=1e-4, atol=1e-4
    )
    for layer, physical in zip(moe_layers(model), physical_experts(model), strict=True):
        hidden = torch.randn(5, 64)
        with torch.inference_mode():
            outputs = [physical.experts.output(e, physical.experts.inner(e, hidden)) for e in (3, 8, 10)]
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        for name, view in layer.matrices().items():  # the logical experts are stored once
            assert view.data_ptr() == physical.matrices()[name].data_ptr()
    for load in physical_load(model):
        assert load.sum() == sum(map(len, sequences)) * 2
    # A replica's own weights are used: with all of expert 3's copies changed, outputs change.
    before = all_hidden(model, sequences)
    for physical in physical_experts(model):
        physical.matrices()["down_proj"][[8, 10]] *= -1
    assert not torch.allclose(all_hidden(model, sequences), before, atol=1e-3)


def test_measured_inputs_equal_those_of_every_kept_input(family, model, sequences):
    layers = moe_layers(model)
    load = np.zeros((len(layers), 8), dtype=int)
    squares = [
        {name: np.zeros(view.shape[::2]) for name, view in layer.matrices().items()} for layer in layers
    ]

    def keep(place):
        layer = layers[place]
        views = layer.matrices()

        def hook(_module, given):
            hidden, index, _ = given
            for expert in range(8):
                rows = hidden[(index == expert).any(1)]
                inner, _ = expert_by_hand(family, layer.experts.module, views, expert, rows)
                load[place, expert] += len(rows)
                for name, value in (("gate_proj", rows), ("up_proj", rows), ("down_proj", inner)):
                    squares[place][name][expert] += value.double().square().sum(0).numpy()

        return hook

    hooks = [
        layer.experts.module.register_forward_pre_hook(keep(place)) for place, layer in enumerate(layers)
    ]
    for sequence in sequences:
        list(prefill(model, [sequence], 100, "kept"))
    for hook in hooks:
        hook.remove()
    with measure_expert_inputs(model) as inputs:
        list(prefill(model, sequences, 80, "measured"))  # batches with padding
    assert load.sum(axis=1).tolist() == [sum(map(len, sequences)) * 2] * len(layers)
    for place, own in enumerate(inputs):
        assert own.load.tolist() == load[place].tolist()
        for name, expected in squares[place].items():
            np.testing.assert_allclose(own.squares()[name], expected, rtol=1e-3)


def test_the_model_hash_is_of_shapes_not_of_values(reference, model):
    layers = moe_layers(model)
    layers[0].matrices()["down_proj"].zero_()
    assert model_hash(model) == model_hash(reference)
    layers[-1].router.top_k = 1
    assert model_hash(model) != model_hash(reference)


def test_hashes_of_families_differ(tmp_path_factory):
    models = [
        load_model(seeded_checkpoint(tmp_path_factory.mktemp(own), own)) for own in ("olmoe", "mixtral")
    ]
    assert model_hash(models[0]) != model_hash(models[1])


def test_ties_are_broken_alike_in_batches_and_alone(reference, model):
    for layer in moe_layers(model):
        layer.router_rows().zero_()  # all experts tie, for every token
    with record_routing(model) as recorder, torch.inference_mode():
        model(torch.arange(6)[None])
        alone = recorder.pop()
        model(torch.arange(6)[None].repeat(2, 1))
        together = recorder.pop()
    for one, both in zip(alone, together, strict=True):
        assert torch.equal(torch.cat([one.index, one.index]), both.index)
        assert (one.index[:, 0] != one.index[:, 1]).all()


def test_a_checkpoint_of_mxfp4_blocks_says_what_to_do(tmp_path: Path):
    """As GPT-OSS is published: packed values and scales in place of the experts' weights."""
    folder = seeded_checkpoint(tmp_path / "model", "gpt_oss")
    model = load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        for layer in moe_layers(model):
            own = f"{layer.name}.experts.{name}"
            experts, _, outputs = tensors.pop(own).shape
            tensors[f"{own}_blocks"] = torch.zeros(experts, outputs, 2, 16, dtype=torch.uint8)
            tensors[f"{own}_scales"] = torch.zeros(experts, outputs, 2, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"_(blocks|scales)'.*MXFP4 blocks.*Mxfp4Config\(dequantize=True\).*save_pretrained"
    for door in (load_model, describe, lambda own: stored_layers(model, CheckpointTensors(own))):
        with pytest.raises(InputError, match=message):
            door(folder)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_packed", "qweight"])
def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path, suffix: str):
    """DeepSeek-V3 is published in blocks of float8 with inverse scales beside them."""
    folder = seeded_checkpoint(tmp_path / "model", "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.0.down_proj.{suffix}"
    save_file({**tensors, name: torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    for door in (load_model, describe):
        with pytest.raises(InputError, match=rf"holds '{re.escape(name)}': it is quantized already"):
            door(folder)
