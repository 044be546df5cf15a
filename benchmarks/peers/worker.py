"""One library in one process on one thread: jobs come in as lines of JSON on standard input, answers go out as lines
of JSON on the file descriptor that the command line names (libraries print on standard output).

Imports nothing but torch and safetensors, which every peer's environment has. A job names a problem's file (written
by `benchmarks.quantizers`), a method and its options; the answer says how long the method took. Only the method is
timed: neither reading the problem nor turning the result back into weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Job:
    """A stack of expert matrices to quantize."""

    weights: torch.Tensor  # [E, out, in] bfloat16
    parts: list[int]  # rows of each matrix in the stack, gate and up say
    tokens: torch.Tensor  # [E] int64
    own: torch.Tensor  # [E, in, in] float32, sum of x x^T over an expert's tokens
    everyone: torch.Tensor  # [E, in, in] float32, the same over all calibration tokens
    calibration_tokens: int
    num_bits: int
    group_size: int
    symmetric: bool
    options: dict[str, Any]

    def hessian(self, expert: int) -> tuple[torch.Tensor, int]:
        """(sum of x x^T [in, in], tokens) of the calibration that option `hessians` names: own or everyone."""
        if self.options["hessians"] == "everyone":
            return self.everyone[expert].clone(), self.calibration_tokens
        return self.own[expert].clone(), int(self.tokens[expert])


Result = Any
# A method prepares a job: what is timed, and how its result becomes weights [E, out, in].
Method = Callable[[Job], tuple[Callable[[], Result], Callable[[Result], torch.Tensor]]]


def serve(methods: Mapping[str, Method], versions: Mapping[str, str]) -> None:
    """Answer jobs until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    answers.write(json.dumps({"versions": dict(versions)}) + "\n")
    answers.flush()
    loaded: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}
    for line in sys.stdin:
        answer = _answer(json.loads(line), methods, loaded)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(
    request: dict[str, Any],
    methods: Mapping[str, Method],
    loaded: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]],
) -> dict[str, Any]:
    try:
        path = request["problem"]
        if path not in loaded:
            loaded.clear()  # one problem in memory at a time
            with safe_open(path, "pt") as file:
                facts = file.metadata()
            loaded[path] = (load_file(path), facts)
        tensors, facts = loaded[path]
        job = Job(
            tensors["weights"],
            json.loads(facts["parts"]),
            tensors["tokens"],
            tensors["own"],
            tensors["everyone"].expand_as(tensors["own"]),
            int(facts["calibration_tokens"]),
            request["num_bits"],
            request["group_size"],
            request["symmetric"],
            request["options"],
        )
        work, weights_of = methods[request["method"]](job)
        with torch.no_grad():
            wall, cpu = time.perf_counter(), time.process_time()
            result = work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            weights = weights_of(result).to(torch.bfloat16)  # the model's type, for every library alike
        save_file({"weights": weights.contiguous()}, request["result"])
        return {"wall_s": wall, "cpu_s": cpu}
    except Exception as error:  # noqa: BLE001 (another library's, of any kind: the caller reports it)
        return {"error": f"{type(error).__name__}: {error}"}
