"""What the code must know of a model family, as data: module paths, checkpoint keys, how the router scores.

`tasks/moe/registry.py` lists the families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from tasks.contracts import InputError
from tasks.moe.experts import Experts
from tasks.moe.fused import FusedExperts, check_layout
from tasks.moe.modules import ModuleExperts

GATED = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


@dataclass(frozen=True)
class Fused:
    """Where one matrix of all experts of a layer lies inside one tensor of the checkpoint."""

    name: str  # of the tensor, below the block as checkpoints name it
    rows: Literal["all", "first half", "second half", "even", "odd"] = "all"  # of the outputs
    transposed: bool = False  # stored as [E, in, out]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[E, out, in] view of the stored tensor."""
        stack = tensor.transpose(1, 2) if self.transposed else tensor
        half = stack.shape[1] // 2
        part = {
            "all": slice(None),
            "first half": slice(half),
            "second half": slice(half, None),
            "even": slice(0, None, 2),
            "odd": slice(1, None, 2),
        }[self.rows]
        return stack[:, part]


def adapt(module: Any, name: str, family: Family) -> Experts:
    """The experts protocol over a layer's experts module, by its type.

    Raises InputError naming module and flag or part for a layout that is not understood.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return ModuleExperts(module, name, family.matrices, family.activation)
    check_layout(module, name)
    return FusedExperts(module)


def _first_output(output: Any) -> torch.Tensor:
    return output[0]


def _weight(router: Any) -> torch.Tensor:
    return router.weight.data


def _top_k(router: Any) -> int:
    return router.top_k


def plain_head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The lm_head alone, for families that do nothing else after the last norm."""
    return model.get_output_embeddings()(hidden)


@dataclass(frozen=True)
class Family:
    """One model family. `{}` in a path numbers the layers of a stack.

    Most families are described by names alone; the functions are for those that compute otherwise.
    """

    blocks: tuple[str, ...] = ("model.layers.{}.mlp",)  # module paths of MoE blocks, an encoder's first
    stored: tuple[str, ...] | None = None  # the blocks as checkpoints name them, in this order; None: alike
    router: str = "gate"  # below the block
    experts: str = "experts"  # below the block
    key: str = "experts.{expert}.{matrix}"  # of one expert's matrix, below the stored block
    suffix: str = ".weight"  # from a key to the name of the checkpoint's tensor
    # Our name of a matrix -> the checkpoint's, and that of an expert module's Linear.
    matrices: Mapping[str, str] = field(default_factory=lambda: dict(GATED))
    fused: Mapping[str, Fused] | None = None  # for checkpoints that hold a layer's experts in one tensor
    activation: str = "act_fn"  # of experts that are modules
    adapt: Callable[[Any, str, Family], Experts] = adapt
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the logits
    logits: Callable[[Any], torch.Tensor] = _first_output  # the router's output -> [..., E]
    rows: Callable[[Any], torch.Tensor] = _weight  # the router -> [E, H]
    top_k: Callable[[Any], int] = _top_k  # of the router
    head: Callable[[Any, torch.Tensor], torch.Tensor] = plain_head  # model, hidden [T, H] -> logits [T, V]
    not_exportable: str | None = None  # why no loader reads quantized experts of this family; None: one does

    def pattern(self) -> str:
        """A regular expression that matches every layer's `keys` and nothing else."""
        names = "|".join(self.matrices.values())
        below = re.escape(self.key).replace(r"\{expert\}", r"\d+").replace(r"\{matrix\}", f"(?:{names})")
        blocks = [re.escape(block).replace(r"\{\}", r"\d+") for block in self.stored or self.blocks]
        whole = blocks[0] if len(blocks) == 1 else f"(?:{'|'.join(blocks)})"
        return rf"{whole}\.{below}$"

    def tensors(self, layer: MoELayer, matrix: str) -> list[str]:
        """Names of the checkpoint's tensors that hold a matrix of a layer's experts: [E], or one if fused."""
        if self.fused is None:
            return [f"{key}{self.suffix}" for key in layer.keys(matrix)]
        return [f"{layer.stored}.{self.fused[matrix].name}"]


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer: its router, its routed experts, and views of their weights. Shared experts are no part
    of it."""

    layer: int  # index among all layers in depth order, dense ones counted; an encoder's come first
    name: str  # module path of the MoE block
    stored: str  # the block's path in the checkpoint
    router: Any  # nn.Module
    experts: Experts
    num_experts: int  # E
    top_k: int  # k
    router_temperature: float  # logits / temperature are the unflattened logits
    family: Family

    def matrices(self) -> dict[str, torch.Tensor]:
        """[E, out, in] views per matrix name; writing to one writes to the model."""
        return self.experts.matrices()

    def router_rows(self) -> torch.Tensor:
        """[E, H] the router's row of each expert."""
        return self.family.rows(self.router)

    def key(self, expert: int, matrix: str) -> str:
        """A matrix's module path, such as `model.layers.1.mlp.experts.0.gate_proj`, under which an instance
        (by logical number) and a variant (by physical number) store it."""
        own = self.family.key.format(expert=expert, matrix=self.family.matrices[matrix])
        return f"{self.stored}.{own}"

    def keys(self, matrix: str) -> list[str]:
        """[E] `key` of every expert."""
        return [self.key(expert, matrix) for expert in range(self.num_experts)]

    def tensors(self, matrix: str) -> list[str]:
        """Names of the reference checkpoint's tensors that hold a matrix of the experts: [E], or one if fused."""
        return self.family.tensors(self, matrix)

    def gate_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The router's score of each expert, summing to one over all E: logits [..., E] -> [..., E] float32.

        Softmax of the unflattened logits; for a router that scores with sigmoids (DeepSeek-V3,
        arXiv:2412.19437, eq. 15), the sigmoids divided by their sum.
        """
        unflattened = logits.float() / self.router_temperature
        if self.family.scores == "softmax":
            return torch.softmax(unflattened, dim=-1)
        scores = torch.sigmoid(unflattened)
        return scores / scores.sum(dim=-1, keepdim=True)


def check_stored(names: Iterable[str], origin: str) -> None:
    """Raise InputError when a checkpoint's tensor names tell that its weights are quantized already."""
    for name in names:
        if name.endswith(("_blocks", "_scales")):
            raise InputError(
                f"{origin} holds '{name}': its experts are stored as MXFP4 blocks; expected plain weights: load "
                "it once with transformers' Mxfp4Config(dequantize=True), call save_pretrained on the model, and "
                "use that folder"
            )
        if name.endswith((".weight_scale_inv", ".weight_packed", ".qweight")):
            raise InputError(
                f"{origin} holds '{name}': it is quantized already; expected plain weights in bfloat16, float16 "
                "or float32: dequantize it and save it anew, or take the unquantized release"
            )
