"""The project's own quantizers."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.peers.worker import Job, serve
from tasks.quant.grid import Grid, QuantizedMatrix
from tasks.quant.hessian import Hessians
from tasks.quant.methods import METHODS, NEEDS_HESSIANS, quantize


def prepared(method: str, job: Job):
    """Any of METHODS with its default settings; own Hessians, which it shrinks to the pooled one itself."""
    grid = Grid(job.num_bits, job.group_size, job.symmetric)

    def work() -> QuantizedMatrix:
        hessians = Hessians(job.tokens, job.own) if method in NEEDS_HESSIANS else None
        return quantize(method, job.weights, grid, hessians=hessians)

    return work, QuantizedMatrix.dequantize


if __name__ == "__main__":
    serve({name: partial(prepared, name) for name in METHODS}, {"torch": torch.__version__})
