"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323) on stacks of expert matrices, and what makes it hold at two and three bits.

Columns of a matrix are quantized one after the other, and each takes up the errors of those before it. In the
form of LDLQ (Chee et al., QuIP, arXiv:2307.13304): with H = U D U^T, U unit upper triangular in the order of
quantization and D diagonal, the output error of a row with errors e = w − ŵ is

    e H e^T = sum over k of D_k · (e_k + sum over j < k of e_j U_jk)²

so column k rounds  w_k + sum over j < k of e_j U_jk  to its grid. U comes from one Cholesky factorisation,
and nothing is inverted. What differs from the paper:

- groups are static: scales and zero points are fixed before, by `clip_search` with the squared errors weighted
  by sqrt(H_kk · D_k), between a weight's own importance and what remains of it after feedback;
- columns go in the order of falling H_kk (act-order), whatever their group, so no `g_idx` is stored;
- an expert's Hessian is shrunk to its layer's pooled one (`tasks.quant.hessian`);
- sweeps of coordinate descent follow (`tasks.quant.descent`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.contracts import InputError
from tasks.quant.clip_search import search_range
from tasks.quant.descent import Rounded, sweep
from tasks.quant.grid import ZERO_POINT_DTYPE, Grid, QuantizedMatrix, check_finite, check_range, scale_dtype
from tasks.quant.hessian import Hessians
from tasks.quant.threads import side_by_side

BLOCK, INNER = 128, 16  # columns between two products with all earlier errors, and with the block's own
SEARCH_VALUES = 2**16  # weights whose scales are searched at once
_LEAST_DAMPING, _MOST_DAMPING = 1e-4, 1e5  # of what is tried when factoring fails


@dataclass(frozen=True)
class Gptq:
    """Settings of GPTQ."""

    damping: float = 0.01  # added to the Hessian's diagonal, as a share of its mean
    shrinkage: float = 4.0  # the pooled Hessian's weight in tokens per input channel
    sweeps: int = 1  # of coordinate descent


def quantize_gptq(
    weights: torch.Tensor, grid: Grid, name: str, hessians: Hessians, settings: Gptq
) -> QuantizedMatrix:
    """Quantize [E, out, in] weights for the inputs that `hessians` saw, about 5 million a second on one core.

    The result's `damping` [E] is larger than the settings' where a Hessian was not positive definite with
    those. Raises InputError for shapes that do not fit and for weights, scales and Hessians that are not
    finite.
    """
    experts, rows, width = weights.shape
    count = grid.groups(width, name)
    if hessians.total.shape != (experts, width, width):
        raise InputError(
            f"{name} of shape {list(weights.shape)} got Hessians of shape {list(hessians.total.shape)}: "
            f"expected {[experts, width, width]}, the inputs' second moments per expert"
        )
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    scales = torch.empty(experts, rows, count, dtype=scale_dtype(weights.dtype))
    zeros = torch.empty(experts, rows, count, dtype=ZERO_POINT_DTYPE)
    damping = torch.empty(experts)
    hessians.pooled()  # once, before the threads need it

    @torch.inference_mode()
    def one(expert: int) -> None:
        matrix = weights[expert].float()
        check_finite(matrix, name)
        hessian = hessians.shrunk(slice(expert, expert + 1), settings.shrinkage)[0]
        if not torch.isfinite(hessian).all():
            raise InputError(f"{name}: the Hessian of expert {expert} holds NaN or infinite values")
        order, factor, damping[expert] = factor_damped(hessian, settings.damping, f"{name}, expert {expert}")
        scale, zero_point = _static_grids(matrix, hessian, order, factor, grid, scales.dtype)
        check_range(scale, zero_point, name)
        rounded = feed_back(matrix.T.contiguous(), order, factor, scale, zero_point, grid)
        for _ in range(settings.sweeps):
            sweep(rounded, hessian, grid, scales.dtype)
        codes[expert] = rounded.codes.T
        scales[expert], zeros[expert] = rounded.scale.T, rounded.zero_point.T

    side_by_side(one, range(experts))
    return QuantizedMatrix(grid, codes, scales, None if grid.symmetric else zeros, damping)


def factor_damped(
    hessian: torch.Tensor, damping: float, name: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Damp `hessian` [in, in] in place and factor it in order of quantization, last column first.

    Returns the order [in] (ascending H_kk), the lower Cholesky factor [in, in] of the Hessian in that order,
    and the damping that it took: ten times as much after every failure. A Hessian of zeros becomes the identity's
    multiple. A channel without inputs is damped
    too, and so rounds to nearest.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    unit = mean if mean > 0 else 1.0
    added = 0.0
    while damping <= _MOST_DAMPING:
        diagonal += (damping - added) * unit
        added = damping
        order = torch.argsort(diagonal, stable=True)
        factor, failed = torch.linalg.cholesky_ex(hessian.index_select(0, order).index_select(1, order))
        if not failed:
            return order, factor, damping
        damping = max(10 * damping, _LEAST_DAMPING)
    raise InputError(
        f"{name}: the Hessian is not positive definite with {_MOST_DAMPING:g} times its mean on the diagonal"
    )


def _static_grids(
    matrix: torch.Tensor,
    hessian: torch.Tensor,
    order: torch.Tensor,
    factor: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero_point [G, out] of a matrix [out, in]."""
    rows, width = matrix.shape
    count = grid.groups(width)
    pivots = torch.empty(width)
    pivots[order] = factor.diagonal()  # sqrt(D)
    importance = (hessian.diagonal().sqrt() * pivots).view(count, -1)
    groups = matrix.reshape(rows, count, -1)
    step = max(1, SEARCH_VALUES // width)
    found = [
        search_range(groups[start : start + step], grid, dtype, importance) for start in range(0, rows, step)
    ]
    scale, zero_point = (
        torch.cat(parts).view(rows, count).T.contiguous() for parts in zip(*found, strict=True)
    )
    return scale, zero_point


def feed_back(
    columns: torch.Tensor,
    order: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    grid: Grid,
) -> Rounded:
    """Round the columns [in, out] of a matrix from the last of `order` to the first, each with the errors of
    those before it fed back."""
    width, top = len(columns), grid.top
    group_of = torch.div(order, width // len(scale), rounding_mode="floor")
    left = columns.index_select(0, order)  # [in, out] w, in order; then w + feedback
    shifted = left + (scale * zero_point).index_select(0, group_of)
    errors, codes = torch.empty_like(left), torch.empty_like(left)
    feedback = factor / factor.diagonal()  # column k: U of column k, below the diagonal
    scales, zeros, steps = scale.unbind(), zero_point.unbind(), scale.reciprocal().unbind()
    lefts, shifts, error, code = left.unbind(), shifted.unbind(), errors.unbind(), codes.unbind()
    groups = group_of.tolist()
    for stop in range(width, 0, -BLOCK):
        start = max(0, stop - BLOCK)
        if stop < width:
            left[start:stop].addmm_(feedback[stop:, start:stop].T, errors[stop:])
        for high in range(stop, start, -INNER):
            low = max(start, high - INNER)
            if high < stop:
                left[low:high].addmm_(feedback[high:stop, low:high].T, errors[high:stop])
            inner = feedback[low:high, low:high].T.contiguous().unbind()
            for column in range(high - 1, low - 1, -1):
                target, group = lefts[column], groups[column]
                if column + 1 < high:
                    target.addmv_(errors[column + 1 : high].T, inner[column - low][column + 1 - low :])
                torch.addcmul(zeros[group], target, steps[group], out=code[column]).round_().clamp_(0, top)
                # e = w − (code − zero_point) · scale
                torch.addcmul(shifts[column], code[column], scales[group], value=-1, out=error[column])
    unordered = torch.empty_like(errors).index_copy_(0, order, errors)
    return Rounded(torch.empty_like(codes).index_copy_(0, order, codes), unordered, scale, zero_point)
