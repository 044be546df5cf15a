"""The libraries behind `optimum_gptq`, held to what is asked of them: optimum, gptqmodel and defuser.

Nothing here is imported before `require_packages` has said that they are installed and set their environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from tasks.console import track
from tasks.contracts import InputError

PACKAGES = ("optimum", "gptqmodel", "defuser")
# The default kernel on a CPU computes in bfloat16, and its first forward overwrites the weights that are saved.
KERNEL = "gptq_torch"


def require_packages() -> None:
    """Set the libraries' environment before they are imported; raise InputError when one is absent."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        raise InputError(
            f"the optimum backend needs {', '.join(absent)}: install the extra [gptq] in an environment of its "
            "own, as `make setup-gptq` does, and run .venv-gptq/bin/python -m tasks.backends.optimum_gptq"
        )
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(torch.get_num_threads()))
    # A C++ packer that is compiled at first use, for a minute; the Python one writes the same words.
    os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")


def optimum_quantizer() -> Any:
    """The module of optimum's `GPTQQuantizer`."""
    return import_module("optimum.gptq.quantizer")


def quiet() -> None:
    """Only warnings of the libraries' own loggers."""
    transformers_logging.disable_progress_bar()
    for name in ("optimum", "gptqmodel", "defuser", "tokenicer"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """No torch.compile of the kernels made inside: it needs a C++ compiler, and its rounding is its own."""
    kernel = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    with patch.object(kernel, "optimize", lambda *_, **__: None):
        yield


@contextmanager
def hidden(linears: Sequence[nn.Module]) -> Iterator[None]:
    """Keep the quantizer from layers that were not asked for: it takes whatever is exactly `nn.Linear`."""

    class Hidden(nn.Linear):
        pass

    for linear in linears:
        linear.__class__ = Hidden
    try:
        yield
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear


@contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """Show progress block by block; yield the list that collects names of matrices that no token reached."""
    library = optimum_quantizer()
    names = {module: name for name, module in model.named_modules()}
    rounded: list[str] = []

    class Counted(library.GPTQ):
        def fasterquant(self, *args: Any, **options: Any) -> Any:
            if not self.nsamples:
                rounded.append(names[self.module])
            return super().fasterquant(*args, **options)

    def progress(items: Any, desc: str = "", leave: bool = True, **_: Any) -> Any:
        return track(items, "quantizing blocks", len(items)) if leave else items

    with patch.object(library, "GPTQ", Counted), patch.object(library, "tqdm", progress):
        yield rounded


def defuse(model: Any) -> None:
    import_module("defuser").convert_model(model, cleanup_original=True)


@torch.no_grad()
def defuse_unchanged(model: Any, fused: Iterable[str]) -> None:
    """Defuse the weights `fused`, and raise InputError unless each expert's output stays what it was, up to the
    dtype's rounding."""
    modules = {
        name: model.get_submodule(name) for name in sorted({path.rpartition(".")[0] for path in fused})
    }
    before = {name: _each_expert(module, model) for name, module in modules.items()}
    defuse(model)
    limit = torch.finfo(model.dtype).eps ** 0.5
    for name, module in modules.items():
        change = (_each_expert(module, model) - before[name]).norm(dim=1)
        changed = (~(change <= limit * before[name].norm(dim=1))).nonzero().flatten().tolist()
        if changed:
            raise InputError(
                f"defusing changed {len(changed)} of {len(change)} experts of {name} ({type(module).__name__}), first "
                f"expert {changed[0]}: their outputs differ by more than {limit:.2g} of their norm; use method gptq of "
                "quantize_instances"
            )


def _each_expert(module: Any, model: Any) -> torch.Tensor:
    """[E, H] each expert's output on one seeded input of its own."""
    count = int(module.num_experts)
    hidden = torch.randn((count, model.config.hidden_size), generator=torch.Generator().manual_seed(0))
    index, weight = torch.arange(count).unsqueeze(1), torch.ones((count, 1), dtype=model.dtype)
    return module(hidden.to(model.dtype), index, weight).float()
