"""Round to nearest on the min-max grid: the baseline that every other method is measured against."""

from __future__ import annotations

import torch

from tasks.quant.grid import Grid, QuantizedMatrix, min_max, quantize_groups


def quantize_rtn(weights: torch.Tensor, grid: Grid, name: str = "matrix") -> QuantizedMatrix:
    """Quantize [E, out, in] weights; the zero point is a whole code, so that a zero weight stays zero.

    Raises InputError as `quantize_groups` does.
    """

    def fit(groups: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = min_max(groups, grid)
        return scale, zero_point.round_()

    return quantize_groups(weights, grid, fit, name)
