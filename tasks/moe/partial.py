"""A checkpoint's model of which only one part at a time holds weights: the rest stays on the meta device.

transformers' own loader fills the part, given nothing but the tensors that belong to it, so that renamed keys and
buffers come out as in a model that is loaded whole. Routed experts, nearly all of a layer, are read a few at a time
into their places: the loader would hold them twice.
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
from tasks.moe.family import MoELayer
from tasks.moe.fused import EXPERTS_IMPLEMENTATION
from tasks.moe.registry import moe_layers
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors, check_keys

EXPERTS_AT_ONCE = 16


class PartialModel:
    """The model of a checkpoint folder in eval mode and float32, without weights until a part is loaded."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InputError as `skeleton` and `stored_layers` do."""
        transformers_logging.disable_progress_bar()
        self.folder = Path(folder)
        self.model: PreTrainedModel = skeleton(self.folder).float().eval()
        self.model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        _fill_computed_buffers(self.model)
        self._mapping: Any = get_model_conversion_mapping(self.model)
        layers = moe_layers(self.model)
        held = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
        self._experts = {name for name, parameter in self.model.named_parameters() if id(parameter) in held}
        self._stored = {own.layer: own for own in stored_layers(self.model, CheckpointTensors(self.folder))}
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
        """Fill the parameters and buffers whose names start with `prefix`, but not with `without`, and which are
        no matrices of routed experts.

        Raises InputError naming the keys that the checkpoint lacks or has in another shape.
        """

        def inside(name: str) -> bool:
            left_out = name in self._experts or (without is not None and name.startswith(without))
            return name.startswith(prefix) and not left_out

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

    def load_experts(self, number: int) -> MoELayer | None:
        """Fill the matrices of a decoder layer's routed experts; None where the layer has none.

        Raises InputError for weights that are not finite.
        """
        layer = self._moe_layer(number)
        if layer is None:
            return None
        held = {id(parameter) for parameter in layer.experts.parameters()}
        for module in layer.experts.module.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in held:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        layer = self._moe_layer(number)  # views of the new parameters
        assert layer is not None
        views = layer.matrices()
        for matrix in self._stored[number].matrices:
            for first in range(0, layer.num_experts, EXPERTS_AT_ONCE):
                experts = slice(first, min(first + EXPERTS_AT_ONCE, layer.num_experts))
                views[matrix.name][experts].copy_(matrix.read(self.folder, experts))
        return layer

    def _moe_layer(self, number: int) -> MoELayer | None:
        return next((layer for layer in moe_layers(self.model) if layer.layer == number), None)

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
