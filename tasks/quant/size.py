"""Bytes of quantized matrices: what ideal packing needs, and what the stored tensors take."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tasks.quant.grid import Grid, QuantizedMatrix, dequantize
from tasks.quant.pack import packed_words
from tasks.quant.threads import side_by_side

SIDE_BITS = 16  # of a scale, and of a zero point


def ideal_bytes(shape: tuple[int, int, int], grid: Grid) -> float:
    """Bytes of a stack [E, out, in] at exactly `num_bits` per code, plus 16 bits per scale and stored zero
    point."""
    experts, rows, width = shape
    side = SIDE_BITS if grid.symmetric else 2 * SIDE_BITS
    return experts * rows * (width * grid.num_bits + grid.groups(width) * side) / 8


def stored_bytes(shape: tuple[int, int, int], grid: Grid) -> int:
    """Bytes of the packed words, scales and zero points of a stack [E, out, in], without `weight_shape`."""
    experts, rows, width = shape
    side = SIDE_BITS if grid.symmetric else 2 * SIDE_BITS
    return experts * rows * (4 * packed_words(width, grid.num_bits) + grid.groups(width) * side // 8)


def relative_error_parts(
    weights: torch.Tensor, quantized: QuantizedMatrix, exact: Collection[int] = ()
) -> tuple[float, float]:
    """Squared Frobenius norms of (weights − dequantized) and of weights [E, out, in], one expert at a time; the
    experts `exact` have no error."""

    def parts(expert: int) -> tuple[float, float]:
        original = weights[expert].float()
        zero_point = None if quantized.zero_point is None else quantized.zero_point[expert]
        back = dequantize(quantized.codes[expert], quantized.scale[expert], zero_point, quantized.grid)
        error = (original - back.float()).square_().sum(dtype=torch.float64)
        return 0.0 if expert in exact else float(error), float(original.square().sum(dtype=torch.float64))

    found = side_by_side(parts, range(len(weights)))
    return sum(error for error, _ in found), sum(total for _, total in found)
