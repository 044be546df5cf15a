"""Matrices as other tools store them, and checkpoints whose experts are stored so, for tests of audits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from tasks import quantize_instances
from tasks.moe.audit import Audit
from tasks.params import load_params
from tests.seeded_models import seeded_checkpoint

Parts = dict[str, torch.Tensor]  # what follows the matrix's path -> tensor
Store = Callable[[torch.Tensor], Parts]
ROOT = Path(__file__).parents[1]
ROUTED = r"\.experts\.\d+\.\w+$"


def half(folder: Path, family: str = "qwen3_moe", **overrides: object) -> Path:
    """A seeded checkpoint in bfloat16, as real ones are."""
    seeded_checkpoint(folder, family, **overrides)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def instance(reference: Path, out: Path, bits: int = 4, symmetric: bool = False) -> Path:
    """An instance of ours, by rtn in groups of 32."""
    section = load_params(ROOT / "params.yaml").quantize_instances
    values = {"method": "rtn", "group_size": 32, "symmetric": symmetric}
    quantize_instances.run(reference, out, bits, section.model_copy(update=values))
    return out


def rewrite(folder: Path, out: Path, store: Store, which: str = ROUTED, **quantization: object) -> Path:
    """A copy of a checkpoint in one file whose matrices matching `which` are stored by `store`."""
    out.mkdir(parents=True)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if re.search(which, base):
            tensors |= {f"{base}{part}": value.contiguous() for part, value in store(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return out


def change(folder: Path, edit: Callable[[Parts], object]) -> None:
    """Edit the tensors of a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compressed(form: str, num_bits: int, group: int = 32, symmetric: bool = True, kind: str = "int") -> Store:
    """By compressed-tensors' own compressor: pack-quantized, int-quantized, float-quantized, naive-quantized."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=num_bits, type=kind, symmetric=symmetric, dynamic=False, **strategy
        ),
        format=form,
    )

    def store(weight: torch.Tensor) -> Parts:
        groups = weight.shape[1] // group if group else 1
        peak = weight.reshape(len(weight), groups, -1).abs().amax(-1)
        state = {"weight": weight, "weight_scale": peak / (448 if kind == "float" else 2 ** (num_bits - 1))}
        if not symmetric:
            state["weight_zero_point"] = torch.zeros(peak.shape, dtype=torch.int8)
        packed = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
        return {f".{part}": tensor for part, tensor in packed.items()}

    return store


def bit_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] codes -> [rows, n * bits / 32] int32 words: one code after the other, low bits first."""
    ones = (codes[..., None] >> torch.arange(bits)) & 1
    words = ones.reshape(len(codes), -1, 32).to(torch.int64) << torch.arange(32)
    return words.sum(-1).to(torch.int32)


def gptq(bits: int, group: int, zero: int) -> Store:
    """GPTQ: packed along the inputs; `zero` is the stored code of a symmetric zero point."""

    def store(weight: torch.Tensor) -> Parts:
        out, width = weight.shape
        codes = (weight.float() * 2).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)
        zeros = torch.full((width // group, out), zero)
        return {
            ".qweight": bit_stream(codes.long(), bits).T,
            ".qzeros": bit_stream(zeros, bits),
            ".scales": torch.full((width // group, out), 0.5, dtype=torch.float16),
            ".g_idx": (torch.arange(width) // group).to(torch.int32),
        }

    return store


def awq(weight: torch.Tensor) -> Parts:
    """AWQ, 4 bits in groups of 32: packed along the outputs."""
    out, width = weight.shape
    return {
        ".qweight": torch.zeros(width, out // 8, dtype=torch.int32),
        ".qzeros": torch.zeros(width // 32, out // 8, dtype=torch.int32),
        ".scales": torch.ones(width // 32, out, dtype=torch.float16),
    }


def hqq(weight: torch.Tensor) -> Parts:
    """HQQ, 4 bits in groups of 32, two codes a byte, with its settings as tensors beside."""
    groups = weight.numel() // 32
    return {
        ".W_q": torch.zeros(groups // 2, 32, dtype=torch.uint8),
        ".scale": torch.ones(groups, 1, dtype=torch.float16),
        ".zero": torch.zeros(groups, 1, dtype=torch.float16),
        ".nbits": torch.tensor(4, dtype=torch.int32),
        ".group_size": torch.tensor(32, dtype=torch.int32),
        ".axis": torch.tensor(1, dtype=torch.int32),
        ".shape": torch.tensor(weight.shape, dtype=torch.int64),
        ".packing": torch.tensor([ord(letter) for letter in "4bit_u8"], dtype=torch.uint8),
    }


def quanto(weight: torch.Tensor) -> Parts:
    """optimum-quanto's qint4 in groups of 32."""
    groups = weight.numel() // 32
    return {
        ".weight._data._data": torch.zeros(groups // 2, 32, dtype=torch.uint8),
        ".weight._scale": torch.ones(groups, 1, dtype=torch.bfloat16),
        ".weight._shift": torch.zeros(groups, 1, dtype=torch.bfloat16),
        ".input_scale": torch.ones(()),
        ".output_scale": torch.ones(()),
    }


def quanto_int8(weight: torch.Tensor) -> Parts:
    return {
        ".weight._data": torch.zeros(weight.shape, dtype=torch.int8),
        ".weight._scale": torch.ones(len(weight), 1, dtype=torch.bfloat16),
    }


def nf4(weight: torch.Tensor) -> Parts:
    """bitsandbytes' NF4 in blocks of 64."""
    return {
        ".weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        ".weight.absmax": torch.ones(weight.numel() // 64),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        ".weight.quant_state.bitsandbytes__nf4": torch.zeros(80, dtype=torch.uint8),
    }


def int8_bitsandbytes(weight: torch.Tensor) -> Parts:
    return {
        ".weight": torch.zeros(weight.shape, dtype=torch.int8),
        ".SCB": torch.ones(len(weight)),
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def block_fp8(weight: torch.Tensor) -> Parts:
    """DeepSeek-V3's 8-bit floats: one scale for a block of 128 x 128."""
    return {".weight": weight.to(torch.float8_e4m3fn), ".weight_scale_inv": torch.ones(1, 1)}


def mlx(weight: torch.Tensor) -> Parts:
    """A format that audits do not know: unsigned words, scales and biases."""
    return {
        ".weight": torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.uint32),
        ".scales": torch.ones(len(weight), 1, dtype=torch.bfloat16),
        ".biases": torch.zeros(len(weight), 1, dtype=torch.bfloat16),
    }


def mxfp4(weight: torch.Tensor) -> Parts:
    """GPT-OSS's blocks of a fused stack [E, in, out]: two codes a byte, a power of two for 32 values."""
    experts, width, out = weight.shape
    return {
        "_blocks": torch.zeros(experts, out, width // 32, 16, dtype=torch.uint8),
        "_scales": torch.full((experts, out, width // 32), 127, dtype=torch.uint8),
    }


def formats_found(result: Audit) -> dict[str, set[tuple[str, int | None]]]:
    """Kind of matrix -> the formats and bits in which an audit found them."""
    found: dict[str, set[tuple[str, int | None]]] = {}
    for finding in result.findings:
        found.setdefault(finding.kind, set()).add((finding.storage.format, finding.storage.bits))
    return found
