"""The quantization methods by name: one protocol, weights [E, out, in] and a grid in, a QuantizedMatrix
out."""

from __future__ import annotations

from typing import Protocol

import torch

from tasks.contracts import InputError
from tasks.quant.grid import Grid, QuantizedMatrix
from tasks.quant.hqq import quantize_hqq
from tasks.quant.rtn import quantize_rtn


class Method(Protocol):
    def __call__(self, weights: torch.Tensor, grid: Grid, name: str = "matrix") -> QuantizedMatrix: ...


METHODS: dict[str, Method] = {"rtn": quantize_rtn, "hqq": quantize_hqq}


def quantize(method: str, weights: torch.Tensor, grid: Grid, name: str = "matrix") -> QuantizedMatrix:
    """Quantize [E, out, in] `weights`; `name` is the matrix's name in error messages.

    Raises InputError for an unknown method, a group size that does not divide, and weights that are not
    finite.
    """
    if method not in METHODS:
        raise InputError(f"quantization method '{method}' is not known: expected one of {sorted(METHODS)}")
    return METHODS[method](weights, grid, name)
