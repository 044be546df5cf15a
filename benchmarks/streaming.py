"""Quantize a checkpoint with the layer shapes of Qwen3-30B-A3B, and watch the memory and the time that it takes.

    python -m benchmarks.streaming [--methods hqq gptq] [--workers 1 2] [--folder DIR]

Writes two layers of random weights (128 experts, hidden 2048, expert width 768, bfloat16: 2.5 GB) into a temporary
folder, quantizes them to 4 bits in a process of its own, and samples the resident memory of that process and all
its children, mapped files included. Each run must stay below the largest layer in float32 times 3 plus 1 GiB.
Needs 8 GB of disk; some minutes a method on one core. CPU seconds are of all processes together, start included:
the rate per CPU second does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil
import torch
from transformers import Qwen3MoeConfig

from tasks.contracts import GIB, read_json, write_json
from tasks.params import load_params
from tasks.quant.formats import INDEX_FILE, TensorFile
from tasks.quant.methods import METHODS

ROOT = Path(__file__).parents[1]
LAYERS, EXPERTS, HIDDEN, WIDTH, VOCABULARY, BITS = 2, 128, 2048, 768, 2048, 4
SEQUENCES, LENGTH = 8, 64  # calibration tokens: about 32 for each expert
REAL_LAYERS = 48  # of Qwen3-30B-A3B
SAMPLE_SECONDS = 0.1


def write_checkpoint(folder: Path) -> None:
    """Random weights, one shard a layer, written tensor by tensor."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=6144, moe_intermediate_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=EXPERTS, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    shards: dict[str, dict[str, tuple[int, ...]]] = {
        "model-00000.safetensors": {
            "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
            "lm_head.weight": (VOCABULARY, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shards[f"model-{layer + 1:05d}.safetensors"] = {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (4096, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (512, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (512, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, 4096),
            f"{name}.self_attn.q_norm.weight": (128,),
            f"{name}.self_attn.k_norm.weight": (128,),
            f"{name}.mlp.gate.weight": (EXPERTS, HIDDEN),
            **{
                f"{name}.mlp.experts.{expert}.{matrix}.weight": shape
                for expert in range(EXPERTS)
                for matrix, shape in (
                    ("gate_proj", (WIDTH, HIDDEN)),
                    ("up_proj", (WIDTH, HIDDEN)),
                    ("down_proj", (HIDDEN, WIDTH)),
                )
            },
        }
    generator = torch.Generator().manual_seed(0)
    for shard, tensors in shards.items():
        entries = {name: (torch.bfloat16, shape) for name, shape in tensors.items()}
        with TensorFile(folder / shard, entries) as file:
            for name, shape in tensors.items():
                norm = len(shape) == 1
                values = torch.ones(shape) if norm else 0.02 * torch.randn(shape, generator=generator)
                file.write(name, values.bfloat16())
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def write_calibration(folder: Path) -> None:
    """Random tokens, as prepare_requests lays them out."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    pd.DataFrame({"id": range(SEQUENCES), "ids": ids.tolist()}).to_parquet(folder / "calibration.parquet")


def quantize(folder: Path, method: str, workers: int) -> None:
    """The measured process."""
    from tasks import quantize_instances

    params = load_params(ROOT / "params.yaml")
    torch.set_num_threads(1)
    section = params.quantize_instances.model_copy(update={"method": method, "group_size": 64})
    runtime = params.runtime.model_copy(update={"workers": workers, "engine": "processes", "address": None})
    output = folder / f"{method}_{workers}"
    quantize_instances.run(folder / "reference", output, BITS, section, folder / "requests", runtime)


def watched(folder: Path, method: str, workers: int) -> dict[str, float]:
    """Run `quantize` in a process of its own; peak bytes of its tree, wall and CPU seconds."""
    arguments = ["--one", method, str(workers), "--folder", str(folder)]
    before, started, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.streaming", *arguments], cwd=ROOT)
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            peak = max(peak, sum(own.memory_info().rss for own in [tree, *tree.children(recursive=True)]))
        except psutil.NoSuchProcess:
            continue  # one ended between the listing and the question
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{method} with {workers} workers ended with status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"peak_bytes": peak, "seconds": time.monotonic() - started, "cpu_seconds": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--methods", nargs="+", default=["hqq", "clip_search", "gptq"], choices=sorted(METHODS)
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--folder", type=Path, help="an existing folder to work in, by default a temporary one"
    )
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        quantize(options.folder, options.one[0], int(options.one[1]))
        return
    layer = 3 * EXPERTS * HIDDEN * WIDTH
    bound = 3 * 4 * layer + GIB
    with tempfile.TemporaryDirectory(prefix="streaming-", dir=options.folder) as name:
        folder = Path(name)
        (folder / "reference").mkdir()
        write_checkpoint(folder / "reference")
        write_calibration(folder / "requests")
        on_disk = sum(path.stat().st_size for path in (folder / "reference").iterdir())
        print(
            f"{LAYERS} layers of {layer / 1e6:.0f} M expert weights, {on_disk / 1e9:.2f} GB on disk; bound "
            f"{layer * 4 / 1e9:.2f} GB x 3 + 1 GiB = {bound / 1e9:.2f} GB; W{BITS}, group 64, one thread a worker"
        )
        over = []
        for method in options.methods:
            hashes = {}
            for workers in options.workers:
                found = watched(folder, method, workers)
                manifest = read_json(folder / f"{method}_{workers}" / "manifest.json")
                hashes[workers] = json.dumps([shard["sha256"] for shard in manifest["experts"]])
                weights, seconds, peak = manifest["expert_parameters"], found["seconds"], found["peak_bytes"]
                print(
                    f"{method:11} workers {workers}: {manifest['size_bytes'] / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB "
                    f"({peak / bound:.0%} of the bound), {seconds:.0f} s, {weights / seconds / 1e6:.1f} Mp/s, "
                    f"{weights / found['cpu_seconds'] / 1e6:.1f} Mp per CPU second, {REAL_LAYERS} layers in "
                    f"{seconds / LAYERS * REAL_LAYERS / 3600:.1f} h, relative error {manifest['relative_error']:.4f}",
                    flush=True,
                )
                if workers == 1 and peak > bound:
                    over.append(method)
            if len(set(hashes.values())) > 1:
                raise SystemExit(f"{method}: the shards differ between {sorted(hashes)} workers")
        print("same bytes for any number of workers" if len(options.workers) > 1 else "")
        if over:
            raise SystemExit(f"over the bound with one worker: {', '.join(over)}")


if __name__ == "__main__":
    main()
