"""DeepSeek-MoE 16B (Dai et al., arXiv 2401.06066), model_type `deepseek`: transformers' Llama with MoE blocks.

Attention, norms and rotary embedding are Llama's. Layers from `first_k_dense_replace` on, every `moe_layer_freq`-th,
are Mixtures of Experts: softmax over all experts, top-k, and shared experts (one wide MLP) added plainly.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import initialization as init

from tasks.contracts import InputError
from tasks.moe.native.routed import GatedExpert, RoutedExperts


@strict
class DeepseekConfig(LlamaConfig):
    """Configuration of DeepSeek-MoE; defaults are the 16B model's where Llama's differ.

    `aux_loss_alpha` and `seq_aux` concern training alone.
    """

    model_type = "deepseek"
    base_model_tp_plan = None  # type: ignore[assignment] # Llama's names the MLPs that are replaced here

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    n_routed_experts: int | None = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer number `layer` has experts."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )


class DeepseekRouter(nn.Module):
    """Top-k of a softmax over all experts."""

    def __init__(self, config: DeepseekConfig, num_experts: int) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> logits [T, E], routing weights [T, k] and selected experts [T, k]."""
        logits = functional.linear(hidden, self.weight)
        weight, index = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob and self.top_k > 1:
            weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weight, index


class DeepseekMoE(nn.Module):
    """Router, routed experts, and shared experts that see every token."""

    def __init__(self, config: DeepseekConfig, num_experts: int) -> None:
        super().__init__()
        shape = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        self.gate = DeepseekRouter(config, num_experts)
        self.experts = RoutedExperts(num_experts, *shape)
        shared = config.n_shared_experts
        self.shared_experts = GatedExpert(shape[0], shared * shape[1], shape[2]) if shared else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weight, index = self.gate(flat)
        output = self.experts(flat, index, weight).view_as(hidden_states)
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


class DeepseekForCausalLM(LlamaForCausalLM):
    """Raises InputError for a configuration that this class does not compute."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        if config.scoring_func != "softmax":
            raise InputError(
                f"deepseek: scoring_func is '{config.scoring_func}', expected 'softmax', the only one that "
                "DeepSeek-MoE was published with"
            )
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            if config.is_moe(number):
                layer.mlp = DeepseekMoE(config, config.n_routed_experts or 0)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
