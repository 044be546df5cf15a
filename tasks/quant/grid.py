"""Group-wise affine grids: w ≈ (code − zero_point) · scale, codes unsigned integers of `num_bits` bits.

Scale and zero point are stored in 16 bits, and codes are chosen with the stored, rounded values. The scale is
bfloat16 for bfloat16 weights, else float16: engines multiply in the scale's type, so a model keeps its own.
A dequantized weight is rounded to those 16 bits too, and so equals what such an engine computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasks.contracts import InputError
from tasks.quant.threads import side_by_side

BITS = (2, 3, 4, 8)  # what the packed format and the engines that read it take
ZERO_POINT_DTYPE = torch.float16
CHUNK_VALUES = 2**17  # weights fitted at once: a constant, so that results never depend on the machine
TINY = 2.0**-24  # the smallest positive float16


@dataclass(frozen=True)
class Grid:
    """The form of a quantization grid."""

    num_bits: int
    group_size: int  # input channels that share a scale; 0: the whole row
    symmetric: bool  # the zero point is the middle code 2^(num_bits - 1) and is not stored

    @property
    def top(self) -> int:
        """The largest code; the smallest is 0."""
        return 2**self.num_bits - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 2 ** (self.num_bits - 1)

    def groups(self, width: int, name: str = "matrix") -> int:
        """Groups in a row of `width` inputs; raises InputError with the sizes that do divide it."""
        if self.group_size and width % self.group_size:
            divisors = [size for size in range(8, width + 1) if width % size == 0]
            raise InputError(
                f"group_size {self.group_size} does not divide the input width {width} of {name}: "
                f"use one of {', '.join(map(str, divisors)) or width}, or 0 for one group per row"
            )
        return width // self.group_size if self.group_size else 1


def scale_dtype(weights: torch.dtype) -> torch.dtype:
    """The 16-bit type in which the scales of weights of this type are stored."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float16


@dataclass(frozen=True)
class QuantizedMatrix:
    """A stack of E quantized matrices with G groups per row."""

    grid: Grid
    codes: torch.Tensor  # [E, out, in] uint8, 0 .. grid.top
    scale: torch.Tensor  # [E, out, G] float16 or bfloat16, > 0
    zero_point: torch.Tensor | None  # [E, out, G] float16, in codes; None on a symmetric grid
    damping: torch.Tensor | None = None  # [E] float32 that gptq took per expert; None of other methods

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[E, out, in] weights in `dtype`."""
        return dequantize(self.codes, self.scale, self.zero_point, self.grid).to(dtype)


# A fit turns groups of weights [n, g] float32 into scale [n, 1] and zero_point [n, 1] of a grid, not yet
# rounded.
Fit = Callable[[torch.Tensor, Grid], tuple[torch.Tensor, torch.Tensor]]


def min_max(groups: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid that spans each group [n, g], zero included: scale [n, 1] and fractional zero_point [n, 1].

    A symmetric grid spans ± the largest magnitude with half a step cut off at either end, as
    compressed-tensors does.
    """
    if grid.symmetric:
        scale = groups.abs().amax(dim=-1, keepdim=True) / (grid.top / 2)
        return scale.clamp_min_(TINY), torch.full_like(scale, grid.middle)
    low = groups.amin(dim=-1, keepdim=True).clamp_max_(0)
    high = groups.amax(dim=-1, keepdim=True).clamp_min_(0)
    scale = ((high - low) / grid.top).clamp_min_(TINY)
    return scale, -low / scale


def encode(groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Nearest codes of groups [n, g], ties to even: [n, g] float32."""
    return (groups / scale).add_(zero_point).round_().clamp_(0, grid.top)


def quantize_groups(weights: torch.Tensor, grid: Grid, fit: Fit, name: str = "matrix") -> QuantizedMatrix:
    """Fit every group of `weights` [E, out, in] on its own, in chunks of a fixed size.

    Raises InputError for a width that the group size does not divide, and for weights that are not finite or
    whose scale leaves the range of 16 bits.
    """
    experts, rows, width = weights.shape
    count = grid.groups(width, name)
    size = width // count
    flat = weights.reshape(-1, size)
    codes = torch.empty(flat.shape, dtype=torch.uint8)
    scales = torch.empty(len(flat), 1, dtype=scale_dtype(weights.dtype))
    zeros = torch.empty(len(flat), 1, dtype=ZERO_POINT_DTYPE)
    step = max(1, CHUNK_VALUES // size)

    def fit_chunk(start: int) -> None:
        part = slice(start, start + step)
        groups = flat[part].float()
        check_finite(groups, name)
        scale, zero_point = fit(groups, grid)
        scales[part], zeros[part] = scale.clamp_min_(TINY), zero_point
        check_range(scales[part], zeros[part], name)
        codes[part] = encode(groups, scales[part].float(), zeros[part].float(), grid)

    side_by_side(fit_chunk, range(0, len(flat), step))
    shape = (experts, rows, count)
    return QuantizedMatrix(
        grid,
        codes.view(weights.shape),
        scales.view(shape),
        None if grid.symmetric else zeros.view(shape),
    )


def check_finite(weights: torch.Tensor, name: str) -> None:
    """Raises InputError where a weight of the matrix `name` is NaN or infinite."""
    if not math.isfinite(float(weights.abs().amax())):  # the largest is NaN where any is
        raise InputError(f"{name} holds NaN or infinite weights: expected finite weights")


def check_range(scale: torch.Tensor, zero_point: torch.Tensor, name: str) -> None:
    """Raises InputError where 16 bits did not hold a scale or zero point of the matrix `name`."""
    if not (torch.isfinite(scale).all() and torch.isfinite(zero_point).all()):
        raise InputError(f"{name}: a group's scale or zero point does not fit into 16 bits")


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, grid: Grid
) -> torch.Tensor:
    """[..., in] codes, [..., G] scale and zero_point -> [..., in] weights in the scale's 16 bits."""
    grouped = codes.float().view(*scale.shape, -1)
    zero = grid.middle if zero_point is None else zero_point.float().unsqueeze(-1)
    return ((grouped - zero) * scale.float().unsqueeze(-1)).to(scale.dtype).view(codes.shape)
