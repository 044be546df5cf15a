"""The caller's side of a peer: its process, and problems as files that it can read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.quantizer_data import Problem

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GPTQMODEL_CPU_WORKERS")
ONE_THREAD = dict.fromkeys(LIMITS, "1")


class PeerError(RuntimeError):
    """A peer's process ended or its library refused a job."""


@dataclass(frozen=True)
class Quantized:
    """What a library made of a problem."""

    weights: torch.Tensor  # [E, out, in] bfloat16, dequantized
    cpu_s: float  # of the whole process: a library that used more threads than one shows here
    wall_s: float


def write_problem(problem: Problem, path: Path) -> None:
    """Write a problem as `benchmarks.peers.worker` reads it."""
    shared = problem.everyone.stride(0) == 0  # gate and up: the same for all experts
    tensors = {
        "weights": problem.weights,
        "tokens": problem.tokens,
        "own": problem.own,
        "everyone": (problem.everyone[:1] if shared else problem.everyone).contiguous(),
    }
    facts = {"parts": json.dumps(problem.parts), "calibration_tokens": str(problem.calibration_tokens)}
    save_file(tensors, path, metadata=facts)


class Peer:
    """A running module of `benchmarks.peers`; ask `ready` before the first job, when all have been started."""

    def __init__(self, module: str, python: Path, folder: Path) -> None:
        self.name = module
        self._log = folder / f"{module}.log"
        self._result = folder / f"{module}.safetensors"
        reading, writing = os.pipe()
        log = self._log.open("w")
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.peers.{module}", str(writing)],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            text=True,
        )
        log.close()
        os.close(writing)
        self._answers = os.fdopen(reading)

    def ready(self) -> dict[str, str]:
        """Wait until the library is imported; its versions, by package. Raises PeerError with the end of its log when
        it is not."""
        return self._read()["versions"]

    def quantize(
        self,
        problem: Path,
        method: str,
        num_bits: int,
        group_size: int,
        symmetric: bool,
        options: Mapping[str, Any],
    ) -> Quantized:
        """Run one job. Raises PeerError when the library does."""
        assert self._process.stdin is not None
        request = {
            "problem": str(problem),
            "result": str(self._result),
            "method": method,
            "num_bits": num_bits,
            "group_size": group_size,
            "symmetric": symmetric,
            "options": dict(options),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise PeerError(f"{self.name}, {method} at {num_bits} bits: {answer['error']}")
        return Quantized(load_file(self._result)["weights"], answer["cpu_s"], answer["wall_s"])

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self._process.wait()
            end = self._log.read_text().splitlines()[-5:]
            raise PeerError(f"{self.name} ended with status {self._process.returncode}: {' | '.join(end)}")
        return json.loads(line)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._answers.close()
