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
- columns go in the order of falling H_kk of the pool (act-order), whatever their group, so no `g_idx` is stored, and
  experts go side by side: [in, experts, out], where a column of all experts is one vector;
- an expert's Hessian is shrunk to its layer's pooled one (`tasks.quant.hessian`);
- sweeps of coordinate descent follow (`tasks.quant.descent`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tasks.contracts import InputError
from tasks.quant.clip_search import search_range
from tasks.quant.descent import Columns, sweep
from tasks.quant.grid import ZERO_POINT_DTYPE, Grid, QuantizedMatrix, check_finite, check_range, scale_dtype
from tasks.quant.hessian import Hessians
from tasks.quant.threads import side_by_side

BLOCK, INNER = 128, 16  # columns between two products with all earlier errors, and with the block's own
SEARCH_VALUES = 2**16  # weights whose scales are searched at once
REFITS = 3  # of a static grid; sweeps fit it again, to the Hessian
SIDE_BY_SIDE = 2048  # outputs of all experts of a piece of work, so that a column fits the fastest cache
ALIGNMENT = 64  # outputs of an expert are padded to a multiple, so that all experts are computed alike
_LEAST_DAMPING, _MOST_DAMPING = 1e-4, 1e5  # of what is tried when factoring fails


@dataclass(frozen=True)
class Gptq:
    """Settings of GPTQ."""

    damping: float = 0.005  # added to the Hessian's diagonal, as a share of its mean
    shrinkage: float = 2.0  # the pooled Hessian's weight in tokens per input channel
    sweeps: int = 1  # of coordinate descent


def quantize_gptq(
    weights: torch.Tensor, grid: Grid, name: str, hessians: Hessians, settings: Gptq
) -> QuantizedMatrix:
    """Quantize [E, out, in] weights for the inputs that `hessians` saw, 4 to 8 million a second on one core.

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
    order = torch.argsort(hessians.pooled().diagonal(), stable=True)
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    places = max(1, min(16, SIDE_BY_SIDE // padded))
    # an expert's place and neighbours never show in its result, so the number of threads may decide here
    step = min(places, -(-experts // torch.get_num_threads()))

    @torch.inference_mode()
    def quantize_part(start: int) -> None:
        part = range(start, min(start + step, experts))
        piece = Columns.empty(width, count, places, padded, len(part), grid)
        factors, damped = [], []
        for place, expert in enumerate(part):
            matrix = weights[expert].float()
            check_finite(matrix, name)
            hessian = hessians.shrunk(slice(expert, expert + 1), settings.shrinkage)[0]
            if not math.isfinite(float(hessian.sum())):
                raise InputError(f"{name}: the Hessian of expert {expert} holds NaN or infinite values")
            factor, damping[expert] = factor_damped(
                hessian, order, settings.damping, f"{name}, expert {expert}"
            )
            scale, zero_point = _static_grids(matrix, hessian, order, factor, grid, scales.dtype)
            check_range(scale, zero_point, name)
            piece.scale[:, place, :rows], piece.zero_point[:, place, :rows] = scale.T, zero_point.T
            piece.errors[:, place, :rows] = matrix.T  # before anything is rounded
            factors.append(factor)
            damped.append(hessian)
        # at eight bits a sweep gains less than it loses by leaving out how weights round to 16 bits
        final = scales.dtype if grid.num_bits == 8 else None
        feed_back(piece, order, factors, grid, final)
        for _ in range(0 if final else settings.sweeps):
            sweep(piece, damped, grid, scales.dtype)
        for place, expert in enumerate(part):
            codes[expert] = piece.codes[:, place, :rows].T
            scales[expert] = piece.scale[:, place, :rows].T
            zeros[expert] = piece.zero_point[:, place, :rows].T

    side_by_side(quantize_part, range(0, experts, step))
    return QuantizedMatrix(grid, codes, scales, None if grid.symmetric else zeros, damping)


def factor_damped(
    hessian: torch.Tensor, order: torch.Tensor, damping: float, name: str
) -> tuple[torch.Tensor, float]:
    """Damp `hessian` [in, in] in place and factor it; columns are quantized from the last of `order` to the first.

    Returns the lower Cholesky factor [in, in] of the Hessian in that order, and the damping that it took: ten
    times as much after every failure. A channel without inputs is damped too, and so rounds to nearest. A
    Hessian of zeros becomes the identity's multiple.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    unit = mean if mean > 0 else 1.0
    added = 0.0
    while damping <= _MOST_DAMPING:
        diagonal += (damping - added) * unit
        added = damping
        factor, failed = torch.linalg.cholesky_ex(hessian.index_select(0, order).index_select(1, order))
        if not failed:
            return factor, damping
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
    """Scale and zero_point [out, G] of a matrix [out, in]."""
    rows, width = matrix.shape
    count = grid.groups(width)
    pivots = torch.empty(width)
    pivots[order] = factor.diagonal()  # sqrt(D)
    importance = (hessian.diagonal().sqrt() * pivots).view(count, -1)
    groups = matrix.reshape(rows, count, -1)
    step = max(1, SEARCH_VALUES // width)
    found = [
        search_range(groups[start : start + step], grid, dtype, importance, REFITS)
        for start in range(0, rows, step)
    ]
    scale, zero_point = (torch.cat(parts).view(rows, count) for parts in zip(*found, strict=True))
    return scale, zero_point


def feed_back(
    piece: Columns,
    order: torch.Tensor,
    factors: list[torch.Tensor],
    grid: Grid,
    final: torch.dtype | None = None,
) -> None:
    """Round the columns from the last of `order` to the first, each with the errors of those before it fed back.

    `piece.errors` holds the weights before and the errors after; `piece.codes` is filled. Errors are those of
    dequantized weights in float32, or rounded to the type `final`.
    """
    width, top, experts = len(order), grid.top, len(factors)
    group_of = torch.div(order, width // len(piece.scale), rounding_mode="floor")
    # column k: U of column k, below the diagonal; factors are not needed again
    units = [factor.div_(factor.diagonal().clone()) for factor in factors]
    left, errors, codes = piece.blank(), piece.blank(), piece.blank()  # in order; left: w + feedback so far
    torch.index_select(piece.errors, 0, order, out=left)
    shifted = left.clone() if final else (piece.scale * piece.zero_point).index_select(0, group_of).add_(left)
    left, errors, codes, shifted = (whole[:, :experts] for whole in (left, errors, codes, shifted))
    scale, zero_point = piece.scale[:, :experts], piece.zero_point[:, :experts]
    scales, zeros, steps = scale.unbind(), zero_point.unbind(), scale.reciprocal().unbind()
    lefts, shifts, error, code = left.unbind(), shifted.unbind(), errors.unbind(), codes.unbind()
    groups = group_of.tolist()
    for stop in range(width, 0, -BLOCK):
        start = max(0, stop - BLOCK)
        for high in range(stop, start, -INNER):
            low = max(start, high - INNER)
            # the errors behind, of all blocks for a new block, then of the block's own
            behind, until = (stop, width) if high == stop else (high, stop)
            first = start if high == stop else low
            for place, unit in enumerate(units):
                if behind < until:
                    left[first:high, place].addmm_(
                        unit[behind:until, first:high].T, errors[behind:until, place]
                    )
            # [column, earlier column, experts, 1]
            inner = torch.stack([unit[low:high, low:high] for unit in units], dim=-1).unsqueeze(-1).unbind()
            for column in range(high - 1, low - 1, -1):
                group = groups[column]
                torch.addcmul(zeros[group], lefts[column], steps[group], out=code[column])
                code[column].round_().clamp_(0, top)
                # e = w − (code − zero_point) · scale
                if final:
                    dequantized = torch.sub(code[column], zeros[group], out=error[column]).mul_(scales[group])
                    torch.sub(shifts[column], dequantized.to(final), out=error[column])
                else:
                    torch.addcmul(shifts[column], code[column], scales[group], value=-1, out=error[column])
                if column > low:
                    left[low:column].addcmul_(inner[column - low][: column - low], error[column])
    piece.errors[:, :experts].index_copy_(0, order, errors)
    piece.codes[:, :experts].index_copy_(0, order, codes)
