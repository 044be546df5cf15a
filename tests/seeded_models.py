"""Random but seeded Mixture-of-Experts checkpoints with a tokenizer, for tests that need no trained model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


def seeded_checkpoint(
    folder: str | Path, family: str = "qwen3_moe", seed: int = 0, **overrides: object
) -> Path:
    """Write a random checkpoint: 3 layers, hidden 64, 8 experts of width 32, top-2; with tokenizer.

    "qwen3_moe": every layer is a Mixture of Experts. "qwen2_moe": layers 1 and 2 are, layer 0 is dense; with
    a shared expert of width 64. `overrides` go to the configuration, e.g. `num_hidden_layers=1`.
    Returns the folder.
    """
    shape: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "initializer_range": 0.2,  # wide enough that routing and logits differ from token to token
    }
    if family == "qwen3_moe":
        build = partial(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**shape, "head_dim": 16, **overrides}))
    elif family == "qwen2_moe":
        own = {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0], "tie_word_embeddings": True}
        build = partial(Qwen2MoeForCausalLM, Qwen2MoeConfig(**{**shape, **own, **overrides}))
    else:
        raise ValueError(f"family is '{family}', expected 'qwen3_moe' or 'qwen2_moe'")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in model.named_parameters():  # expert tensors and routers start at zero or uninitialised
            generator = torch.Generator().manual_seed(
                seed * 1_000_003 + sum(name.encode()) + parameter.numel()
            )
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    folder = Path(folder)
    model.save_pretrained(folder)
    seeded_tokenizer().save_pretrained(folder)
    return folder
