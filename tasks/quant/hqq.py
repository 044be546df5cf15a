"""Half-quadratic quantization (HQQ; Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning
Models", 2023).

It minimises sum |w − dequantized w|^p with p = 0.7, which shrugs off outliers, by half-quadratic splitting:
with slack e for the error r,

    e <- argmin |e|^p + β/2 (e − r)² ≈ sign(r) · max(0, |r| − |r|^(p−1) / β)
    zero_point <- mean over the group of (code − (w − e) / scale)

while β grows by κ per iteration. The scale stays that of the min-max grid. What differs from the paper:

- errors are measured in steps of the grid, so scaling the weights scales the result and β = 4 suits any layer
  (the paper's β = 10 is in units of the weights);
- each step goes `RELAXATION` times as far (successive over-relaxation): rounding again undoes most of a step,
  so plain steps creep, 20 of them in the paper;
- each group keeps its zero point of the smallest mean |r|, instead of stopping the whole matrix early;
- at eight bits, where rounding a scale to 16 bits moves the ends of the range by up to half a step, it is rounded first
  and both ends lose alike, and more iterations pay;
- |r|^(p−2) comes from the bits of r², within 5 %: it only sizes a step.

On a symmetric grid, where the zero point is fixed, the same splitting fits the scale by least squares.
"""

from __future__ import annotations

import math

import torch

from tasks.quant.grid import TINY, Grid, QuantizedMatrix, min_max, quantize_groups, scale_dtype

NORM = 0.7  # p
BETA = 4.0  # in steps of the grid
KAPPA = 1.2
ITERATIONS = {2: 4, 3: 4, 4: 4, 8: 8}  # of the zero point, by bits
RELAXATION = 4.0
SCALE_ITERATIONS, SCALE_RELAXATION = 6, 2.0  # of a symmetric grid's scale, which overshoots sooner


def quantize_hqq(weights: torch.Tensor, grid: Grid, name: str = "matrix") -> QuantizedMatrix:
    """Quantize [E, out, in] weights, about 25 million a second on one core. Raises InputError as
    `quantize_groups` does."""
    dtype = scale_dtype(weights.dtype)
    fit = _fit_scale if grid.symmetric else lambda groups, grid: _fit_zero_point(groups, grid, dtype)
    return quantize_groups(weights, grid, fit, name)


def _fit_zero_point(
    groups: torch.Tensor, grid: Grid, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    scale, zero_point = min_max(groups, grid)
    if grid.num_bits == 8:
        stored = scale.to(dtype).float().clamp_min_(TINY)
        # the middle code lies where the middle of the range did
        zero_point, scale = grid.top / 2 - (grid.top / 2 - zero_point) * scale / stored, stored
    steps = groups * scale.reciprocal()  # [n, g]
    error, scratch = torch.empty_like(steps), torch.empty_like(steps)
    best, least = zero_point, torch.full_like(zero_point, torch.inf)
    length = RELAXATION / groups.shape[1]
    iterations = ITERATIONS[grid.num_bits]
    for iteration in range(iterations + 1):
        torch.add(steps, zero_point, out=error)
        torch.round(error, out=scratch).clamp_(0, grid.top)
        error.sub_(scratch)  # r = w/scale − (code − zero_point)
        size = torch.linalg.vector_norm(error, 1, dim=1, keepdim=True)
        better = size < least
        best = torch.where(better, zero_point, best)
        least = torch.where(better, size, least)
        if iteration < iterations:
            share = bounded_share(error, BETA * KAPPA**iteration, scratch)
            zero_point = zero_point - torch.linalg.vecdot(error, share).unsqueeze(1) * length
    return scale, best


def _fit_scale(groups: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    scale, zero_point = min_max(groups, grid)
    error, scratch = torch.empty_like(groups), torch.empty_like(groups)
    codes = torch.empty_like(groups)
    best, least = scale, torch.full_like(scale, torch.inf)
    for iteration in range(SCALE_ITERATIONS + 1):
        torch.mul(groups, scale.reciprocal(), out=error)
        torch.round(error, out=codes).clamp_(-grid.middle, grid.top - grid.middle)
        error.sub_(codes)
        # steps change length here: compare errors in units of the weights
        size = torch.linalg.vector_norm(error, 1, dim=1, keepdim=True).mul_(scale)
        better = size < least
        best = torch.where(better, scale, best)
        least = torch.where(better, size, least)
        if iteration < SCALE_ITERATIONS:
            bounded = error.mul_(bounded_share(error, BETA * KAPPA**iteration, scratch))
            # argmin over s of sum (w − e − s · code)²; a group of zero codes keeps its scale
            energy = torch.linalg.vecdot(codes, codes).clamp_min_(1)
            growth = torch.linalg.vecdot(codes, bounded).div_(energy).mul_(SCALE_RELAXATION).unsqueeze(1)
            scale = scale * growth.add_(1).clamp_(0.5, 2.0)
    return best, zero_point


_FRACTION_BITS = 9
_SLOPE = round((NORM - 2) / 2 * 2**_FRACTION_BITS)
_BIAS = 127 - 0.045  # of a float32's exponent, less the mean of log2(1 + m) − m over its mantissa m


def bounded_share(error: torch.Tensor, beta: float, out: torch.Tensor) -> torch.Tensor:
    """(r − e) / r = min(1, |r|^(p−2) / β) of errors r [n, g], into `out`.

    A float's bits, read as an integer, are a scaled logarithm: bits(x^q / β) ≈ q · bits(x) + constant (Blinn,
    "Floating-Point Tricks", 1997), here with x = r² and q = (p − 2)/2 in 512ths, so that nothing overflows.
    """
    slope = _SLOPE / 2**_FRACTION_BITS
    constant = round(2**23 * ((1 - slope) * _BIAS - math.log2(beta)))
    bits = torch.mul(error, error, out=out).view(torch.int32)
    torch.bitwise_right_shift(bits, _FRACTION_BITS, out=bits)
    torch.add(constant, bits, alpha=_SLOPE, out=bits)
    return out.clamp_max_(1)
