"""LLaMA-MoE and DeepSeek-MoE: against computations written out here, and against families that they coincide with."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tasks import prepare_reference
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model, skeleton
from tasks.moe.native.deepseek import DeepseekConfig, DeepseekForCausalLM
from tasks.moe.native.llama_moe import LlamaMoEConfig, LlamaMoEForCausalLM, LlamaMoEGate
from tasks.moe.registry import moe_layers
from tasks.params import check_params
from tests.seeded_models import seeded_checkpoint
from tests.tiny_run import small_params

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA = {"intermediate_size": 64, "num_experts": 4, "num_selects": 2}
DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "num_hidden_layers": 3,
}
IDS = torch.arange(3, 43).reshape(2, 20)


def made(model_class, config):
    """A model with every weight drawn anew, gates included."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def swiglu(hidden, gate, up, down):
    return (functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T


# --- LLaMA-MoE ----------------------------------------------------------------------------------------------------


def test_a_gate_by_hand():
    """W1 = ((1, 0), (0, 1), (1, 1)), tanh, W2 = diag(1, 2, 3); x = (1, -1): W1 x = (1, -1, 0), tanh = (t, -t, 0)
    with t = 0.76159; logits (t, -2 t, 0). The best two are experts 0 and 2, with softmax over (t, 0):
    1 / (1 + exp(-t)) = 0.68170 and 0.31830; times the scale factor 4: 2.72679 and 1.27321."""
    config = LlamaMoEConfig(
        **{**SMALL, "hidden_size": 2, "num_attention_heads": 1},
        num_experts=3, num_selects=2, size_experts=[8, 8, 8], score_scale_factor=4.0,
    )  # fmt: skip
    gate = LlamaMoEGate(config, 0)
    gate.gate_network[0].weight.data = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    gate.gate_network[2].weight.data = torch.diag(torch.tensor([1.0, 2, 3]))
    _, weight, index = gate(torch.tensor([[1.0, -1]]))
    assert index.tolist() == [[0, 2]]
    torch.testing.assert_close(weight, torch.tensor([[2.72679, 1.27321]]), rtol=0, atol=1e-5)
    # One row per expert: W2 W1 = ((1, 0), (0, 2), (3, 3)).
    assert gate.rows().tolist() == [[1, 0], [0, 2], [3, 3]]


@pytest.mark.parametrize("network", ["mlp", "linear"])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("multiply", [True, False])
def test_a_llama_moe_block_is_what_the_formula_says(network, softmax, multiply):
    config = LlamaMoEConfig(
        **SMALL, **LLAMA, gate_network=network, gate_use_softmax=softmax, multiply_gate_scores=multiply,
        score_scale_factor=[3.0, 5.0],
    )  # fmt: skip
    block = made(LlamaMoEForCausalLM, config).model.layers[1].mlp
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    names = dict(block.named_parameters())
    if network == "mlp":
        scores = torch.tanh(hidden @ names["gate.gate_network.0.weight"].T)
        scores = scores @ names["gate.gate_network.2.weight"].T
    else:
        scores = hidden @ names["gate.gate_network.weight"].T
    expected = torch.zeros(6, 32)
    for token in range(6):
        best = sorted(range(4), key=lambda expert: -scores[token, expert].item())[:2]
        chosen = torch.stack([scores[token, expert] for expert in best])
        chosen = chosen.exp() / chosen.exp().sum() if softmax else chosen
        for expert, score in zip(best, chosen, strict=True):
            own = [
                names[f"calculator.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            ]
            expected[token] += swiglu(hidden[token], *own) * (5.0 * score if multiply else 1.0)
    with torch.no_grad():
        torch.testing.assert_close(block(hidden[None])[0], expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_linear_gate_makes_it_mixtral():
    """Softmax over the selected logits equals Mixtral's softmax over all, divided by the sum of the selected."""
    ours = made(LlamaMoEForCausalLM, LlamaMoEConfig(**SMALL, **LLAMA, gate_network="linear"))
    shape = {**SMALL, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = MixtralForCausalLM(
        MixtralConfig(**shape, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0)
    ).eval()
    state = {
        name: tensor
        for name, tensor in ours.state_dict().items()
        if "calculator" not in name and "weight_noise" not in name
    }
    state = {name.replace("gate.gate_network", "gate"): tensor for name, tensor in state.items()}
    for number, layer in enumerate(ours.model.layers):
        experts = layer.mlp.calculator.experts
        gate_up = [torch.cat([own.gate_proj.weight, own.up_proj.weight]) for own in experts]
        state[f"model.layers.{number}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        down = torch.stack([own.down_proj.weight for own in experts])
        state[f"model.layers.{number}.mlp.experts.down_proj"] = down
    theirs.load_state_dict(state)
    theirs.set_experts_implementation("eager")
    assert logits(ours).std() > 0.1
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size_experts": [16, 16, 24, 8]}, r"different widths, \[8, 16, 24\]: expected one width per layer"),
        ({"size_experts": [[16] * 4, [8, 24, 16, 16]]}, "layer 1 experts of different widths"),
        ({"size_experts": [16, 16]}, "lists 2 experts in layer 0, num_experts is 4"),
        ({"intermediate_size": 63}, "intermediate_size 63 is not divisible by num_experts 4"),
        ({"gate_type": "SwitchBalancedGate"}, "gate_type is 'SwitchBalancedGate', expected one of"),
        ({"gate_network": "cosine"}, "gate_network is 'cosine', expected one of"),
        ({"calculator_type": "SwitchDropTokenCalculator"}, "calculator_type is"),
        ({"add_weight_norm": True}, "add_weight_norm is True"),
    ],
)
def test_what_llama_moe_does_not_compute_is_an_error(settings, message):
    with pytest.raises(InputError, match=message), torch.device("meta"):
        LlamaMoEForCausalLM(LlamaMoEConfig(**{**SMALL, **LLAMA, **settings}))


@pytest.mark.parametrize("sizes", [[16] * 4, [[16] * 4] * 2])
def test_equal_widths_may_be_listed(sizes):
    listed = made(LlamaMoEForCausalLM, LlamaMoEConfig(**SMALL, **LLAMA, size_experts=sizes))
    assert torch.equal(logits(listed), logits(made(LlamaMoEForCausalLM, LlamaMoEConfig(**SMALL, **LLAMA))))


# --- DeepSeek-MoE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [True, False])
def test_a_deepseek_block_is_what_the_formula_says(normalised):
    config = DeepseekConfig(**{**SMALL, **DEEPSEEK}, norm_topk_prob=normalised)
    block = made(DeepseekForCausalLM, config).model.layers[2].mlp
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    names = dict(block.named_parameters())
    expected = swiglu(
        hidden, *(names[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    )
    for token in range(6):
        probabilities = (hidden[token] @ names["gate.weight"].T).softmax(0)
        best = sorted(range(4), key=lambda expert: -probabilities[expert].item())[:2]
        total = sum(probabilities[expert] for expert in best) if normalised else 1.0
        for expert in best:
            own = [names[f"experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            expected[token] = expected[token] + swiglu(hidden[token], *own) * probabilities[expert] / total
    with torch.no_grad():
        torch.testing.assert_close(block(hidden[None])[0], expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
def test_deepseek_is_qwen2_moe_with_a_gate_of_one_half(normalised):
    """Qwen2-MoE multiplies its shared expert by sigmoid(w x); with w = 0 that is 1/2, made good by a doubled
    down_proj. Its attention has biases, here 0."""
    ours = made(DeepseekForCausalLM, DeepseekConfig(**{**SMALL, **DEEPSEEK}, norm_topk_prob=normalised))
    shape = {
        **SMALL, "num_hidden_layers": 3, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0],
        "norm_topk_prob": normalised, "num_key_value_heads": 4, "rope_theta": 10000.0,
    }  # fmt: skip
    theirs = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape)).eval()
    state = dict(ours.state_dict())
    for name in [name for name in state if "shared_experts" in name]:
        doubled = state.pop(name) * (2 if "down_proj" in name else 1)
        state[name.replace("shared_experts", "shared_expert")] = doubled
    for number, layer in enumerate(ours.model.layers):
        path = f"model.layers.{number}"
        for part in ("q", "k", "v"):
            state[f"{path}.self_attn.{part}_proj.bias"] = torch.zeros(32)
        if number:
            experts = layer.mlp.experts
            for name in [name for name in state if f"{path}.mlp.experts" in name]:
                del state[name]
            gate_up = [torch.cat([own.gate_proj.weight, own.up_proj.weight]) for own in experts]
            state[f"{path}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
            state[f"{path}.mlp.experts.down_proj"] = torch.stack([own.down_proj.weight for own in experts])
            state[f"{path}.mlp.shared_expert_gate.weight"] = torch.zeros(1, 32)
    theirs.load_state_dict(state)
    theirs.set_experts_implementation("eager")
    assert logits(ours).std() > 0.1
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_which_deepseek_layers_have_experts():
    config = DeepseekConfig(
        **{**SMALL, **DEEPSEEK, "num_hidden_layers": 6}, first_k_dense_replace=2, moe_layer_freq=2
    )
    with torch.device("meta"):
        model = DeepseekForCausalLM(config)
    assert [layer.layer for layer in moe_layers(model)] == [2, 4]  # not before 2, then every second


def test_another_scoring_function_is_an_error():
    with pytest.raises(InputError, match="scoring_func is 'sigmoid', expected 'softmax'"):
        DeepseekForCausalLM(DeepseekConfig(**{**SMALL, **DEEPSEEK}, scoring_func="sigmoid"))


# --- checkpoints as they were published ----------------------------------------------------------------------------

PUBLISHED = {
    "llama_moe": {
        "architectures": ["LlamaMoEForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_llama_moe.LlamaMoEConfig",
            "AutoModelForCausalLM": "modeling_llama_moe_hf.LlamaMoEForCausalLM",
        },
        "model_type": "llama_moe", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "rope_scaling": None,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "num_experts": 16, "num_selects": 4,
        "size_experts": [[688] * 16] * 32, "score_scale_factor": 4.0, "gate_network": "mlp", "torch_dtype": "bfloat16",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": True,
    },
    "deepseek": {
        "architectures": ["DeepseekForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekConfig",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
        },
        "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax", "aux_loss_alpha": 0.001,
        "seq_aux": True, "rope_theta": 10000, "rope_scaling": None, "max_position_embeddings": 4096,
        "bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "parameters", "blocks", "shape"),
    [
        # LLaMA-2 7B's 6,738,415,616, and per layer a gate of 16 x 4096 + 16 x 16 and the unused 16 x 4096.
        ("llama_moe", 6_738_415_616 + 32 * (2 * 16 * 4096 + 256), 32, (16, 688, 4096)),
        # Embeddings 2 x 102400 x 2048; 28 layers of attention 4 x 2048^2 and norms 2 x 2048; the last norm;
        # a dense MLP 3 x 2048 x 10944; 27 blocks of 64 x 3 x 2048 x 1408, shared 3 x 2048 x 2816, router 64 x 2048.
        ("deepseek", 16_375_728_128, 27, (64, 1408, 2048)),
    ],
)
def test_the_published_sizes(tmp_path, family, parameters, blocks, shape):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family]))
    model = skeleton(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    layers = moe_layers(model)
    assert len(layers) == blocks
    assert all(tuple(layer.matrices()["gate_proj"].shape) == shape for layer in layers)


def with_remote_code(folder, family):
    """Give a checkpoint the configuration entries by which transformers would ask for code of its own."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": PUBLISHED[family]["auto_map"]}))


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("family", ["llama_moe", "deepseek"])
def test_the_native_class_is_loaded_whatever_auto_map_says(tmp_path, family, trust):
    folder = seeded_checkpoint(tmp_path / "reference", family)
    with_remote_code(folder, family)
    model = load_model(folder, trust_remote_code=trust)
    assert type(model).__module__ == f"tasks.moe.native.{family}"
    assert type(AutoConfig.from_pretrained(folder)).__module__ == f"tasks.moe.native.{family}"


def test_llama_moe_names_are_the_published_ones(tmp_path):
    """All of layer 0, per families of parameters; also what is saved again is what was there."""
    folder = seeded_checkpoint(tmp_path / "reference", "llama_moe")
    tensors = load_file(folder / "model.safetensors")
    own = {
        name.removeprefix("model.layers.0.mlp.") for name in tensors if name.startswith("model.layers.0.mlp")
    }
    parts = ("weight_gate", "weight_up", "weight_down")
    expected = {f"calculator.experts.{part}.{expert}" for part in parts for expert in range(8)}
    expected |= {"gate.gate_network.0.weight", "gate.gate_network.2.weight", "gate.weight_noise.weight"}
    assert own == expected
    assert tensors["model.layers.0.mlp.calculator.experts.weight_down.7"].shape == (64, 32)
    load_model(folder).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(tensors)
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("noise", [True, False], ids=["configured", "not configured"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "absent"])
def test_the_unused_noise_weights_may_be_absent(tmp_path, noise, stored):
    folder = seeded_checkpoint(tmp_path / "reference", "llama_moe")
    before = logits_of(folder)
    tensors = load_file(folder / "model.safetensors")
    if not stored:
        tensors = {name: tensor for name, tensor in tensors.items() if "weight_noise" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "gate_add_noise": noise}))
    assert torch.equal(logits_of(folder), before)


def logits_of(folder):
    with torch.no_grad():
        return load_model(folder)(input_ids=IDS).logits


def test_a_missing_expert_is_an_error(tmp_path):
    folder = seeded_checkpoint(tmp_path / "reference", "llama_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.calculator.experts.weight_up.3"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"1 missing \(model\.layers\.1\.mlp\.calculator\.experts\.3\.up_proj"
    ):
        load_model(folder)


@pytest.mark.parametrize("family", ["llama_moe", "deepseek"])
def test_prepare_reference_takes_it_without_remote_code(tmp_path, family):
    source = seeded_checkpoint(tmp_path / "source", family)
    with_remote_code(source, family)
    params = check_params(
        small_params(prepare_reference__source="path", prepare_reference__path__folder=str(source))
    )
    summary = prepare_reference.run(
        params.prepare_reference, tmp_path / "reference", tmp_path / "metrics.json"
    )
    assert summary["model_type"] == family
    assert (summary["experts"], summary["top_k"]) == (8, 2)
    model = load_model(tmp_path / "reference")
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    assert torch.equal(logits(model), logits(plain))


def test_generation_with_a_cache_is_the_forward_of_the_whole():
    for model_class, config in (
        (LlamaMoEForCausalLM, LlamaMoEConfig(**SMALL, **LLAMA)),
        (DeepseekForCausalLM, DeepseekConfig(**{**SMALL, **DEEPSEEK}, bos_token_id=0, eos_token_id=1)),
    ):
        model = made(model_class, config)
        out = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            assert torch.equal(model(out).logits[:, 19:-1].argmax(-1), out[:, 20:])
