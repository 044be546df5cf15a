from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig

from tasks.contracts import GIB, InputError
from tasks.cost import (
    QWEN3_30B_A3B,
    TINY,
    decomposition_tokens,
    evaluation_tokens,
    forward_tokens,
    reference_shape,
    shape_from_config,
    stage_cost,
)
from tasks.moe.registry import moe_layers
from tasks.params import Params, load_params
from tasks.sources import tiny
from tests.seeded_models import FAMILIES, seeded_configuration
from tests.seeded_native_models import NATIVE


@pytest.fixture
def params() -> Params:
    return load_params()


def test_the_default_run_is_under_its_budget_of_forward_tokens(params):
    shape = reference_shape(params.prepare_reference)
    assert sum(forward_tokens(params).values()) + decomposition_tokens(params, shape) < 245_000


def test_gptq_walks_the_calibration_tokens_through_the_layers(params):
    def quantized(inputs: str, method: str = "gptq") -> int | None:
        gptq = params.quantize_instances.gptq.model_copy(update={"inputs": inputs})
        section = params.quantize_instances.model_copy(update={"method": method, "gptq": gptq})
        tokens = forward_tokens(params.model_copy(update={"quantize_instances": section}))
        return tokens.get("quantize_instances@2")

    # 4,096 calibration tokens; once more through each layer with its own quantized experts
    assert (quantized("reference"), quantized("quantized")) == (4096, 8192)
    assert quantized("quantized", "hqq") is None


def test_forward_tokens_by_hand(params):
    tokens = forward_tokens(params)
    # 168 requests of at most 160 tokens; 100 questions of at most 76 on average, and 4,000 of held-out text
    assert tokens["score_reference"] == tokens["score_requests@3"] == 26_880
    assert tokens["evaluate_reference"] == tokens["evaluate_variants@rq"] == 11_600
    # (3 repeats + 1 warm-up) x (reference + 3 instances) x (256 + 16)
    assert tokens["measure_throughput"] == 4_352
    # upcycling, and the losses of the dense and the upcycled model on 1,536 tokens
    assert tokens["prepare_reference"] == 8_192 + 2 * 1_536
    assert tokens["measure_experts"] == tokens["build_variants@rq"] == 4_096
    assert len(tokens) == 1 + 2 + 4 + 1 + 5


def test_tokens_of_the_decomposition_by_hand(params):
    """15 layers, 16 experts, three instances. 6 requests of at most 160 tokens, 3 + 15 / 2 + 6 / 3 = 12.5 passes;
    256 tokens through 1 + (16 + 3) / 2 = 10.5; 2,048 calibration tokens three times."""
    swaps = params.decompose_damage.model_copy(
        update={
            "fit_requests": 2,
            "holdout_requests": 4,
            "pairs": 6,
            "fragility_tokens": 2048,
            "swap_tokens": 256,
        }
    )
    shape = reference_shape(params.prepare_reference)
    tokens = decomposition_tokens(params.model_copy(update={"decompose_damage": swaps}), shape)
    assert tokens == 3 * (12_000 + 2_688) + 6_144


def test_a_benchmark_counts_its_limit(params):
    benchmarks = params.evaluate_benchmarks.model_copy(update={"tasks": ["piqa"], "limit": {"piqa": 10}})
    changed = params.model_copy(update={"evaluate_benchmarks": benchmarks})
    few = benchmarks.model_copy(update={"limit": {"piqa": 20}})
    more = params.model_copy(update={"evaluate_benchmarks": few})
    text = params.prepare_requests.perplexity_tokens
    assert evaluation_tokens(more) - text == 2 * (evaluation_tokens(changed) - text) > 0


def test_published_sizes():
    """method.md section 1: expert parameters at bits + 0.5, the rest in BF16."""
    shape = QWEN3_30B_A3B
    assert shape.expert_parameters == 28_991_029_248
    assert shape.rest_parameters == 1_541_093_376
    sizes = {bits: shape.size_bytes(bits) / GIB for bits in (2, 3, 4, 16)}
    assert {bits: round(size, 2) for bits, size in sizes.items()} == {2: 11.31, 3: 14.68, 4: 18.06, 16: 56.87}
    assert round(sizes[2] + sizes[3] + sizes[4], 2) == 44.05
    assert round(3 * sizes[4], 2) == 54.17


def test_shapes_count_what_transformers_builds(params):
    shape = reference_shape(params.prepare_reference)
    upcycled = Qwen2MoeConfig(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=1536, moe_intermediate_size=64,
        shared_expert_intermediate_size=512, num_experts=16, num_experts_per_tok=4, qkv_bias=False,
        tie_word_embeddings=True, mlp_only_layers=list(range(0, 30, 2)),
    )  # fmt: skip
    for config, expected in [(upcycled, shape), (tiny.configuration(), TINY)]:
        assert shape_from_config(config.to_dict(), "config.json").parameters == expected.parameters
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected.parameters


@pytest.mark.parametrize("family", [*FAMILIES, *NATIVE])
def test_every_decoder_only_family_is_counted_to_the_parameter(family):
    config = seeded_configuration(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict(), "config.json")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = moe_layers(model)
    matrices = [view.numel() for layer in layers for view in layer.matrices().values()]
    assert (shape.moe_layers, shape.expert_parameters) == (len(layers), sum(matrices))
    assert (shape.experts, shape.top_k) == (layers[0].num_experts, layers[0].top_k)


@pytest.mark.parametrize(
    ("family", "config", "billions"),
    [  # total parameters as published, from the sizes as published
        ("gpt_oss", {"num_hidden_layers": 36, "num_experts": 128}, 116.83),  # gpt-oss-120b
        ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.91),  # gpt-oss-20b
        ("mixtral", {}, 46.70),  # Mixtral-8x7B
        ("deepseek_v3", {}, 671.03),
        ("olmoe", {"intermediate_size": 1024}, 6.92),  # OLMoE-1B-7B
    ],
)
def test_published_models_are_counted(family, config, billions):
    made = AutoConfig.for_model(family, **config).to_dict()
    assert round(shape_from_config(made, "config.json").parameters / 1e9, 2) == billions


def test_an_encoder_decoder_is_not_planned():
    config = seeded_configuration("switch_transformers").to_dict()
    with pytest.raises(InputError, match="is_encoder_decoder is true: costs are known for decoder-only"):
        shape_from_config(config, "config.json")


def test_a_config_without_experts_is_an_error():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    with pytest.raises(InputError, match=r"config\.json: none of the keys num_experts"):
        shape_from_config(config, "config.json")


@given(bits=st.sampled_from([2, 3, 4, 8]), group=st.sampled_from([0, 32, 64, 128]))
def test_fewer_bits_and_larger_groups_are_smaller(bits, group):
    shape = QWEN3_30B_A3B
    assert shape.size_bytes(bits, group) < shape.size_bytes(16)
    assert shape.size_bytes(bits, group) > shape.expert_parameters * bits / 8 + 2 * shape.rest_parameters - 1
    if group:
        assert shape.size_bytes(bits, group) > shape.size_bytes(bits, 2 * group)


def test_costs_scale_with_tokens_and_machine(params):
    shape = reference_shape(params.prepare_reference)
    slow, fast = (stage_cost("score_requests@3", params, shape, gflops) for gflops in (20.0, 80.0))
    assert slow.seconds > 3 * fast.seconds and slow.tokens == fast.tokens == 26_880
    assert stage_cost("score_requests@3", params, QWEN3_30B_A3B, 20.0).memory_bytes > 100 * GIB


def test_throughput_is_planned_with_the_memory_that_it_takes():
    from tasks import cost, measure_throughput

    assert cost.RESIDENT_BYTES == measure_throughput.RESIDENT_BYTES
