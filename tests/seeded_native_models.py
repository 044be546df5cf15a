"""What tests/seeded_models.py writes for the families with native classes and for the encoder-decoder."""

from __future__ import annotations

# Beside the shape that all decoder-only families share.
NATIVE: dict[str, dict[str, object]] = {
    "llama_moe": {  # every layer is a Mixture of Experts; scores are scaled up, as in the published models
        "intermediate_size": 256,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_selects": 2,
        "score_scale_factor": 4.0,
    },
    "deepseek": {  # layer 0 is dense; two shared experts, one MLP of 64
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}
# Whole configurations. Switch: experts in every second of 4 encoder and 2 decoder blocks; an expert takes 6 tokens
# of a sequence, so that some are dropped.
ENCODER_DECODERS: dict[str, dict[str, object]] = {
    "switch_transformers": {
        "vocab_size": 352,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 32,
        "num_heads": 4,
        "num_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "num_experts": 8,
        "expert_capacity": 6,
        "pad_token_id": 1,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "decoder_start_token_id": 1,
    },
}
