"""A checkpoint's model of which only one part at a time holds weights: the rest stays on the meta device.

transformers' own loader fills the part, given nothing but the tensors that belong to it, so that fused experts,
renamed keys and buffers come out as in a model that is loaded whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from tasks.moe.checkpoint import skeleton
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.tensors import CheckpointTensors, check_keys


class PartialModel:
    """The model of a checkpoint folder in eval mode and float32, without weights until a part is loaded."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InputError as `skeleton` and CheckpointTensors do."""
        transformers_logging.disable_progress_bar()
        self.folder = Path(folder)
        self.model: PreTrainedModel = skeleton(self.folder).float().eval()
        self.model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        _fill_computed_buffers(self.model)
        self._mapping: Any = get_model_conversion_mapping(self.model)
        self._names = self._by_target()

    def _by_target(self) -> dict[str, list[str]]:
        """Name of a parameter or buffer -> the checkpoint's tensors that make it."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        state: Any = self.model.state_dict()
        prefix = self.model.base_model_prefix
        names: dict[str, list[str]] = defaultdict(list)
        for name in CheckpointTensors(self.folder).files:
            target, _ = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:  # as the loader does: a pattern meant another tensor
                target, _ = rename_source_key(name, [], [], prefix, state)
            names[target].append(name)
        return names

    def load(self, prefix: str, without: str | None = None) -> None:
        """Fill the parameters and buffers whose names start with `prefix`, but not with `without`.

        Raises InputError naming the keys that the checkpoint lacks or has in another shape.
        """

        def inside(name: str) -> bool:
            return name.startswith(prefix) and not (without and name.startswith(without))

        source = CheckpointTensors(self.folder)  # closed on return: no shard stays mapped
        tensors = {
            name: source.get(name)
            for target, names in self._names.items()
            if inside(target)
            for name in names
        }
        config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=self._mapping)
        info, _ = convert_and_load_state_dict_in_model(self.model, tensors, config)
        optional = "|".join(self.model._keys_to_ignore_on_load_missing or []) or "$."
        missing = [name for name in info.missing_keys if inside(name) and not re.search(optional, name)]
        check_keys(self.folder, missing, info.unexpected_keys, info.mismatched_keys)

    def free(self, module: nn.Module) -> None:
        """Give back the weights of a part."""
        module.to("meta")


def _fill_computed_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies, as transformers' loader does."""
    for name, module in model.named_modules():
        own = module._non_persistent_buffers_set
        computed = {
            key: buffer for key, buffer in module._buffers.items() if key in own and buffer is not None
        }
        for key, buffer in computed.items():
            module._buffers[key] = torch.full_like(buffer, torch.nan, device="cpu")
        if computed:
            model._init_weights(module)
        for key in computed:
            buffer = module._buffers[key]
            if buffer is None or not buffer.is_floating_point() or buffer.isnan().any():
                raise RuntimeError(
                    f"{name}.{key} of {type(module).__name__} is computed in a way not known here"
                )
