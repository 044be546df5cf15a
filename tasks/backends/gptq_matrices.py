"""Which matrices a GPTQ run was asked for, and what a GPTQ checkpoint really holds.

Other libraries' quantizers walk over `nn.Linear` modules: experts that transformers keeps as fused 3-D parameters
are skipped without a word. So what was asked for is listed from the model, before any work, and looked up in the
files that were written, by name, shape, dtype and zero point.

A matrix [out, in] of `bits` bits in groups of g along `in` is four tensors: `qweight` int32 [in bits / 32, out],
`qzeros` int32 [in / g, out bits / 32], `scales` float16 [in / g, out], `g_idx` int32 [in]. Symmetric zero points
are 2^(bits - 1), written as such in the format "gptq_v2" and less one in the format "gptq" (v1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tasks.contracts import InputError, read_json
from tasks.moe.headers import StoredTensor, read_headers
from tasks.moe.tensors import CheckpointTensors

Targets = Literal["dense", "experts", "all"]
WORD = 32  # values packed together; sizes must be divisible by it
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # that the library's kernel takes
EXPERTS = "experts"  # a component of the module path of every routed expert
# Components of the path of linear layers that choose or weigh experts: never quantized.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Matrix:
    """One weight matrix that is to be quantized."""

    name: str  # module path, without ".weight"
    shape: tuple[int, int]  # out, in

    def tensors(self, bits: int, group_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of the tensors that hold it, by suffix."""
        rows, columns = self.shape
        groups = columns // group_size
        return {
            "qweight": ("I32", (columns * bits // WORD, rows)),
            "qzeros": ("I32", (groups, rows * bits // WORD)),
            "scales": ("F16", (groups, rows)),
            "g_idx": ("I32", (columns,)),
        }


def kind_of(name: str) -> Targets:
    """Whether a matrix is a routed expert's, by its module path."""
    return "experts" if EXPERTS in name.split(".") else "dense"


def count_kinds(names: Iterable[str]) -> dict[str, int]:
    kinds = [kind_of(name) for name in names]
    return {kind: kinds.count(kind) for kind in ("dense", "experts")}


def quantized_names(folder: Path) -> list[str]:
    """Module paths of the quantized matrices in a GPTQ checkpoint."""
    return sorted(name.removesuffix(".qweight") for name in read_headers(folder) if name.endswith(".qweight"))


def decoder_blocks(model: Any) -> str:
    """Module path of the decoder's list of layers, `model.layers`; raises InputError where there is none."""
    path = f"{model.base_model_prefix}.layers"
    if model.config.is_encoder_decoder or not hasattr(model.base_model, "layers"):
        raise InputError(
            f"{type(model).__name__}: optimum's GPTQ walks over the layers of a decoder-only model, which this is "
            "not; use method gptq of quantize_instances"
        )
    return path


def fused_experts(model: Any) -> dict[str, tuple[int, ...]]:
    """Expert weights that no quantizer of linear layers sees, by parameter name: fused ones [E, ., .], and those of
    experts that are no `nn.Linear`."""
    prefix = f"{decoder_blocks(model)}."
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        alone = EXPERTS in parts and parameter.dim() == 2 and not name.endswith("bias")
        owner = model.get_submodule(".".join(parts[:-1]))
        if name.startswith(prefix) and (parameter.dim() == 3 or (alone and not isinstance(owner, nn.Linear))):
            found[name] = tuple(parameter.shape)
    return found


def linear_matrices(model: Any, targets: Targets) -> list[Matrix]:
    """The linear layers of the decoder's blocks that `targets` names, in the model's order: of attention, dense
    MLPs and shared experts ("dense"), of routed experts that are modules of their own ("experts"), or both.

    Routers, and gates of shared experts, are none of them.
    """
    prefix = f"{decoder_blocks(model)}."
    found = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if not isinstance(module, nn.Linear) or not name.startswith(prefix) or ROUTERS & set(parts):
            continue
        if targets in (kind_of(name), "all"):
            found.append(Matrix(name, (module.out_features, module.in_features)))
    return found


def reading_groups(model: Any, matrices: Sequence[Matrix]) -> list[list[str]]:
    """Names below a block in groups that read the same inputs, in the order of the data's way."""
    prefix = f"{decoder_blocks(model)}."
    names = dict.fromkeys(matrix.name.removeprefix(prefix).split(".", 1)[1] for matrix in matrices)
    ranked: dict[int, list[str]] = {}
    for name in names:
        ranked.setdefault(_rank(name), []).append(name)
    return [ranked[rank] for rank in sorted(ranked)]


def _rank(name: str) -> int:
    """0 what reads the block's input, 1 the second of a low-rank pair, 2 attention's output, 3 what reads the
    MLP's input, 4 its output."""
    last = name.rsplit(".", 1)[-1]
    if "attn" not in name and "attention" not in name:
        return 4 if last in ("down_proj", "w2", "output_linear", "wo") else 3
    return 2 if last in ("o_proj", "out_proj", "dense") else 1 if last.endswith("_b_proj") else 0


def check_defused(fused: Mapping[str, tuple[int, ...]], model: Any) -> None:
    """Raise InputError naming the fused weights of a model that became no linear layers.

    `fused` is what `fused_experts` said before defusing: each weight's values must be in linear layers now.
    """
    left = sorted(fused_experts(model))
    if left:
        raise InputError(
            f"{len(left)} fused expert weights would stay in 16 bits, as the defuser does not know this layout: "
            f"{_few(f'{name} {list(fused[name])}' for name in left)}; use method gptq of quantize_instances"
        )
    values = sum(torch.Size(shape).numel() for shape in fused.values())
    matrices = linear_matrices(model, "experts")
    got = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)
    if got != values:
        raise InputError(
            f"defusing lost expert weights: {values} values in {len(fused)} fused weights, {got} in {len(matrices)} "
            "linear layers"
        )


def check_sizes(matrices: Iterable[Matrix], group_size: int) -> None:
    """Raise InputError listing the matrices whose sizes cannot be packed or grouped."""
    if group_size not in GROUP_SIZES:
        raise InputError(f"group size is {group_size}, expected one of {', '.join(map(str, GROUP_SIZES))}")
    matrices = list(matrices)
    bad = [matrix for matrix in matrices if matrix.shape[0] % WORD or matrix.shape[1] % WORD]
    if bad:
        raise InputError(
            f"{len(bad)} of {len(matrices)} matrices [out, in] have a size that is not divisible by {WORD}, which "
            f"GPTQ's packing needs: {_few(f'{matrix.name} {list(matrix.shape)}' for matrix in bad)}; use "
            "quantize_instances, or other targets"
        )
    bad = [matrix for matrix in matrices if matrix.shape[1] % group_size]
    if bad:
        fitting = [size for size in GROUP_SIZES if not any(matrix.shape[1] % size for matrix in matrices)]
        raise InputError(
            f"group size {group_size} does not divide the input size of {len(bad)} of {len(matrices)} matrices "
            f"[out, in]: {_few(f'{matrix.name} {list(matrix.shape)}' for matrix in bad)}; sizes that would: "
            f"{', '.join(map(str, fitting)) or 'none'}"
        )


def zero_words(bits: int, checkpoint_format: str) -> list[int]:
    """The `bits` int32 words that 32 symmetric zero points of `checkpoint_format` fill."""
    zero = 2 ** (bits - 1) - (checkpoint_format == "gptq")
    stream = sum(zero << (bits * place) for place in range(WORD))
    words = [(stream >> (WORD * place)) & 0xFFFFFFFF for place in range(bits)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def audit_coverage(
    folder: Path, matrices: Iterable[Matrix], bits: int, group_size: int, fused: Iterable[str] = ()
) -> int:
    """Bytes of the quantized `matrices` in the GPTQ checkpoint `folder`; raises InputError naming those that are
    not quantized, not of the expected shape or dtype, or not finite, and quantized ones that nobody asked for.

    `fused` names fused expert weights that were asked for: no checkpoint can hold them quantized under that name.
    """
    headers = read_headers(folder)
    matrices, fused = list(matrices), sorted(fused)
    absent = [matrix.name for matrix in matrices if f"{matrix.name}.qweight" not in headers]
    if absent or fused:
        raise InputError(
            f"{folder}: {len(absent) + len(fused)} of {len(matrices) + len(fused)} matrices that were asked for are "
            f"not quantized: {_few([*(f'{name} (fused experts)' for name in fused), *absent])}"
        )
    asked = {matrix.name for matrix in matrices}
    extra = [name for name in quantized_names(folder) if name not in asked]
    if extra:
        raise InputError(
            f"{folder}: {len(extra)} matrices are quantized that were not asked for: {_few(extra)}"
        )
    size_bytes, bad = 0, []
    for matrix in matrices:
        for suffix, (dtype, shape) in matrix.tensors(bits, group_size).items():
            stored = headers.get(f"{matrix.name}.{suffix}")
            if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
                bad.append(f"{matrix.name}.{suffix} ({_told(stored)}, expected {dtype} {list(shape)})")
            else:
                size_bytes += stored.size_bytes
        bad += [f"{matrix.name}.weight (still there)"] if f"{matrix.name}.weight" in headers else []
    if bad:
        raise InputError(f"{folder}: {len(bad)} tensors are not as asked for: {_few(bad)}")
    _check_values(folder, [matrix.name for matrix in matrices], bits)
    return size_bytes


def _check_values(folder: Path, names: list[str], bits: int) -> None:
    """Finite scales, and zero points as every configuration file of the checkpoint says that they are."""
    tensors = CheckpointTensors(folder)
    wanted = {name: torch.tensor(zero_words(bits, name), dtype=torch.int32) for name in ("gptq", "gptq_v2")}
    declared = declared_formats(folder)
    for name in names:
        if not torch.isfinite(tensors.get(f"{name}.scales")).all():
            raise InputError(f"{folder}: {name}.scales holds NaN or infinity")
        zeros = tensors.get(f"{name}.qzeros").reshape(-1, bits)
        held = [label for label, words in wanted.items() if bool((zeros == words).all())]
        if not held or any(label not in held for label in declared.values()):
            raise InputError(
                f"{folder}: {name}.qzeros are of the format {held[0] if held else 'of no symmetric zero point'}, but "
                f"{' and '.join(f'{file} says {label}' for file, label in declared.items())}: every weight would be "
                "read off by one step"
            )


def declared_formats(folder: Path) -> dict[str, str]:
    """The format that each configuration file of a GPTQ checkpoint declares, by file name."""
    found = {}
    for file in ("config.json", "quantize_config.json"):
        if (folder / file).is_file():
            values = read_json(folder / file)
            section = values.get("quantization_config", {}) if file == "config.json" else values
            # transformers lets the older name win where both are there
            found[file] = section.get("checkpoint_format") or section.get("format") or "gptq"
    return found


def _told(stored: StoredTensor | None) -> str:
    return "absent" if stored is None else f"{stored.dtype} {list(stored.shape)}"


def _few(names: Iterable[str], count: int = 6) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:count]) + (f", and {len(names) - count} more" if len(names) > count else "")
