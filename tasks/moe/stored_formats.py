"""How a matrix is stored, by whichever tool: told from tensor names, dtypes and shapes in the files' headers.

A matrix `model.layers.1.mlp.experts.0.up_proj` (its *base*) is one tensor in floating point, or codes with their
scales under names that every format chose for itself. What fits no format is called unknown, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.moe.headers import DTYPE_BITS, StoredTensor

FLOATING, UNKNOWN = "floating point", "unknown"
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
CHUNK_BYTES = 2**24  # read at once
# Names of the parts of a quantized matrix. Some are words that a module could be called too: those count only beside
# the tensor of codes that they belong to.
_OWN = (
    "weight_packed", "weight_scale_inv", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight_global_scale", "input_global_scale", "qweight", "qzeros", "g_idx", "W_q", "weight._data._data",
    "weight._data", "weight._scale", "weight._shift", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
    "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB",
    "weight_format", "weight",
)  # fmt: skip
_BESIDE = ("scales", "input_scale", "output_scale", "activation_scale", "input_zero_point", "biases")
_CODES = ("weight", "weight_packed", "qweight", "W_q", "weight._data", "weight._data._data")
_STACK = (
    "_blocks",
    "_scales",
    "_scale_inv",
    "_scale",
)  # of one parameter of all experts, such as gate_up_proj_blocks
_SPLIT = re.compile(rf"^(.+)\.({'|'.join(re.escape(part) for part in _OWN)})$")
_BESIDE_SPLIT = re.compile(rf"^(.+)\.({'|'.join(_BESIDE)})$")


@dataclass(frozen=True)
class Storage:
    """How one matrix, or one stack of them, is stored."""

    format: str
    bits: int | None  # of a value; None where unknown
    group_size: int | None  # inputs that share a scale, 0: a whole row; None: no scales, or unknown
    values: int  # weights
    stored_bytes: int  # of all its tensors
    expected_bytes: float  # bits x values, and its scales and zero points
    fault: str = ""  # why it cannot be used as it is

    @property
    def quantized(self) -> bool:
        return self.format not in (FLOATING, UNKNOWN)


class Files:
    """The bytes of a folder's tensors, read in pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pieces(self, tensor: StoredTensor, size: int = CHUNK_BYTES):
        """Bytes [<= size] uint8 of a tensor, one piece after the other."""
        with (self.folder / tensor.file).open("rb") as file:
            for start in range(0, tensor.size_bytes, size):
                count = min(size, tensor.size_bytes - start)
                yield np.fromfile(file, np.uint8, count, offset=tensor.start if start == 0 else 0)

    def integers(self, tensor: StoredTensor) -> np.ndarray:
        """A small tensor of integers, flat."""
        dtype = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1", "U32": "<u4"}[tensor.dtype]
        return np.concatenate([*self.pieces(tensor), np.zeros(0, np.uint8)]).view(dtype)

    def not_finite(self, tensor: StoredTensor) -> int:
        """How many values of a floating tensor are NaN or infinite; 0 for other tensors."""
        return sum(_not_finite(piece, tensor.dtype) for piece in self.pieces(tensor))


def _not_finite(piece: np.ndarray, dtype: str) -> int:
    if dtype in ("F64", "F32", "F16"):
        return int((~np.isfinite(piece.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]))).sum())
    if dtype == "BF16":
        return int(((piece.view("<u2") & 0x7F80) == 0x7F80).sum())  # all exponent bits set
    if dtype == "F8_E5M2":
        return int(((piece & 0x7C) == 0x7C).sum())
    if dtype == "F8_E4M3":
        return int(((piece & 0x7F) == 0x7F).sum())  # its only NaN; it has no infinity
    if dtype in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        return int((piece == 0x80).sum())
    return int((piece == 0xFF).sum()) if dtype == "F8_E8M0" else 0


def group_parts(headers: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Base -> part name -> tensor; the part of a tensor that stands for itself is ""."""
    hqq = {name.removesuffix(".W_q") for name in headers if name.endswith(".W_q")}
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in headers.items():
        base, part = _split(name, headers, hqq)
        groups.setdefault(base, {})[part] = tensor
    return groups


def _split(name: str, headers: Mapping[str, StoredTensor], hqq: set[str]) -> tuple[str, str]:
    base, _, last = name.rpartition(".")
    if base in hqq and last != "bias":
        return base, last
    if found := _SPLIT.match(name):
        return found[1], found[2]
    found = _BESIDE_SPLIT.match(name)
    if found and any(f"{found[1]}.{codes}" in headers for codes in _CODES):
        return found[1], found[2]
    for ending in _STACK:
        own = name.removesuffix(ending)
        if own != name and (own in headers or f"{own}_blocks" in headers):
            return own, ending
    return name, ""


def storage(
    parts: Mapping[str, StoredTensor], shape: tuple[int, ...] | None, declared: int | None, files: Files
) -> Storage:
    """How the tensors `parts` of one base store a matrix.

    `shape` [out, in] or [E, out, in] is what the model says, if it is known; `declared` the bits that the
    checkpoint's configuration declares, which decide only between readings that the tensors allow.
    """
    stored = sum(tensor.size_bytes for tensor in parts.values())
    found = _recognise(parts, shape, declared, files)
    if found is None or not 1 <= found[1] <= 64:
        values = int(np.prod(shape)) if shape else sum(tensor.elements for tensor in parts.values())
        return Storage(UNKNOWN, None, None, values, stored, stored, f"not recognised: {_names(parts)}")
    name, bits, group_size, values, scales = found
    side = sum(parts[part].size_bytes for part in scales if part in parts)
    lacking = [part for part in scales if part not in parts]
    fault = f"'{lacking[0]}' is absent" if lacking else ""
    if shape and values != int(np.prod(shape)):
        fault = f"holds {values} values, the model has {int(np.prod(shape))}"
    return Storage(name, bits, group_size, values, stored, values * bits / 8 + side, fault)


def _names(parts: Mapping[str, StoredTensor]) -> str:
    return ", ".join(f"{part or 'itself'} {tensor.dtype}" for part, tensor in sorted(parts.items()))


# format, bits, group size, values, parts that hold scales and zero points and must be there
Reading = tuple[str, int, int | None, int, tuple[str, ...]]


def _recognise(parts, shape, declared, files) -> Reading | None:
    if "" in parts and len(parts) == 1:
        tensor = parts[""]
        return (
            (FLOATING, DTYPE_BITS[tensor.dtype], None, tensor.elements, ())
            if tensor.dtype in FLOATS
            else None
        )
    for read in (_packed, _gptq_or_awq, _hqq, _quanto, _blocks, _weight):
        if found := read(parts, shape, declared, files):
            return found
    return None


def _group(width: int, groups: int) -> int | None:
    """Inputs per scale; 0 for one group a row, None where the groups do not divide the row."""
    if groups == 1:
        return 0
    return width // groups if groups and width % groups == 0 else None


def _packed(parts, shape, declared, files) -> Reading | None:
    """compressed-tensors: pack-quantized (int32 words), nvfp4 and mxfp4 (two codes a byte)."""
    codes, scale = parts.get("weight_packed"), parts.get("weight_scale")
    if codes is None:
        return None
    if codes.dtype == "U8":
        kind = "nvfp4" if "weight_global_scale" in parts else "mxfp4"
        width = 2 * codes.shape[-1]
        group = _group(width, scale.shape[-1]) if scale else None
        return kind, 4, group, 2 * codes.elements, ("weight_scale",)
    if codes.dtype != "I32":
        return None
    if "weight_shape" in parts:
        full = tuple(int(size) for size in files.integers(parts["weight_shape"]))
    elif shape:
        full = shape
    else:
        return None
    width, words = full[-1], codes.shape[-1]
    possible = [bits for bits in range(1, 9) if -(-width * bits // 32) == words]
    if declared in possible:
        bits = declared
    elif len(possible) == 1:
        bits = possible[0]
    else:
        return None  # not these words for this row, or several widths fit a short row
    group = _group(width, scale.shape[-1]) if scale and len(scale.shape) > 1 else 0
    zero = tuple(part for part in ("weight_zero_point",) if part in parts)
    return "pack-quantized", bits, group, int(np.prod(full)), ("weight_scale", *zero)


def _gptq_or_awq(parts, shape, declared, files) -> Reading | None:
    """GPTQ packs along the inputs, qweight [in·b/32, out]; AWQ along the outputs, [in, out·b/32]."""
    codes, scales = parts.get("qweight"), parts.get("scales")
    if codes is None or codes.dtype != "I32" or len(codes.shape) != 2:
        return None
    sides = ("scales", "qzeros")
    if scales is None:
        bits = declared
        return ("gptq", bits, None, codes.elements * 32 // bits, sides) if bits else None
    if len(scales.shape) != 2:
        return None
    rows, columns = codes.shape
    groups, outputs = scales.shape
    if columns == outputs:
        width = parts["g_idx"].elements if "g_idx" in parts else (shape[-1] if shape else None)
        if width is None and declared:
            width = rows * 32 // declared
        if not width or rows * 32 % width:
            return None
        bits = rows * 32 // width
        return ("gptq", bits, _group(width, groups), width * outputs, sides) if bits <= 8 else None
    bits = columns * 32 // outputs if outputs and columns * 32 % outputs == 0 else 0
    return ("awq", bits, _group(rows, groups), rows * outputs, sides) if 1 <= bits <= 8 else None


def _hqq(parts, shape, declared, files) -> Reading | None:
    codes = parts.get("W_q")
    if codes is None:
        return None
    if "nbits" in parts:
        bits = int(files.integers(parts["nbits"])[0]) if parts["nbits"].dtype[0] in "IU" else None
    else:
        bits = declared
    if not bits:
        return None
    if "shape" in parts and parts["shape"].dtype[0] in "IU":
        values = int(np.prod(files.integers(parts["shape"])))
    else:
        values = int(np.prod(shape)) if shape else codes.size_bytes * 8 // bits
    group = None
    if "scale" in parts and parts["scale"].elements and values % parts["scale"].elements == 0:
        group = values // parts["scale"].elements
    return "hqq", bits, group, values, ("scale", "zero")


def _quanto(parts, shape, declared, files) -> Reading | None:
    whole, packed = parts.get("weight._data"), parts.get("weight._data._data")
    codes = whole or packed
    if codes is None:
        return None
    scale = parts.get("weight._scale")
    values = codes.elements
    if packed is None:
        if codes.dtype not in ("I8", *FP8):
            return None
        bits, sides = 8, ("weight._scale",)
    else:
        if not shape:
            return None
        values, sides = int(np.prod(shape)), ("weight._scale", "weight._shift")
        bits = codes.size_bytes * 8 // values
        if codes.dtype != "U8" or bits not in (2, 4) or codes.size_bytes * 8 != values * bits:
            return None
    group = values // scale.elements if scale and scale.elements and values % scale.elements == 0 else None
    return "quanto", bits, 0 if shape and group == shape[-1] else group, values, sides


def _blocks(parts, shape, declared, files) -> Reading | None:
    """MXFP4 as GPT-OSS stores it: blocks [E, out, in / 32, 16] of two codes a byte, scales [E, out, in / 32];
    and a stack of all experts in 8-bit floats."""
    codes = parts.get("_blocks")
    if codes is not None:
        return ("mxfp4", 4, 32, 2 * codes.elements, ("_scales",)) if codes.dtype == "U8" else None
    codes = parts.get("")
    scale = next((part for part in ("_scale_inv", "_scale", "_scales") if part in parts), None)
    if codes is None or scale is None or codes.dtype not in FP8:
        return None
    return "fp8", 8, None, codes.elements, (scale,)


def _weight(parts, shape, declared, files) -> Reading | None:
    """One `weight` tensor: floating, 8-bit codes with a scale, or bitsandbytes."""
    codes = parts.get("weight")
    if codes is None:
        return None
    if any(part.startswith("weight.quant_state.bitsandbytes__") for part in parts) and codes.dtype == "U8":
        values = 2 * codes.elements
        absmax = parts.get("weight.absmax")
        return "bitsandbytes", 4, values // absmax.elements if absmax else None, values, ("weight.absmax",)
    if "SCB" in parts and codes.dtype == "I8":
        return "bitsandbytes", 8, 0, codes.elements, ("SCB",)
    if codes.dtype in FLOATS and not set(parts) - {
        "weight",
        "input_scale",
        "output_scale",
        "activation_scale",
    }:
        return FLOATING, DTYPE_BITS[codes.dtype], None, codes.elements, ()
    scale = next((part for part in ("weight_scale_inv", "weight_scale") if part in parts), None)
    if codes.dtype not in ("I8", *FP8):
        return None
    if scale is None:
        return ("fp8", 8, None, codes.elements, ("weight_scale",)) if codes.dtype in FP8 else None
    width, tensor = codes.shape[-1], parts[scale]
    if len(tensor.shape) == len(codes.shape) > 1 and tensor.shape[-2] == codes.shape[-2]:
        group = _group(width, tensor.shape[-1])
    else:
        group = None  # one scale for all, or blocks of several rows
    if codes.dtype in FP8:
        return "fp8", 8, group, codes.elements, (scale,)
    zero = tuple(part for part in ("weight_zero_point",) if part in parts)
    bits = declared if declared and declared <= 8 else 8
    return "int-quantized", bits, group, codes.elements, (scale, *zero)


def gptq_zero_codes(parts: Mapping[str, StoredTensor], bits: int, files: Files) -> np.ndarray:
    """The zero points of a GPTQ matrix as stored: flat codes, from a contiguous bit stream along the outputs."""
    tensor = parts["qzeros"]
    words = files.integers(tensor).view(np.uint8).reshape(tensor.shape[0], -1)
    stream = np.unpackbits(words, axis=1, bitorder="little")
    stream = stream[:, : stream.shape[1] // bits * bits].reshape(tensor.shape[0], -1, bits)
    return (stream * (1 << np.arange(bits))).sum(axis=2)
