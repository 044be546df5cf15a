"""Memory and speed of score_prompts on many short prompts: 10,000 must take no more memory than 1,000.

    python -m benchmarks.prompt_streaming [--artifacts artifacts] [--prompts 1000 10000] [--words 8]

Prompts are word by word from a seeded generator, in a file; each number of them is scored in a process of its own,
whose peak memory the system counts (model and libraries included). The growth is over the first number of prompts.
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

import numpy as np
import torch

from tasks.params import load_params
from tasks.score_prompts import run

ROOT = Path(__file__).parents[1]
MIB = 2**20
WORDS = (
    "the",
    "of",
    "a",
    "number",
    "is",
    "how",
    "many",
    "apples",
    "river",
    "question",
    "answer",
    "value",
    "each",
    "day",
)


def write_prompts(path: Path, count: int, words: int) -> None:
    """`count` prompts of 1 to 2 `words` words."""
    generator = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            chosen = generator.integers(0, len(WORDS), int(generator.integers(words, 2 * words + 1)))
            row = {"id": f"p{number}", "prompt": " ".join(WORDS[place] for place in chosen)}
            file.write(json.dumps(row) + "\n")


def one(prompts: Path, artifacts: Path, output: Path) -> None:
    """The measured process; prints its figures as JSON."""
    params = load_params(ROOT / "params.yaml")
    torch.set_num_threads(1)
    cpu, wall = time.process_time(), time.monotonic()
    _, totals, _ = run(prompts, artifacts, params, output)
    figures = {
        "prompts": totals.prompts,
        "tokens": totals.tokens,
        "seconds": time.monotonic() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--artifacts", type=Path, default=ROOT / "artifacts")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1000, 10_000])
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--one", nargs=2, type=Path, metavar=("FILE", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], options.artifacts, options.one[1])
        return
    first = None
    with tempfile.TemporaryDirectory(prefix="prompts-") as name:
        for count in options.prompts:
            path = Path(name) / f"{count}.jsonl"
            write_prompts(path, count, options.words)
            arguments = [
                "--one",
                path,
                path.with_suffix(".parquet"),
                "--artifacts",
                options.artifacts.resolve(),
            ]
            command = [sys.executable, "-m", "benchmarks.prompt_streaming", *map(str, arguments)]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            first = first or found["peak_mib"]
            print(
                f"{found['prompts']} prompts, {found['tokens']} tokens: peak {found['peak_mib']:.0f} MiB "
                f"({found['peak_mib'] - first:+.0f}), {found['prompts'] / found['cpu_seconds']:.0f} prompts and "
                f"{found['tokens'] / found['cpu_seconds']:.0f} tokens per CPU second, {found['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
