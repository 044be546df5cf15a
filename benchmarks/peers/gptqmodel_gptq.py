"""gptqmodel's GPTQ, expert by expert, as its processor drives it.

Options are fields of its GPTQConfig (damp_percent, mse, desc_act, act_group_aware, static_groups), block_size, hessians
(own, its default; everyone: its routing bypass) and fallback: an expert that fewer than 0.5 % of the tokens reach is
rounded to nearest, its default, or false.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from gptqmodel.quantization.config import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ

from benchmarks.peers.worker import Job, serve


def gptq(job: Job):
    options = dict(job.options)
    del options["hessians"]  # the job's own
    block_size, fallback = options.pop("block_size"), options.pop("fallback")
    config = QuantizeConfig(
        bits=job.num_bits,
        group_size=job.group_size,
        sym=job.symmetric,
        offload_to_disk=False,
        **({} if fallback else {"fallback": None}),
        **options,
    )
    tasks = []
    for expert, weight in enumerate(job.weights):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.float()
        task = GPTQ(linear, config)
        task.quantizer.configure(perchannel=True)
        total, task.nsamples = job.hessian(expert)
        task.H = total * (2 / max(task.nsamples, 1))
        task.expected_nsamples = job.calibration_tokens
        tasks.append(task)

    def work() -> torch.Tensor:
        return torch.stack([task.quantize(blocksize=block_size)[0] for task in tasks])

    return work, lambda quantized: quantized


if __name__ == "__main__":
    serve({"gptq": gptq}, {name: version(name) for name in ("gptqmodel", "transformers", "torch")})
