"""The hqq library: one call of Quantizer.quantize per expert matrix.

Option: scales, "float32", as it stores scales and zero points, or "float16", rounded afterwards: as many bytes as ours.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from hqq.core.quantize import Quantizer

from benchmarks.peers.worker import Job, serve


def hqq(job: Job):
    def work() -> list[tuple[torch.Tensor, dict]]:
        return [
            Quantizer.quantize(
                weight, nbits=job.num_bits, group_size=job.group_size, axis=1, device="cpu", bitpack=False
            )
            for weight in job.weights
        ]

    def weights_of(found: list[tuple[torch.Tensor, dict]]) -> torch.Tensor:
        # Its default computes with float32 scales and float16 products.
        dtype = getattr(torch, job.options["scales"])
        return torch.stack(
            [
                Quantizer.dequantize(
                    packed,
                    {
                        **meta,
                        **{key: meta[key].to(dtype).float() for key in ("scale", "zero")},
                        "compute_dtype": torch.float32,
                    },
                )
                for packed, meta in found
            ]
        )

    return work, weights_of


if __name__ == "__main__":
    serve({"hqq": hqq}, {name: version(name) for name in ("hqq", "torch")})
