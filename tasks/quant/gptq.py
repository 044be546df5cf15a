"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323), one expert after the other of a stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.contracts import InputError
from tasks.quant.grid import ZERO_POINT_DTYPE, Grid, QuantizedMatrix, encode, min_max, scale_dtype
from tasks.quant.hessian import Hessians
from tasks.quant.threads import side_by_side


@dataclass(frozen=True)
class Gptq:
    """Settings of GPTQ."""

    damping: float = 0.01  # added to the diagonal, as a share of its mean
    shrinkage: float = 0.25  # the pooled Hessian's weight in tokens per input channel


def quantize_gptq(
    weights: torch.Tensor, grid: Grid, name: str, hessians: Hessians, settings: Gptq
) -> QuantizedMatrix:
    """Quantize [E, out, in] weights for the inputs of which `hessians` tells."""
    experts, rows, width = weights.shape
    count = grid.groups(width, name)
    size = width // count
    if hessians.total.shape != (experts, width, width):
        raise InputError(
            f"{name} of shape {list(weights.shape)} got Hessians of shape {list(hessians.total.shape)}: "
            f"expected [{experts}, {width}, {width}]"
        )
    if not torch.isfinite(weights).all():
        raise InputError(f"{name} holds NaN or infinite weights: expected finite weights")
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    scales = torch.empty(experts, rows, count, dtype=scale_dtype(weights.dtype))
    zeros = torch.empty(experts, rows, count, dtype=ZERO_POINT_DTYPE)
    damping = torch.empty(experts)
    hessians.pooled()

    def one(expert: int) -> None:
        left = weights[expert].float().clone()
        hessian = hessians.shrunk(slice(expert, expert + 1), settings.shrinkage)[0]
        groups = left.reshape(-1, size)
        scale, zero = min_max(groups, grid)
        scales[expert] = scale.view(rows, count)
        zeros[expert] = zero.round().view(rows, count)
        damp, mean = settings.damping, hessian.diagonal().mean().clamp_min(1e-30)
        while True:
            damped = hessian + torch.eye(width) * (damp * mean)
            lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
            if not info:
                break
            damp *= 10
        damping[expert] = damp
        factor = lower.flip(0, 1)
        back = torch.empty_like(left)
        for column in range(width):
            group = column // size
            scale = scales[expert, :, group].float()
            zero = zeros[expert, :, group].float()
            feedback = (left[:, :column] - back[:, :column]) @ (
                factor[:column, column] / factor[column, column]
            )
            code = encode(left[:, column] + feedback, scale, zero, grid)
            codes[expert, :, column] = code
            back[:, column] = (code - zero) * scale

    side_by_side(one, range(experts))
    return QuantizedMatrix(grid, codes, scales, None if grid.symmetric else zeros, damping)
