"""Random but seeded Mixture-of-Experts checkpoints with a tokenizer, for tests that need no trained model."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tasks.moe.tensors import auto_class
from tests.seeded_native_models import ENCODER_DECODERS, NATIVE

VOCABULARY = 352
TEXT = (
    "Question: Anna has 12 apples and gives away 5. How many are left? Answer: 12 - 5 = 7. The answer is 7.\n"
    "Once upon a time there was a small fox who lived near the river.\n"
    "def area(width, height):\n    return width * height\n"
)


def seeded_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens: reads any text, adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>"
    )


SHAPE: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.2,  # wide enough that routing and logits differ from token to token
}
_LOW_RANK = {  # DeepSeek's attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
# What each family adds to SHAPE; 8 experts of width 32 in all of them.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {  # every layer is a Mixture of Experts
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "qwen2_moe": {  # layer 0 is dense; a shared expert of width 64
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
        "tie_word_embeddings": True,
    },
    "olmoe": {"intermediate_size": 32, "num_experts": 8, "norm_topk_prob": False},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8},
    "deepseek_v2": {  # layer 0 is dense; two shared experts; the best 2 of 4 groups of experts compete
        **_LOW_RANK,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {  # layer 0 is dense; a shared expert; groups; a correction bias that is not zero
        **_LOW_RANK,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {  # biases; gates that reach the clamp
        "intermediate_size": 32,
        "num_local_experts": 8,
        "head_dim": 16,
        "sliding_window": 8,
        "swiglu_limit": 2.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granitemoe": {
        "intermediate_size": 32,
        "num_local_experts": 8,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "tie_word_embeddings": True,
    },
}


def seeded_configuration(family: str, **overrides: object) -> PreTrainedConfig:
    """The configuration of `seeded_checkpoint`."""
    known = {name: {**SHAPE, **own} for name, own in (FAMILIES | NATIVE).items()} | ENCODER_DECODERS
    if family not in known:
        raise ValueError(f"family is '{family}', expected one of {sorted(known)}")
    return AutoConfig.for_model(family, **{**known[family], **overrides})


def seeded_checkpoint(
    folder: str | Path, family: str = "qwen3_moe", seed: int = 0, **overrides: object
) -> Path:
    """Write a random checkpoint of a family of FAMILIES, under its published names: 3 layers, hidden 64, 8
    experts of width 32, top-2; with tokenizer.

    `overrides` go to the configuration, e.g. `num_hidden_layers=1`. Returns the folder.
    """
    config = seeded_configuration(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config)
    with torch.no_grad():  # expert tensors, routers and biases start at zero or uninitialised
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(name.encode()) + tensor.numel())
            if tensor.dim() > 1 or name.endswith("bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    folder = Path(folder)
    model.save_pretrained(folder)
    seeded_tokenizer().save_pretrained(folder)
    return folder
