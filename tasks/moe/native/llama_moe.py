"""LLaMA-MoE v1 (Zhu et al., arXiv 2406.16554), model_type `llama_moe`: transformers' Llama, each MLP cut into
experts.

Attention, norms and rotary embedding are Llama's. The gate is a linear map or a small MLP, W2 tanh(W1 x); its top-k
logits pass a softmax over the selected only. An expert's output is multiplied by its score and `score_scale_factor`.
No token is dropped and no noise is added when a trained model is used: `gate.weight_noise` is kept, so that a saved
checkpoint is the one that was loaded, and read by nothing; it may be absent.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import WeightConverter, WeightRenaming

from tasks.contracts import InputError
from tasks.moe.native.routed import RoutedExperts

# A checkpoint lists each projection's experts (`experts.weight_gate.3`), the modules are one per expert.
RENAMINGS: list[WeightConverter | WeightRenaming] = [
    WeightRenaming(
        rf"\.calculator\.experts\.weight_{kind}\.(\d+)", rf".calculator.experts.\1.{kind}_proj.weight"
    )
    for kind in ("gate", "up", "down")
]
SUPPORTED = {
    "gate_type": ("TopKBalancedNoisyGate",),
    "gate_network": ("mlp", "linear"),
    "calculator_type": ("UniversalCalculator",),
    "add_weight_norm": (False,),
}


@strict
class LlamaMoEConfig(LlamaConfig):
    """Configuration of LLaMA-MoE.

    size_experts: the widths of the experts, for all layers [E] or for each [layers][E]; None: all
    `intermediate_size` / `num_experts`. score_scale_factor: for all layers, or one per layer. The balance,
    noise, capacity and dropping settings concern training, or calculators that no published model has.
    """

    model_type = "llama_moe"
    base_model_tp_plan = None  # type: ignore[assignment] # Llama's names the MLPs that are replaced here

    num_experts: int = 16
    num_selects: int = 4
    size_experts: list | None = None
    gate_type: str = "TopKBalancedNoisyGate"
    gate_network: str = "mlp"
    gate_use_softmax: bool = True
    gate_use_balance: bool = True
    gate_balance_loss_weight: float = 1e-2
    gate_add_noise: bool = True
    gate_noise_epsilon: float = 1e-2
    calculator_type: str = "UniversalCalculator"
    multiply_gate_scores: bool = True
    score_scale_factor: float | int | list = 1.0
    add_weight_norm: bool = False
    drop_tokens: bool = True
    dropped_padding: str = "zero"
    capacity_factor: float = 1.25

    def expert_width(self, layer: int) -> int:
        """The width of the experts of decoder layer `layer`; raises InputError unless they are all alike."""
        sizes = self.size_experts
        if sizes is None:
            if self.intermediate_size % self.num_experts:
                raise InputError(
                    f"llama_moe: intermediate_size {self.intermediate_size} is not divisible by num_experts "
                    f"{self.num_experts}: expected size_experts in config.json"
                )
            return self.intermediate_size // self.num_experts
        own = sizes[layer] if sizes and isinstance(sizes[0], list) else sizes
        if len(own) != self.num_experts:
            raise InputError(
                f"llama_moe: size_experts lists {len(own)} experts in layer {layer}, num_experts is "
                f"{self.num_experts}: expected one width per expert"
            )
        if len(set(own)) != 1:
            raise InputError(
                f"llama_moe: size_experts gives layer {layer} experts of different widths, {sorted(set(own))}: "
                "expected one width per layer, since experts are quantized and replicated as stacks; use one of "
                "the published checkpoints, whose experts are of one width"
            )
        return own[0]

    def score_scale(self, layer: int) -> float:
        """What the scores of decoder layer `layer` are multiplied by."""
        factor = self.score_scale_factor
        return float(factor[layer] if isinstance(factor, list) else factor)


class LlamaMoEGate(nn.Module):
    """Top-k of the gate network's logits, softmax over the selected."""

    def __init__(self, config: LlamaMoEConfig, layer: int) -> None:
        super().__init__()
        self.top_k = config.num_selects
        self.use_softmax = config.gate_use_softmax
        self.multiply = config.multiply_gate_scores
        self.score_scale = config.score_scale(layer)
        hidden, experts = config.hidden_size, config.num_experts
        first = nn.Linear(hidden, experts, bias=False)
        if config.gate_network == "linear":
            self.gate_network: nn.Module = first
        else:
            self.gate_network = nn.Sequential(first, nn.Tanh(), nn.Linear(experts, experts, bias=False))
        self.weight_noise = nn.Linear(hidden, experts, bias=False) if config.gate_add_noise else None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> logits [T, E], routing weights [T, k] as the experts' outputs are multiplied by them, and
        selected experts [T, k]."""
        logits = self.gate_network(hidden)
        scores, index = logits.topk(self.top_k, dim=-1)
        if self.use_softmax:
            scores = scores.softmax(dim=-1, dtype=torch.float32).to(logits.dtype)
        weight = scores * self.score_scale if self.multiply else torch.ones_like(scores)
        return logits, weight, index

    def rows(self) -> torch.Tensor:
        """[E, H] one row per expert. An MLP has no single row: these are the rows of the linear map W2·W1,
        its slope at 0, where tanh is the identity."""
        network: Any = self.gate_network
        if isinstance(network, nn.Linear):
            return network.weight.data
        return network[2].weight.data @ network[0].weight.data


class LlamaMoECalculator(nn.Module):
    """Holds the experts under the name that checkpoints have for it."""

    def __init__(self, experts: RoutedExperts) -> None:
        super().__init__()
        self.experts = experts


class LlamaMoEBlock(nn.Module):
    """Gate and experts of one layer."""

    def __init__(self, config: LlamaMoEConfig, layer: int) -> None:
        super().__init__()
        width = config.expert_width(layer)
        self.gate = LlamaMoEGate(config, layer)
        self.calculator = LlamaMoECalculator(
            RoutedExperts(config.num_experts, config.hidden_size, width, config.hidden_act)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weight, index = self.gate(flat)
        return self.calculator.experts(flat, index, weight).view_as(hidden_states)


class LlamaMoEForCausalLM(LlamaForCausalLM):
    """Raises InputError for a configuration that this class does not compute."""

    config_class = LlamaMoEConfig
    _keys_to_ignore_on_load_missing = [r"\.gate\.weight_noise\.weight$"]  # noqa: RUF012 (transformers' attribute)
    _keys_to_ignore_on_load_unexpected = [r"\.gate\.weight_noise\.weight$"]  # noqa: RUF012

    def __init__(self, config: LlamaMoEConfig) -> None:
        for name, known in SUPPORTED.items():
            if getattr(config, name) not in known:
                raise InputError(
                    f"llama_moe: {name} is {getattr(config, name)!r}, expected one of {list(known)}: no published "
                    "LLaMA-MoE has another"
                )
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp = LlamaMoEBlock(config, number)
        self.post_init()
