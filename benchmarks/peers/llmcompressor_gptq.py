"""llmcompressor's GPTQ as its GPTQModifier treats linearized experts: observers per module, one batched call.

Options: observer (memoryless_minmax, its default; memoryless_mse; imatrix_mse, which weights by E[x²]) with
observer_kwargs, actorder, damping, block_size, hessians (everyone, its default: every calibration token goes through
every expert; own), and gate_up: "separate", as the library has it, or "joined", which spares it one of two
factorizations of the same Hessian. The batch is all experts of a shape at once (batched_quantization; its "auto" is
one by one on a CPU).
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.observers import Observer

from benchmarks.peers.worker import Job, serve


def gptq(job: Job):
    options = job.options
    args = QuantizationArgs(
        num_bits=job.num_bits,
        type="int",
        symmetric=job.symmetric,
        strategy="group",
        group_size=job.group_size,
        observer=options["observer"],
        observer_kwargs=dict(options.get("observer_kwargs", {})),
        actorder=options["actorder"],
    )
    experts = len(job.weights)
    parts = job.parts if options["gate_up"] == "separate" else [sum(job.parts)]
    modules = [
        part for weight in job.weights for part in weight.split(parts)
    ]  # an expert's modules side by side
    moments = [job.hessian(expert) for expert in range(experts)]

    def work() -> torch.Tensor:
        scales, zero_points = [], []
        for place, module in enumerate(modules):
            observer = Observer.load_from_registry(args.observer, base_name="weight", args=args)
            if args.observer == "imatrix_mse":
                total, tokens = moments[place // len(parts)]
                observer._imatrix_sum = total.diagonal().clone()
                observer._imatrix_count = torch.tensor(tokens)
            found = observer(module).get_qparams()
            scales.append(found["scale"])
            zero_points.append(found["zero_point"])
        hessians = torch.stack([total / max(tokens, 1) for total, tokens in moments for _ in parts])
        quantized, _, _ = quantize_weight(
            weights=torch.stack(modules).float(),
            hessians=hessians,
            scale=torch.stack(scales),
            zero_point=torch.stack(zero_points),
            global_scale=None,
            quant_args=args,
            blocksize=options["block_size"],
            percdamp=options["damping"],
        )
        return quantized

    return work, lambda quantized: quantized.view(job.weights.shape)


if __name__ == "__main__":
    serve({"gptq": gptq}, {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch")})
