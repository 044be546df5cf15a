"""Round to nearest on a grid whose range is searched: cut off the ends of the range as long as that lowers
the squared error, then refine scale and zero point by least squares.

Every group tries a few clipping ratios of its min-max grid (the range search of OMSE, Choukroun et al.,
"Low-bit Quantization of Neural Networks for Efficient Inference", arXiv:1902.06822). Weights then count
as points on the line  w = scale · code + offset,  and codes and line are fitted in turn, as Lloyd's algorithm
does for an unconstrained codebook ("Least squares quantization in PCM", 1982). Errors are those of the stored
16-bit scale and zero point; the best grid seen is kept, and the min-max grid of `rtn` is the first.
"""

from __future__ import annotations

import torch

from tasks.quant.grid import (
    TINY,
    ZERO_POINT_DTYPE,
    Grid,
    QuantizedMatrix,
    min_max,
    quantize_groups,
    scale_dtype,
)

# The smallest clipping ratio tried for a group of 64, by bits: the fewer codes, the more a shorter range is
# worth; and the larger the group, the farther out its ends.
LOWEST_RATIO = {2: 0.45, 3: 0.6, 4: 0.7, 8: 0.97}
RATIOS = 4
REFITS = 3
_NOTHING = 1e-20  # keeps a group of equal codes from dividing by zero: its scale comes out as 0


def quantize_clip_search(weights: torch.Tensor, grid: Grid, name: str = "matrix") -> QuantizedMatrix:
    """Quantize [E, out, in] weights, about 30 million a second on one core. Raises InputError as
    `quantize_groups` does."""
    dtype = scale_dtype(weights.dtype)
    return quantize_groups(weights, grid, lambda groups, grid: search_range(groups, grid, dtype), name)


def search_range(
    groups: torch.Tensor,
    grid: Grid,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    refits: int = REFITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero_point [..., 1] of groups [..., g], float32 but holding values of the stored types.

    `importance` [..., g] (broadcast against the groups, >= 0) weighs the squared errors; `refits` steps of
    least squares follow the search.
    """
    search = _Search(groups, grid, dtype, importance)
    scale, zero_point = min_max(groups, grid)
    search.try_grid(scale, zero_point.round())
    lowest = LOWEST_RATIO[grid.num_bits] * min((64 / groups.shape[-1]) ** 0.125, 1)
    for step in range(1, RATIOS):
        search.try_grid(scale * (1 - (1 - lowest) * step / (RATIOS - 1)), zero_point)
    search.try_grid(search.scale, search.zero_point)
    for _ in range(refits):
        search.try_grid(*search.refit())
    return search.scale, search.zero_point


class _Search:
    """The best grid so far of every group, and scratch space."""

    def __init__(
        self, groups: torch.Tensor, grid: Grid, dtype: torch.dtype, importance: torch.Tensor | None
    ) -> None:
        self._groups, self._grid, self._dtype = groups, grid, dtype
        self._importance = importance
        self._root = None if importance is None else importance.sqrt()
        self._codes = torch.empty_like(groups)
        self._errors = torch.empty_like(groups)
        self._weighted = groups if importance is None else groups * importance
        self._mass = (
            groups.shape[-1] if importance is None else importance.sum(-1, keepdim=True).clamp_min_(_NOTHING)
        )
        self._sum = self._weighted.sum(-1, keepdim=True)
        self.scale = self.zero_point = torch.empty(0)
        self._least: torch.Tensor | None = None

    def try_grid(self, scale: torch.Tensor, zero_point: torch.Tensor) -> None:
        """Round to the grid [..., 1] as it would be stored; keep it for the groups where it is the best so
        far."""
        scale = scale.to(self._dtype).float().clamp_min_(TINY)
        zero_point = zero_point.to(ZERO_POINT_DTYPE).float()
        torch.mul(self._groups, scale.reciprocal(), out=self._errors).add_(zero_point)
        torch.round(self._errors, out=self._codes).clamp_(0, self._grid.top)
        errors = self._errors.sub_(self._codes)
        if self._root is not None:
            errors.mul_(self._root)
        loss = torch.linalg.vector_norm(errors, dim=-1, keepdim=True).mul_(scale)
        if self._least is None:
            self._least, self.scale, self.zero_point = loss, scale, zero_point
            return
        better = loss < self._least  # never where the stored scale or zero point overflowed
        self._least = torch.where(better, loss, self._least)
        self.scale = torch.where(better, scale, self.scale)
        self.zero_point = torch.where(better, zero_point, self.zero_point)

    def refit(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and zero_point of the line that fits the latest codes best."""
        codes, middle = self._codes, self._grid.middle
        if self._grid.symmetric:
            torch.sub(codes, middle, out=self._errors)
            energy = self._errors.square()
            if self._importance is not None:
                energy.mul_(self._importance)
            product = torch.linalg.vecdot(self._errors, self._weighted).unsqueeze(-1)
            scale = product / energy.sum(-1, keepdim=True).clamp_min_(_NOTHING)
            return scale, torch.full_like(scale, middle)
        weighted = codes
        if self._importance is not None:
            weighted = torch.mul(codes, self._importance, out=self._errors)
        first = weighted.sum(-1, keepdim=True)
        variance = torch.linalg.vecdot(weighted, codes).unsqueeze(-1) - first * first / self._mass
        product = torch.linalg.vecdot(codes, self._weighted).unsqueeze(-1) - first * self._sum / self._mass
        scale = product / variance.clamp_min_(_NOTHING)
        return scale, (first - self._sum / scale) / self._mass
