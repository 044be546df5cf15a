"""Dense packing of codes along the input axis into int32 words: 32 codes of b bits in b words, without gaps.

The layout is compressed-tensors' `pack-quantized`, packed and unpacked by that library.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32


def packed_words(width: int, num_bits: int) -> int:
    """int32 words of a packed row of `width` codes."""
    return -(-width * num_bits // 32)


def pack(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[..., in] uint8 codes 0 .. 2^b − 1 -> [..., words] int32."""
    width = codes.shape[-1]
    signed = (codes.reshape(-1, width).to(torch.int16) - 2 ** (num_bits - 1)).to(torch.int8)
    return pack_to_int32(signed, num_bits).view(*codes.shape[:-1], -1)


def unpack(words: torch.Tensor, num_bits: int, width: int) -> torch.Tensor:
    """[..., words] int32 -> [..., width] uint8 codes."""
    flat = words.reshape(-1, words.shape[-1])
    signed = unpack_from_int32(flat, num_bits, torch.Size((len(flat), width)))
    return (signed.to(torch.int16) + 2 ** (num_bits - 1)).to(torch.uint8).view(*words.shape[:-1], width)
