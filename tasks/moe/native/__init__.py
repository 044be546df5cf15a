"""Native classes of the families that transformers does not carry, known to its Auto classes by importing this.

LLaMA-MoE (`llama_moe`) and DeepSeek-MoE 16B (`deepseek`) were published with code of their own in the checkpoint.
These classes compute the same from the same files, so no remote code runs, whether or not config.json names some
(`auto_map`): transformers prefers a class that was registered here.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from tasks.moe.native.deepseek import DeepseekConfig, DeepseekForCausalLM
from tasks.moe.native.llama_moe import RENAMINGS, LlamaMoEConfig, LlamaMoEForCausalLM

NATIVE = {
    "llama_moe": (LlamaMoEConfig, LlamaMoEForCausalLM),
    "deepseek": (DeepseekConfig, DeepseekForCausalLM),
}

for _model_type, (_config, _model) in NATIVE.items():
    AutoConfig.register(_model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)
register_checkpoint_conversion_mapping("llama_moe", RENAMINGS, overwrite=True)
