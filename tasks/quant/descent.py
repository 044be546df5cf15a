"""Coordinate descent on a quantized matrix's output error: every code, scale and zero point in turn, the rest
fixed.

After Behdin et al., QuantEase (arXiv:2309.01885): with errors E = W − Ŵ and the gradient F = H E (all
[in, experts, out] here), the best value of column k is  ŵ_k + F_k / H_kk,  rounded to its grid. Before the codes of a
group move, its scale and zero point take the least-squares values for the codes that it has. No step raises
sum over rows of e H e^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.quant.grid import TINY, ZERO_POINT_DTYPE, Grid

INNER = 32  # columns between two products with the group's own changes
_NOTHING = 1e-30


@dataclass
class Columns:
    """The matrices of some experts on their grids, columns first, float32 throughout: [in, experts, out].

    Memory has room for `places` experts, however many there are, and for outputs that no expert has: products
    then see the same layout, and give the same bits, wherever an expert is.
    """

    codes: torch.Tensor  # [in, places, padded out]
    errors: torch.Tensor  # [in, places, padded out] w − (code − zero_point) · scale
    scale: torch.Tensor  # [G, places, padded out] values of the stored type
    zero_point: torch.Tensor  # [G, places, padded out] values of the stored type
    experts: int  # places in use

    @classmethod
    def empty(cls, width: int, groups: int, places: int, padded: int, experts: int, grid: Grid) -> Columns:
        """Zero weights on grids of scale 1."""
        zero_point = torch.full((groups, places, padded), float(grid.middle))
        zeros = torch.zeros(width, places, padded)
        return cls(torch.empty_like(zeros), zeros, torch.ones_like(zero_point), zero_point, experts)

    def blank(self) -> torch.Tensor:
        """Uninitialised memory of the layout of `errors`."""
        return torch.empty_like(self.errors)


def sweep(piece: Columns, hessians: list[torch.Tensor], grid: Grid, dtype: torch.dtype) -> None:
    """Go once over all groups; `hessians` [in, in] per expert, `dtype` the scale's stored type. Changes `piece`."""
    width, experts = len(piece.codes), piece.experts
    size = width // len(piece.scale)
    inverse = torch.stack([hessian.diagonal() for hessian in hessians], dim=-1).reciprocal_().unsqueeze(-1)
    room = torch.empty(size, *piece.errors.shape[1:])
    for group in range(len(piece.scale)):
        part = slice(group * size, (group + 1) * size)
        own = [hessian[part, part] for hessian in hessians]
        gradient = room[:, :experts]  # [g, experts, out]
        for place, hessian in enumerate(hessians):
            torch.mm(hessian[part], piece.errors[:, place], out=gradient[:, place])
        _refit(piece, group, part, own, gradient, grid, dtype)
        # F / H_kk from here on
        gradient.mul_(inverse[part])
        own = [matrix * inverse[part, place] for place, matrix in enumerate(own)]
        _round_again(piece, group, part, own, gradient, grid)


def _refit(
    piece: Columns,
    group: int,
    part: slice,
    own: list[torch.Tensor],
    gradient: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
) -> None:
    """Least squares over ŵ = scale · code + offset of one group, with c^T H c and so on as inner products."""
    used = slice(0, piece.experts)
    codes, errors = piece.codes[part, used], piece.errors[part, used]
    scale, zero_point = piece.scale[group, used], piece.zero_point[group, used]
    if grid.symmetric:
        codes = codes - grid.middle
    spread = torch.empty(len(codes), *piece.errors.shape[1:])[:, used]  # H c
    for place, matrix in enumerate(own):
        torch.mm(matrix, codes[:, place], out=spread[:, place])
    code_code, code_force = _dot(codes, spread), _dot(codes, gradient)
    if grid.symmetric:
        new_scale = (scale + code_force / code_code.clamp_min(_NOTHING)).to(dtype).float().clamp_min_(TINY)
        slope = new_scale - scale
        # ŵ moves by slope · code, and the loss by move^T (H move − 2 F)
        better = slope * (slope * code_code - 2 * code_force) < 0
        slope = torch.where(better, slope, 0)
        scale.copy_(torch.where(better, new_scale, scale))
        errors.addcmul_(codes, slope, value=-1)
        gradient.addcmul_(spread, slope, value=-1)
        return
    one_rows = torch.stack([matrix.sum(dim=1) for matrix in own], dim=-1).unsqueeze(
        -1
    )  # H 1: [g, experts, 1]
    one_one = one_rows.sum(dim=0)
    code_one, one_force = spread.sum(dim=0), gradient.sum(dim=0)
    determinant = code_code * one_one - code_one * code_one
    offset = (one_force * code_code - code_force * code_one) / determinant
    new_scale = scale + (code_force * one_one - one_force * code_one) / determinant
    new_scale = new_scale.to(dtype).float().clamp_min_(TINY)
    new_zero = ((scale * zero_point - offset) / new_scale).to(ZERO_POINT_DTYPE).float()
    # ŵ moves by scale' · (code − zero') − scale · (code − zero) = slope · code + offset
    slope, offset = new_scale - scale, scale * zero_point - new_scale * new_zero
    gain = slope * (slope * code_code + 2 * offset * code_one - 2 * code_force)
    gain += offset * (offset * one_one - 2 * one_force)
    better = gain < 0  # false where anything is not finite
    slope, offset = torch.where(better, slope, 0), torch.where(better, offset, 0)
    scale.copy_(torch.where(better, new_scale, scale))
    zero_point.copy_(torch.where(better, new_zero, zero_point))
    errors.addcmul_(codes, slope, value=-1).sub_(offset)
    gradient.addcmul_(spread, slope, value=-1).addcmul_(one_rows, offset, value=-1)


def _round_again(
    piece: Columns, group: int, part: slice, own: list[torch.Tensor], gradient: torch.Tensor, grid: Grid
) -> None:
    used = slice(0, piece.experts)
    scale = piece.scale[group, used]
    steps = scale.reciprocal()
    codes = piece.codes[part, used]
    fresh = codes.clone()
    change = torch.empty(len(codes), *piece.errors.shape[1:])[:, used]  # of the errors
    old, new, changes, force = codes.unbind(), fresh.unbind(), change.unbind(), gradient.unbind()
    for low in range(0, len(codes), INNER):
        high = min(low + INNER, len(codes))
        for place, matrix in enumerate(own):
            if low:
                gradient[low:high, place].addmm_(matrix[low:high, :low], change[:low, place])
        # [column, later column, experts, 1]
        inner = torch.stack([matrix[low:high, low:high].T for matrix in own], dim=-1).unsqueeze(-1).unbind()
        for column in range(low, high):
            # (ŵ_k + F_k / H_kk) / scale + zero_point = code + F_k / H_kk / scale
            torch.addcmul(old[column], force[column], steps, out=new[column]).round_().clamp_(0, grid.top)
            torch.sub(old[column], new[column], out=changes[column]).mul_(scale)
            if column + 1 < high:
                gradient[column + 1 : high].addcmul_(inner[column - low][column + 1 - low :], changes[column])
    codes.copy_(fresh)
    piece.errors[part, used] += change


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[experts, out] inner products of the columns of two [g, experts, out]."""
    return (left * right).sum(dim=0)
