"""A reference -> the same model with GPTQ weights, made by Hugging Face Optimum (`optimum.gptq.GPTQQuantizer`).

The named baseline: attention, dense MLPs and shared experts ("dense"), routed experts ("experts"), or both. Needs
the extra [gptq], whose packages do not fit beside the others': `make setup-gptq` makes .venv-gptq for it.

What the library leaves to chance is checked here. Every matrix that was asked for is found in the files that were
written: fused experts, which the library skips without a word, are defused first, and are an error where they
cannot be. The files and both configurations agree about the zero points. The written checkpoint is loaded again: no
key missing, none unexpected, every tensor bit for bit what it was in memory, logits equal. Nothing replaces OUTPUT
before.

Costs: the reference and one block's Hessians in memory; every block runs on all calibration tokens up to five
times. A checkpoint with quantized experts is read by `load` of this file only: transformers alone would give it
random experts and a line in its log.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, cast, get_args
from unittest.mock import patch

import torch
import typer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTQConfig

from tasks.backends.gptq_library import (
    KERNEL,
    defuse,
    defuse_unchanged,
    hidden,
    optimum_quantizer,
    plain_kernels,
    quiet,
    require_packages,
    watched,
)
from tasks.backends.gptq_matrices import (
    Matrix,
    Targets,
    audit_coverage,
    check_defused,
    check_sizes,
    count_kinds,
    decoder_blocks,
    fused_experts,
    linear_matrices,
    quantized_names,
    reading_groups,
)
from tasks.console import run_step, timed
from tasks.contracts import InputError, read_json, replacing_folder, write_json
from tasks.moe.tensors import CheckpointTensors, check_keys, read_config

VERSION = 1
SIDECAR = "optimum_gptq.json"
PROBE_TOKENS = 64  # of the first calibration sequence, on which models are compared


@dataclass(frozen=True)
class Settings:
    """What is quantized and how; everything else is the library's default."""

    bits: int = 4
    group_size: int = 64
    targets: Targets = "dense"


@dataclass(frozen=True)
class Result:
    """What was asked for and what is in the files."""

    asked: dict[str, int]  # matrices by kind
    quantized: dict[str, int]  # the same, counted in the files
    reference_bytes: int  # of the matrices that were asked for
    quantized_bytes: int
    rounded: list[str]  # matrices that no calibration token reached: the library rounds those to nearest
    sequential: str  # "groups": a group of matrices sees the quantized ones before it; "blocks": a block does
    reload_difference: float  # largest, in logits, of the loaded checkpoint from the model in memory


def run(reference: Path, output: Path, sequences: Sequence[Sequence[int]], settings: Settings) -> Result:
    """Quantize `reference`, a checkpoint folder, into `output` on calibration `sequences` of token ids.

    Raises InputError before any work when the extra is absent, and for sizes that do not fit, experts that cannot
    be defused and unusable calibration tokens; after it when a matrix was left out or the checkpoint does not
    load as it was. `output` is replaced only by a checkpoint that passed.
    """
    require_packages()
    quiet()
    if output.resolve() in (reference.resolve(), *reference.resolve().parents):
        raise InputError(
            f"{output} is, or holds, the reference {reference}: expected another folder to write"
        )
    fused, matrices = plan(reference, settings)
    tokenizer = load_tokenizer(reference)
    probe = _probe(sequences, read_config(reference).vocab_size)
    with timed(f"loading {reference}"):
        model = _load_reference(reference)
    if fused:
        with timed("defusing experts"):
            defuse_unchanged(model, fused)
    with plain_kernels():
        rounded, quantizer, sequential = _quantize(model, sequences, matrices, settings)
        expected, held = _logits(model, probe), _digests(model)
        with replacing_folder(output) as folder:
            _save(quantizer, model, folder)
            tokenizer.save_pretrained(folder)
            size_bytes = audit_coverage(folder, matrices, settings.bits, settings.group_size)
            item_bytes, shapes = model.dtype.itemsize, [matrix.shape for matrix in matrices]
            del model, quantizer
            with timed("loading what was written"):
                loaded = load(folder)
            difference = _difference(loaded, held, probe, expected, output)
            result = Result(
                asked=count_kinds(matrix.name for matrix in matrices),
                quantized=count_kinds(quantized_names(folder)),
                reference_bytes=sum(rows * columns for rows, columns in shapes) * item_bytes,
                quantized_bytes=size_bytes,
                rounded=sorted(rounded),
                sequential=sequential,
                reload_difference=difference,
            )
            write_json(folder / SIDECAR, {"VERSION": VERSION, "settings": asdict(settings), **asdict(result)})
    return result


def plan(reference: Path, settings: Settings) -> tuple[dict[str, tuple[int, ...]], list[Matrix]]:
    """Fused expert weights [E, ., .] to defuse, by name, and the matrices to quantize; no weight is read.

    Raises InputError for a quantized or unknown model, for experts that cannot be defused, for sizes that do not
    fit, and when there is nothing to quantize.
    """
    if settings.bits not in (2, 3, 4, 8) or settings.targets not in get_args(Targets):
        raise InputError(
            f"bits are {settings.bits} and targets '{settings.targets}', expected 2, 3, 4 or 8 and "
            f"{', '.join(get_args(Targets))}"
        )
    config = read_config(reference)
    if getattr(config, "quantization_config", None):
        raise InputError(f"{reference}: the checkpoint is quantized already; give its reference")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    fused = fused_experts(skeleton) if settings.targets != "dense" else {}
    if fused:
        defuse(skeleton)
        check_defused(fused, skeleton)
    matrices = linear_matrices(skeleton, settings.targets)
    if not matrices:
        raise InputError(f"{reference}: the model has no linear layers for targets '{settings.targets}'")
    check_sizes(matrices, settings.group_size)
    return fused, matrices


def load(folder: str | Path) -> Any:
    """A GPTQ checkpoint as a model in eval mode, on the plain kernel (weights dequantized, products in the model's
    dtype).

    Where routed experts are quantized, they are defused before any weight is read; else transformers loads it.
    Raises InputError for missing or unexpected keys, in either case.
    """
    require_packages()
    quiet()
    folder = Path(folder)
    names = quantized_names(folder)
    with plain_kernels():
        if not count_kinds(names)["experts"]:
            options = read_json(folder / "config.json")["quantization_config"]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You passed `quantization_config`")  # for the kernel alone
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype="auto",
                    quantization_config=GPTQConfig(bits=options["bits"], backend=KERNEL),
                    local_files_only=True,
                    output_loading_info=True,
                )
            model, info = loaded
            check_keys(folder, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
            return model.eval()
        return _load_defused(folder)


def _load_defused(folder: Path) -> Any:
    config = read_config(folder)
    options = config.quantization_config
    del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    defuse(model)
    quantizer = optimum_quantizer().GPTQQuantizer.from_dict({**options, "backend": KERNEL})
    quantizer.convert_model(model, device_map={"": torch.device("cpu")})
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(CheckpointTensors(folder).files.values())):
        weights |= load_file(folder / file)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    check_keys(folder, set(missing) - tied, unexpected)
    model.tie_weights()
    return quantizer.post_init_model(model).eval()


def _load_reference(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    check_keys(folder, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return model.eval()


def _quantize(
    model: Any, sequences: Sequence[Sequence[int]], matrices: Sequence[Matrix], settings: Settings
) -> tuple[list[str], Any, str]:
    """Quantize `matrices` in place; names of those that no token reached, the quantizer, and how it went."""
    tokens = [torch.tensor([list(ids)]) for ids in sequences]
    examples = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
    groups = reading_groups(model, matrices)
    names = [name for group in groups for name in group]
    blocks: Any = model.get_submodule(decoder_blocks(model))
    # Where a block lacks one of a group's matrices, the library cannot take groups: then all of a block's at once.
    uniform = len(matrices) == len(names) * len(blocks)
    quantizer = optimum_quantizer().GPTQQuantizer(
        bits=settings.bits,
        dataset=examples,
        group_size=settings.group_size,
        modules_in_block_to_quantize=groups if uniform else None,
        true_sequential=uniform,
        block_name_to_quantize=decoder_blocks(model),
        backend=KERNEL,
    )
    asked = {matrix.name for matrix in matrices}
    others = [
        module for name, module in model.named_modules() if type(module) is nn.Linear and name not in asked
    ]
    with hidden(others), watched(model) as rounded:
        quantizer.quantize_model(model)
    quantizer.modules_in_block_to_quantize = groups  # what a reader of the checkpoint converts
    return rounded, quantizer, "groups" if uniform else "blocks"


def _save(quantizer: Any, model: Any, folder: Path) -> None:
    """Write the checkpoint with the library's own `save`, which turns the tensors to format v1.

    It writes the configuration that quantizing left, which says v2 and holds the calibration data: token ids cannot
    be written as JSON, and texts have no place in a checkpoint.
    """
    quantizer.dataset = None
    model.config.quantization_config = {
        **quantizer.to_dict(),
        "format": "gptq",
        "checkpoint_format": "gptq",
    }
    # Names of modules where experts are quantized: transformers knows how to turn only fused ones into original names.
    named = partial(model.save_pretrained, save_original_format=bool(fused_experts(model)))
    with patch.object(model, "save_pretrained", named):
        quantizer.save(model, str(folder))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside a checkpoint; raises InputError when there is none (transformers would make one up)."""
    if not any(file for pattern in ("tokenizer*", "vocab*", "*.model") for file in folder.glob(pattern)):
        raise InputError(
            f"{folder}: no tokenizer there: expected one beside the checkpoint, such as tokenizer.json"
        )
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def _logits(model: Any, probe: torch.Tensor) -> torch.Tensor:
    return model(input_ids=probe, use_cache=False).logits.float()


def _digests(model: Any) -> dict[str, str]:
    """A checksum of each tensor of a model, by name."""
    return {
        name: sha256(tensor.reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


def _difference(
    loaded: Any, held: dict[str, str], probe: torch.Tensor, expected: torch.Tensor, output: Path
) -> float:
    """The largest difference of the loaded checkpoint's logits from `expected`, those of the model in memory.

    Raises InputError unless each tensor is bit for bit as `held` says that it was in memory, and the logits are
    the same up to the order of sums, which depends on where tensors lie in memory.
    """
    found = _digests(loaded)
    changed = sorted(name for name in held.keys() | found.keys() if held.get(name) != found.get(name))
    difference = float((_logits(loaded, probe) - expected).abs().max())
    limit = 16 * torch.finfo(loaded.dtype).eps * float(expected.abs().max())
    if changed or not difference <= limit:
        raise InputError(
            f"{output}: loaded again, {len(changed)} of {len(held)} tensors are not as they were in memory"
            f"{f', first {changed[0]}' if changed else ''}, and logits differ by up to {difference:.3g}, expected "
            f"{limit:.2g} at most: not kept; install the versions of requirements-gptq.lock"
        )
    return difference


def _probe(sequences: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """The tokens [1, S] that models are compared on; raises InputError for unusable calibration sequences."""
    if not sequences or any(len(ids) < 2 for ids in sequences):
        raise InputError("calibration: expected sequences of 2 token ids or more, at least one")
    low, high = min(map(min, sequences)), max(map(max, sequences))
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"calibration: token ids from {low} to {high}, expected 0 to {vocabulary - 1}: they were made with "
            "another model's tokenizer"
        )
    return torch.tensor([list(sequences[0][:PROBE_TOKENS])])


# --- command line -------------------------------------------------------------------------------------------------


def read_sequences(
    path: Path, tokenize: Callable[[str], list[int]], limit: int, width: int
) -> list[list[int]]:
    """At most `limit` calibration tokens in sequences of at most `width`: the column `ids` of a .parquet file, or
    the text of any other, one sequence per paragraph.

    Raises InputError when there is none.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: no such calibration file; run `make`, or give --calibration a .parquet or text file"
        )
    if path.suffix == ".parquet":
        import pandas as pd

        rows = [list(map(int, ids)) for ids in pd.read_parquet(path, columns=["ids"])["ids"]]
    else:
        rows = [tokenize(part) for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    sequences, left = [], limit
    for ids in rows:
        ids = ids[: min(width, left)]
        if len(ids) >= 2:
            sequences.append(ids)
            left -= len(ids)
    if not sequences:
        raise InputError(f"{path}: no calibration sequence of 2 tokens or more")
    return sequences


def main(
    reference: Annotated[Path, typer.Argument(help="checkpoint folder, not quantized")],
    output: Annotated[Path, typer.Argument(help="folder to write, replaced when all checks pass")],
    bits: Annotated[int, typer.Option(help="2, 3, 4 or 8")] = 4,
    group_size: Annotated[int, typer.Option(help="inputs that share a scale")] = 64,
    targets: Annotated[str, typer.Option(help="dense, experts or all")] = "dense",
    calibration: Annotated[
        Path, typer.Option(help=".parquet with token ids, or a text file")
    ] = Path("artifacts/requests/calibration.parquet"),
    tokens: Annotated[int, typer.Option(help="calibration tokens at most")] = 32768,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
) -> None:  # fmt: skip
    """Quantize a checkpoint with Optimum's GPTQ, checked: everything asked for is quantized, and loads again."""
    torch.set_num_threads(threads)
    require_packages()
    logging.disable(logging.WARNING)  # the libraries' banners; what counts is checked
    config = read_config(reference)
    width = int(getattr(config, "max_position_embeddings", None) or 2048)
    sequences = read_sequences(calibration, load_tokenizer(reference).encode, tokens, min(width, 2048))
    result = run(reference, output, sequences, Settings(bits, group_size, cast(Targets, targets)))
    print(f"{'matrices':10} {'asked':>7} {'quantized':>10}")
    for kind in ("dense", "experts"):
        print(f"{kind:10} {result.asked[kind]:7} {result.quantized[kind]:10}")
    print(
        f"bytes: {result.reference_bytes:,} -> {result.quantized_bytes:,} "
        f"({result.reference_bytes / result.quantized_bytes:.2f}x smaller); "
        f"{sum(map(len, sequences)):,} calibration tokens; {len(result.rounded)} matrices saw none and were rounded\n"
        f"loaded again: 0 keys missing, 0 unexpected, logits differ by {result.reload_difference:g}\n"
        f"next: python -m tasks.audit_checkpoint {output}"
    )


if __name__ == "__main__":
    run_step(main)
