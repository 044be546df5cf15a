"""What a run costs, from the parameters alone: forward tokens per stage, bytes on disk, peak memory, seconds.

Tokens are upper bounds that the steps keep. Bytes follow from the model's shape. Seconds are estimates:
forward work divided by the machine's measured speed, plus the fixed parts below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.contracts import GIB, InputError
from tasks.params import Params, PrepareReference, Variant

SIDE_BITS = 32  # a scale and a zero point of 16 bits each per group
WARM_UP = 1  # throughput passes before those that count

# Tokens of one question of the paper's benchmarks with all its choices, zero-shot, by the default model's
# tokenizer: means over 150 rows of each file, rounded up. A one-letter choice costs no pass of its own.
QUESTION_TOKENS = {
    "mmlu": 125,
    "gsm8k": 260,  # 192 of them generated
    "truthfulqa_mc1": 151,
    "piqa": 75,
    "winogrande": 35,
    "hellaswag": 323,
}


# --- forward tokens -----------------------------------------------------------------------------------------


def forward_tokens(params: Params) -> dict[str, int]:
    """Tokens that each stage (DVC's name) passes through a model, at most; stages without any are absent."""
    requests = params.prepare_requests
    tokens: dict[str, int] = {}
    if params.prepare_reference.source == "smollm2-moe":
        upcycled = params.prepare_reference.smollm2_moe
        tokens["prepare_reference"] = upcycled.upcycling_tokens + 2 * upcycled.check_tokens
    tokens["measure_experts"] = requests.calibration_tokens
    for name in params.build_variants.variants:
        tokens[f"build_variants@{name}"] = requests.calibration_tokens
    scored = requests.count * requests.mean_tokens
    tokens["score_reference"] = scored
    for bits in params.quantize_instances.bits:
        tokens[f"score_requests@{bits}"] = scored
        if (
            params.quantize_instances.method == "gptq"
        ):  # twice through a layer where later ones see it quantized
            passes = 2 if params.quantize_instances.gptq.inputs == "quantized" else 1
            tokens[f"quantize_instances@{bits}"] = passes * requests.calibration_tokens
    throughput = params.measure_throughput
    passes = throughput.repeats + WARM_UP
    models = 1 + len(params.quantize_instances.bits)
    tokens["measure_throughput"] = passes * models * (throughput.prefill_tokens + throughput.decode_tokens)
    evaluated = evaluation_tokens(params)
    tokens["evaluate_reference"] = evaluated
    for bits in params.quantize_instances.bits:
        tokens[f"evaluate_instances@{bits}"] = evaluated
    for name in params.build_variants.variants:
        tokens[f"evaluate_variants@{name}"] = evaluated
    return tokens


def decomposition_tokens(params: Params, shape: ModelShape) -> int:
    """Tokens of decompose_damage, in passes through the whole model: one that begins at its lowest swapped layer counts
    the part above, half of it for one block and a third for a pair, and a gradient as one more pass."""
    swaps, requests = params.decompose_damage, params.prepare_requests
    every = shape.moe_layers * (shape.experts if swaps.level == "expert" else 1)
    pairs = min(swaps.pairs, every * (every - 1) // 2)
    asked = (swaps.fit_requests + swaps.holdout_requests) * requests.mean_tokens * (3 + every / 2 + pairs / 3)
    layers = min(swaps.swap_layers, shape.moe_layers)
    experts = swaps.swap_tokens * (1 + (layers * shape.experts + swaps.super_experts) / 2)
    gradients = (2 + swaps.probes) * min(swaps.fragility_tokens, requests.calibration_tokens)
    return int(len(params.quantize_instances.bits) * (asked + experts) + gradients)


def evaluation_tokens(params: Params) -> int:
    """Forward tokens of one evaluated model: its questions, and the held-out text."""
    requests = params.prepare_requests
    total = requests.perplexity_tokens
    for task in params.evaluate_benchmarks.tasks:
        limit = params.evaluate_benchmarks.limit.get(task)
        if task == "mmlu_packaged":
            kept = min(requests.questions, limit or requests.questions)
            total += kept * requests.question_mean_tokens
        elif limit is not None:
            total += limit * QUESTION_TOKENS.get(task, max(QUESTION_TOKENS.values()))
    return total


# --- the model's shape --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only Mixture of Experts with gated MLPs; everything else is derived from them."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    moe_layers: int
    experts: int  # per MoE layer
    top_k: int
    expert_width: int
    shared_width: int = 0  # of the shared expert of each MoE layer; 0: none
    dense_width: int = 0  # of the MLP of the other layers
    tied: bool = False  # lm_head is the embedding
    head_norm: bool = False  # a norm of width head_dim on queries and keys
    attention: int | None = (
        None  # parameters of a layer's attention; None: as the sizes above say, without biases
    )
    shared_gate: bool = True  # the shared expert has a gate of its own
    moe_extra: int = 0  # parameters of a MoE layer beside matrices: biases, a router of several layers

    @property
    def expert_parameters(self) -> int:
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_width

    @property
    def rest_parameters(self) -> int:
        """Everything but the routed experts."""
        attention = self.attention
        if attention is None:
            attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norm else 0)
        gated = self.shared_width and self.shared_gate
        shared = 3 * self.hidden * self.shared_width + (self.hidden if gated else 0)
        return (
            self.vocabulary * self.hidden * (1 if self.tied else 2)
            + self.hidden  # the final norm
            + self.layers * (attention + norms)
            + self.moe_layers * (self.hidden * self.experts + shared + self.moe_extra)
            + (self.layers - self.moe_layers) * 3 * self.hidden * self.dense_width
        )

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.rest_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, lm_head included, the embedding's look-up not."""
        lookup = 0 if self.tied else self.vocabulary * self.hidden
        return self.rest_parameters - lookup + self.expert_parameters * self.top_k // self.experts

    def size_bytes(self, bits: int, group_size: int = 64, rest_bits: int = 16) -> float:
        """Bytes with routed experts ideally packed at `bits` in groups; 16 bits or more: no groups."""
        group = group_size or self.hidden
        expert_bits = bits + SIDE_BITS / group if bits < 16 else bits
        return (self.expert_parameters * expert_bits + self.rest_parameters * rest_bits) / 8


QWEN3_30B_A3B = ModelShape(
    vocabulary=151_936, hidden=2048, layers=48, heads=32, key_value_heads=4, head_dim=128,
    moe_layers=48, experts=128, top_k=8, expert_width=768, head_norm=True,
)  # fmt: skip
PUBLISHED = {"Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B}

# The `tiny` source; a test compares it with the model that the source builds.
TINY = ModelShape(
    vocabulary=1024, hidden=64, layers=2, heads=2, key_value_heads=1, head_dim=32,
    moe_layers=2, experts=8, top_k=2, expert_width=32, tied=True, head_norm=True,
)  # fmt: skip


def reference_shape(params: PrepareReference) -> ModelShape:
    """The shape of the reference that the parameters describe, where they are enough to know it.

    Raises InputError for a hub model that is not in PUBLISHED, and for a local folder.
    """
    if params.source == "tiny":
        return TINY
    if params.source == "smollm2-moe":
        moe = params.smollm2_moe
        # SmolLM2-135M: 30 layers, FFN 1536, of which `shared_neurons` stay together and the rest is split.
        return ModelShape(
            vocabulary=49_152, hidden=576, layers=30, heads=9, key_value_heads=3, head_dim=64,
            moe_layers=15 if moe.moe_layers == "odd" else 30, experts=moe.experts, top_k=moe.top_k,
            expert_width=(1536 - moe.shared_neurons) // moe.experts, shared_width=moe.shared_neurons,
            dense_width=1536, tied=True,
        )  # fmt: skip
    if params.source == "hub" and params.hub.id in PUBLISHED:
        return PUBLISHED[params.hub.id]
    name = params.hub.id if params.source == "hub" else params.path.folder
    raise InputError(
        f"the shape of '{name}' is in its config.json: give the folder that holds it with --model"
    )


def shape_from_config(config: Mapping[str, Any], origin: str) -> ModelShape:
    """The shape of a transformers `config.json`; `origin` names the file in errors.

    Raises InputError when a key is missing (no experts means no Mixture of Experts), and for an encoder-decoder.
    """

    def first(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if value is None:
            raise InputError(
                f"{origin}: none of the keys {', '.join(keys)}; expected the config.json of an MoE model"
            )
        return int(value)

    if config.get("is_encoder_decoder"):
        raise InputError(
            f"{origin}: is_encoder_decoder is true: costs are known for decoder-only models alone; plan with another "
            "model, or run without a plan"
        )
    hidden, layers, heads = first("hidden_size"), first("num_hidden_layers"), first("num_attention_heads")
    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    step = first("decoder_sparse_step", default=1)
    dense = {*(config.get("mlp_only_layers") or []), *range(first("first_k_dense_replace", default=0))}
    family = str(config.get("model_type"))
    width = first("moe_intermediate_size", "intermediate_size")
    if family == "llama_moe":
        width //= experts  # the dense MLP was split
    return ModelShape(
        vocabulary=first("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=hidden // heads),
        moe_layers=sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
        experts=experts,
        top_k=first("num_experts_per_tok", "num_experts_per_token", "num_selects"),
        expert_width=width,
        shared_width=first(
            "shared_expert_intermediate_size", default=width * first("n_shared_experts", default=0)
        ),
        dense_width=first("intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_norm="qwen3" in family,
        attention=_attention_parameters(config, first),
        shared_gate=family == "qwen2_moe",
        moe_extra=_moe_extra(config, hidden, width, experts),
    )


def _attention_parameters(config: Mapping[str, Any], first: Callable[..., int]) -> int:
    """Parameters of one layer's attention, norms of width head_dim left out."""
    hidden, heads, family = first("hidden_size"), first("num_attention_heads"), config.get("model_type")
    if config.get("kv_lora_rank") is not None:  # multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
        rank, rotary, plain = first("kv_lora_rank"), first("qk_rope_head_dim"), first("qk_nope_head_dim")
        value, query = first("v_head_dim"), first("q_lora_rank", default=0)
        queries = heads * (plain + rotary)
        down_up = query * (hidden + 1 + queries) if query else hidden * queries  # the 1 is the norm between
        return (
            down_up + hidden * (rank + rotary) + rank * (1 + heads * (plain + value)) + heads * value * hidden
        )
    pairs = first("num_key_value_heads", default=heads)
    size = first("head_dim", default=hidden // heads)
    biases = 0
    if family == "gpt_oss":
        biases = size * (heads + 2 * pairs) + hidden + heads  # and one sink a head
    elif family == "qwen2_moe" and config.get("qkv_bias", True):
        biases = size * (heads + 2 * pairs)
    elif family == "olmoe":
        biases = hidden + pairs * size  # norms over all queries and all keys
    return 2 * hidden * size * (heads + pairs) + biases


def _moe_extra(config: Mapping[str, Any], hidden: int, width: int, experts: int) -> int:
    """Parameters of one MoE layer beside the experts' matrices, one router row each, and shared experts."""
    if config.get("model_type") == "gpt_oss":
        return experts * (1 + 2 * width + hidden)  # biases of the router and of the experts
    if config.get("model_type") == "llama_moe":  # the router's second layer, and its noise for training
        second = experts * experts if config.get("gate_network", "mlp") == "mlp" else 0
        return second + (experts * hidden if config.get("gate_add_noise", True) else 0)
    return 0


# --- stages -------------------------------------------------------------------------------------------------

# Set from one whole run of the default on 2 idle cores at 126 Gflop/s (`matrix_gflops`): the reference's scores took
# 87 s for 26,334 tokens, upcycling 103 s, an instance's hqq 6 to 8 s, the steps without a model 1 to 8 s.
FORWARD_EFFICIENCY = 0.55
START_SECONDS = 8.0  # interpreter, torch and transformers, reading a small checkpoint, DVC's hashing
UPCYCLING_SECONDS_PER_TOKEN = 0.004  # partition, router and ridge refits, without the forwards
WEIGHTS_PER_SECOND = {"rtn": 1e8, "clip_search": 6e7, "hqq": 4e7, "gptq": 7e6}  # on two cores, rounded down
FIXED_SECONDS = {"prepare_requests": 8.0, "calibrate_fwp": 9.0, "solve_routing": 5.0, "track_runs": 14.0}
RESIDENT_BYTES = 3 * GIB  # measure_throughput keeps all models in memory up to here
INTERPRETER_BYTES = 0.8e9  # torch, transformers and lm-eval loaded, no model


@dataclass(frozen=True)
class StageCost:
    tokens: int
    seconds: float
    memory_bytes: float  # peak of the stage's process
    disk_bytes: float  # of its outputs


def stage_cost(name: str, params: Params, shape: ModelShape, gflops: float) -> StageCost:
    """Cost of stage `name` (DVC's name) where matrix products reach `gflops`, 10^9 operations a second."""
    step, _, item = name.partition("@")
    tokens = forward_tokens(params).get(name, 0)
    if step == "decompose_damage":
        tokens = decomposition_tokens(params, shape)
    forward = 2.0 * shape.active_parameters * tokens / (gflops * 1e9 * FORWARD_EFFICIENCY)
    value_bytes = 2 if params.score_requests.compute_dtype == "bfloat16" else 4
    model_bytes = value_bytes * shape.parameters
    positions = params.prepare_requests.count * params.prepare_requests.mean_tokens
    hidden_bytes = 4.0 * positions * shape.hidden
    logits_bytes = 4.0 * params.runtime.batch_tokens * shape.vocabulary
    seconds, memory, disk = forward + FIXED_SECONDS.get(step, START_SECONDS), model_bytes, 0.0
    if step == "prepare_reference":
        if params.prepare_reference.source == "smollm2-moe":
            seconds += UPCYCLING_SECONDS_PER_TOKEN * tokens
        # Upcycling holds the dense weights beside the new ones; a ready checkpoint is copied file by file.
        memory = 2 * model_bytes if params.prepare_reference.source == "smollm2-moe" else 0.0
        disk = shape.size_bytes(16)
    elif step == "quantize_instances":
        seconds += shape.expert_parameters / WEIGHTS_PER_SECOND[params.quantize_instances.method]
        disk = shape.size_bytes(int(item), params.quantize_instances.group_size)
        memory = 16.0 * shape.expert_parameters / max(shape.moe_layers, 1)  # one layer's matrices, in float32
    elif step == "build_variants":
        # The least important experts pay for the replicas: the bytes of before bound those of after.
        disk = shape.size_bytes(16)
        memory = model_bytes * _physical_share(params.build_variants.variants[item], shape)
    elif step in ("score_reference", "score_requests"):
        if step == "score_requests":  # the reference's lm_head once more, for KL
            seconds += 2.0 * shape.hidden * shape.vocabulary * tokens / (gflops * 1e9 * FORWARD_EFFICIENCY)
        memory = model_bytes + hidden_bytes + logits_bytes
        routing = (
            10.0 * shape.moe_layers * shape.top_k * positions
        )  # index, weight and gate_prob of each pick
        disk = 16.0 * positions + routing + (hidden_bytes if step == "score_reference" else 0.0)
    elif step in ("evaluate_reference", "evaluate_instances", "evaluate_variants"):
        memory = model_bytes + 2 * logits_bytes
    elif step == "decompose_damage":
        memory = 2 * model_bytes + logits_bytes  # the reference and an instance side by side
        disk = 8.0 * 6 * len(params.quantize_instances.bits) * shape.moe_layers * shape.experts
    elif step == "measure_throughput":
        together = model_bytes * (1 + len(params.quantize_instances.bits))
        memory = together if together <= RESIDENT_BYTES else model_bytes  # else one after the other
    elif step in FIXED_SECONDS:
        memory = 0.0
        disk = 5e6
    return StageCost(tokens, seconds, memory + INTERPRETER_BYTES, disk)


def _physical_share(variant: Variant, shape: ModelShape) -> float:
    return 1 + variant.replicas / shape.experts
