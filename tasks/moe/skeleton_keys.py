"""What a checkpoint of a model must hold: every tensor of the model's skeleton under the names of checkpoints, sorted
by what it is for.

Family-free: modules tell what they are, and transformers' own conversions tell how checkpoints name and split them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.contracts import InputError, LayerPlan
from tasks.moe.registry import moe_layers

EXPERT, ROUTER, EMBEDDING, OTHER = "routed experts", "routers", "embeddings", "norms and biases"
ATTENTION, SHARED, DENSE = "attention", "shared experts", "dense layers"
LINEAR = (ATTENTION, SHARED, DENSE)
KINDS = (EXPERT, *LINEAR, ROUTER, EMBEDDING, OTHER)
_ROUTERS = ("gate", "router", "shared_expert_gate")  # names of modules beside a layer's experts

# Computed anew by every model; scales of a quantized key-value cache.
_HARMLESS = (r"\.rotary_emb\.inv_freq$", r"\.[qkv]_scale$")

Shapes = dict[str, tuple[int, ...]]  # base (a tensor's name without ".weight") -> shape


@dataclass(frozen=True)
class Expected:
    """Tensors of one kind in one layer, under each of the sets of names that checkpoints give them."""

    kind: str
    layer: str  # such as "model.layers.3"; empty outside the layers
    forms: tuple[Shapes, ...]

    def best(self, present: Mapping[str, object]) -> Shapes:
        """The form of which the largest share is present; the first of equals."""
        return max(self.forms, key=lambda form: sum(base in present for base in form) / len(form))


@dataclass(frozen=True)
class Keys:
    """All that a model's checkpoint must and may hold."""

    expected: list[Expected]
    aliases: dict[str, frozenset[str]] = field(default_factory=dict)  # base -> bases of tensors tied to it
    ignored: tuple[re.Pattern[str], ...] = ()  # names that may be absent, or too many
    bits: dict[str, int] = field(default_factory=dict)  # base -> planned bits, in a variant

    def is_ignored(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self.ignored)


def base_of(name: str) -> str:
    """A floating tensor's base: its name without `.weight`."""
    return name.removesuffix(".weight")


def layer_of(base: str) -> str:
    """The part of a name up to its first number, such as "model.layers.3"; empty where there is none."""
    found = re.match(r"^(.*?\.\d+)(?:\.|$)", base)
    return found[1] if found else ""


def kind_by_name(base: str, dimensions: int) -> str:
    """The kind of a tensor of a model whose classes are not at hand, by common names."""
    parts = base.split(".")
    if "experts" in parts:
        return EXPERT if dimensions > 1 else OTHER
    if parts[-1] in _ROUTERS or "router" in parts or "gate_network" in parts:
        return ROUTER
    if dimensions < 2:
        return OTHER
    if parts[-1] in ("embed_tokens", "lm_head", "wte", "wpe", "shared", "embed_out"):
        return EMBEDDING
    return _linear_kind(base)


def _linear_kind(base: str) -> str:
    if re.search(r"attn|attention", base, re.IGNORECASE):
        return ATTENTION
    return SHARED if re.search(r"shared_(expert|mlp)", base) else DENSE


def model_keys(model: PreTrainedModel) -> Keys:
    """What a checkpoint of `model`, which may be on the meta device, must hold."""
    state = model.state_dict()
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    groups = [names for names in tied.values() if len(names) > 1]
    extra = {name for names in groups for name in names[1:]}
    aliases = {base_of(name): frozenset(map(base_of, names)) for names in groups for name in names}
    by_kind: dict[str, dict] = {}
    for name, kind in _kinds(model, state).items():
        if name not in extra:
            by_kind.setdefault(kind, {})[name] = state[name]
    own = _expert_forms(model)
    expected = []
    for kind, tensors in by_kind.items():
        stored, modules = _by_layer(revert_weight_conversion(model, tensors)), _by_layer(tensors)
        for layer, form in stored.items():
            forms = [form, modules.get(layer, form)]
            if kind == EXPERT and layer in own:
                forms.append(own[layer])
            expected.append(Expected(kind, layer, tuple(forms)))
    expected.sort(key=lambda item: KINDS.index(item.kind))
    return Keys(expected, aliases, _ignored(model))


def compare_keys(
    keys: Keys, stored: Mapping[str, object]
) -> tuple[list[str], list[str], dict[str, tuple[str, tuple[int, ...]]]]:
    """Missing and unexpected bases, and the kind and shape of those that are there and belong."""
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    missing, biases = [], set()
    for item in keys.expected:
        form = item.best(stored)
        for base, shape in form.items():
            present = [name for name in keys.aliases.get(base, {base}) if name in stored]
            known |= dict.fromkeys(present, (item.kind, shape))
            if not present and not keys.is_ignored(base):
                missing.append(base)
        if item.kind == EXPERT:
            biases |= {f"{base}.bias" for base in form} & stored.keys()
    if biases:  # a tool that splits fused experts splits their biases too
        missing = [base for base in missing if not (".experts." in base and base.endswith("_bias"))]
    unexpected = [
        base for base in stored if base not in known and base not in biases and not keys.is_ignored(base)
    ]
    return sorted(missing), sorted(unexpected), known


def variant_keys(model: PreTrainedModel, plan: list[LayerPlan]) -> Keys:
    """What a variant's own file must hold: the physical experts that its plan quantizes."""
    expected, planned = [], {}
    for layer, own in zip(moe_layers(model), plan, strict=True):
        shapes = {}
        for matrix, view in layer.matrices().items():
            for physical, bits in enumerate(own.bits):
                if bits:
                    key = layer.key(physical, matrix)
                    shapes[key], planned[key] = tuple(view.shape[1:]), bits
        if shapes:
            expected.append(Expected(EXPERT, layer_of(layer.stored), (shapes,)))
    return Keys(expected, bits=planned)


def _kinds(model: PreTrainedModel, state: Mapping) -> dict[str, str]:
    modules = dict(model.named_modules())
    experts = [f"{name}." for name in modules if name.rpartition(".")[2] == "experts"]
    routers = tuple(
        f"{name}."
        for name in modules
        for block, _, last in [name.rpartition(".")]
        if last in _ROUTERS and any(own.startswith(f"{block}.") for own in experts)
    )
    heads = {id(model.get_output_embeddings())} - {id(None)}
    kinds = {}
    for name, tensor in state.items():
        owner = modules[name.rpartition(".")[0]]
        linear = isinstance(owner, nn.Linear) and tensor.dim() == 2
        if name.startswith(tuple(experts)):
            kinds[name] = EXPERT if tensor.dim() == 3 or linear else OTHER
        elif name.startswith(routers):
            kinds[name] = ROUTER
        elif isinstance(owner, nn.Embedding) or id(owner) in heads:
            kinds[name] = EMBEDDING
        else:
            kinds[name] = _linear_kind(name) if linear else OTHER
    return kinds


def _expert_forms(model: PreTrainedModel) -> dict[str, Shapes]:
    """Layer -> the names that this project gives to the experts of a family it knows."""
    try:
        layers = moe_layers(model)
    except InputError:
        return {}  # another family: transformers' names alone
    return {
        layer_of(layer.stored): {
            key: tuple(view.shape[1:])
            for matrix, view in layer.matrices().items()
            for key in layer.keys(matrix)
        }
        for layer in layers
    }


def _by_layer(tensors: Mapping) -> dict[str, Shapes]:
    layers: dict[str, Shapes] = {}
    for name, tensor in tensors.items():
        layers.setdefault(layer_of(name), {})[base_of(name)] = tuple(tensor.shape)
    return layers


def _ignored(model: PreTrainedModel) -> tuple[re.Pattern[str], ...]:
    names = ("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing")
    return tuple(
        re.compile(pattern) for name in names for pattern in sorted(getattr(model, name, None) or ())
    )
