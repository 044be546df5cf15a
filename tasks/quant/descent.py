"""Coordinate descent on a quantized matrix's output error: every code, scale and zero point in turn, the rest
fixed.

After Behdin et al., QuantEase (arXiv:2309.01885): with errors E = W − Ŵ and the gradient F = H E (all
[in, out] here), the best value of column k is  ŵ_k + F_k / H_kk,  rounded to its grid. Before the codes of a
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
class Rounded:
    """A matrix on its grid, columns first; float32 throughout."""

    codes: torch.Tensor  # [in, out]
    errors: torch.Tensor  # [in, out] w − (code − zero_point) · scale
    scale: torch.Tensor  # [G, out] values of the stored type
    zero_point: torch.Tensor  # [G, out] values of the stored type


def sweep(rounded: Rounded, hessian: torch.Tensor, grid: Grid, dtype: torch.dtype) -> None:
    """Go once over all groups; `hessian` [in, in], `dtype` the scale's stored type. Changes `rounded`."""
    width = len(rounded.codes)
    size = width // len(rounded.scale)
    inverse = hessian.diagonal().reciprocal().tolist()
    for group in range(len(rounded.scale)):
        part = slice(group * size, (group + 1) * size)
        own = hessian[part, part].contiguous()
        gradient = hessian[part] @ rounded.errors  # [g, out]
        _refit(rounded, group, part, own, gradient, grid, dtype)
        _round_again(rounded, group, part, own, gradient, inverse[part], grid)


def _refit(
    rounded: Rounded,
    group: int,
    part: slice,
    own: torch.Tensor,
    gradient: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
) -> None:
    """Least squares over ŵ = scale · code + offset of one group, with c^T H c and so on as inner products."""
    codes, scale, zero_point = rounded.codes[part], rounded.scale[group], rounded.zero_point[group]
    if grid.symmetric:
        centred = codes - grid.middle
        slope = _dot(centred, gradient) / _dot(centred, own @ centred).clamp_min_(_NOTHING)
        new_scale, new_zero = scale + slope, zero_point
    else:
        spread = own @ codes  # H c
        rows = own.sum(dim=0)  # H 1
        code_code, one_one = _dot(codes, spread), rows.sum()
        code_one = rows @ codes
        code_force, one_force = _dot(codes, gradient), gradient.sum(dim=0)
        determinant = code_code * one_one - code_one * code_one
        slope = (code_force * one_one - one_force * code_one) / determinant
        offset = (one_force * code_code - code_force * code_one) / determinant
        new_scale = scale + slope
        new_zero = (scale * zero_point - offset) / new_scale
    new_scale = new_scale.to(dtype).float().clamp_min_(TINY)
    new_zero = new_zero.to(ZERO_POINT_DTYPE).float()
    # ŵ moves by scale' · (code − zero') − scale · (code − zero), and the loss by move^T (H move − 2 F)
    move = codes * (new_scale - scale) - (new_scale * new_zero - scale * zero_point)
    force = own @ move
    better = _dot(move, force - 2 * gradient) < 0  # false where anything is not finite
    rounded.scale[group] = torch.where(better, new_scale, scale)
    rounded.zero_point[group] = torch.where(better, new_zero, zero_point)
    rounded.errors[part] -= torch.where(better, move, 0)
    gradient -= torch.where(better, force, 0)


def _round_again(
    rounded: Rounded,
    group: int,
    part: slice,
    own: torch.Tensor,
    gradient: torch.Tensor,
    inverse: list[float],
    grid: Grid,
) -> None:
    scale = rounded.scale[group]
    steps = scale.reciprocal()
    codes = rounded.codes[part]
    fresh, change = torch.empty_like(codes), torch.empty_like(codes)  # change of the errors
    old, new, changes, force = codes.unbind(), fresh.unbind(), change.unbind(), gradient.unbind()
    for low in range(0, len(codes), INNER):
        high = min(low + INNER, len(codes))
        if low:
            gradient[low:high].addmm_(own[low:high, :low], change[:low])
        inner = own[low:high, low:high].contiguous().unbind()
        for column in range(low, high):
            if column > low:
                force[column].addmv_(change[low:column].T, inner[column - low][: column - low])
            # (ŵ_k + F_k / H_kk) / scale + zero_point = code + F_k / (H_kk · scale)
            torch.addcmul(old[column], force[column], steps, value=inverse[column], out=new[column])
            new[column].round_().clamp_(0, grid.top)
            torch.sub(old[column], new[column], out=changes[column]).mul_(scale)
    rounded.codes[part] = fresh
    rounded.errors[part] += change


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[out] inner products of the columns of two [g, out]."""
    return (left * right).sum(dim=0)
