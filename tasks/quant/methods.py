"""The quantization methods by name: one protocol, weights [E, out, in] and a grid in, a QuantizedMatrix
out."""

from __future__ import annotations

from typing import Protocol

import torch

from tasks.contracts import InputError
from tasks.quant.clip_search import quantize_clip_search
from tasks.quant.gptq import Gptq, quantize_gptq
from tasks.quant.grid import BITS, Grid, QuantizedMatrix
from tasks.quant.hessian import Hessians
from tasks.quant.hqq import quantize_hqq
from tasks.quant.rtn import quantize_rtn


class Method(Protocol):
    def __call__(
        self, weights: torch.Tensor, grid: Grid, name: str, hessians: Hessians | None, gptq: Gptq
    ) -> QuantizedMatrix: ...


def _gptq(
    weights: torch.Tensor, grid: Grid, name: str, hessians: Hessians | None, gptq: Gptq
) -> QuantizedMatrix:
    if hessians is None:
        raise InputError(
            f"{name}: method 'gptq' needs the Hessians of a calibration pass, got none: pass `hessians`, or use "
            f"one of {sorted(set(METHODS) - NEEDS_HESSIANS)}"
        )
    return quantize_gptq(weights, grid, name, hessians, gptq)


METHODS: dict[str, Method] = {
    "rtn": lambda weights, grid, name, hessians, gptq: quantize_rtn(weights, grid, name),
    "clip_search": lambda weights, grid, name, hessians, gptq: quantize_clip_search(weights, grid, name),
    "hqq": lambda weights, grid, name, hessians, gptq: quantize_hqq(weights, grid, name),
    "gptq": _gptq,
}
NEEDS_HESSIANS = frozenset({"gptq"})


def quantize(
    method: str,
    weights: torch.Tensor,
    grid: Grid,
    name: str = "matrix",
    hessians: Hessians | None = None,
    gptq: Gptq | None = None,
) -> QuantizedMatrix:
    """Quantize [E, out, in] `weights`; `name` is the matrix's name in error messages.

    Only the methods in NEEDS_HESSIANS look at `hessians` and at the settings `gptq`. An expert's result
    depends on its own weights, its own Hessian and the pooled one alone, to the bit, on any number of threads.

    Raises InputError for an unknown method or number of bits, a group size that does not divide, weights that are
    not finite, and gptq without Hessians or with Hessians that do not fit.
    """
    if method not in METHODS:
        raise InputError(f"quantization method '{method}' is not known: expected one of {sorted(METHODS)}")
    if grid.num_bits not in BITS:
        raise InputError(
            f"{name}: {grid.num_bits} bits are not known: use one of {', '.join(map(str, BITS))}"
        )
    return METHODS[method](weights, grid, name, hessians, gptq or Gptq())
