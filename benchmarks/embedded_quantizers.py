"""What quantizing the embedded model costs: mean ΔNLL and KL of W2, W3, W4 for every method and group size.

    python -m benchmarks.embedded_quantizers            # from the project's root, after `make run`

In: artifacts/reference (source smollm2-moe), artifacts/requests. Out: benchmarks/embedded_quantizers.jsonl, one line a
setting, and the table benchmarks/embedded_quantizers.md. A run that was stopped carries on where it was.

Experts are quantized in memory, as the stage quantize_instances does, and written into one loaded model. Scored are
the response tokens of a fixed set of holdout requests, the same number of every class; the damage is the mean over
requests of a request's mean, as in metrics/scores. gptq's Hessians come from the calibration tokens, which are
disjoint from every request, with the reference's own inputs at every layer (`inputs: reference`), once for all
settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tasks.console import run_step, timed, track
from tasks.contracts import InputError, replacing_file
from tasks.moe.checkpoint import load_model
from tasks.moe.layerwise import walk_layers
from tasks.moe.prefill import HEAD_CHUNK_VALUES, head_logits, prefill
from tasks.moe.registry import moe_layers
from tasks.moe.tensors import read_config
from tasks.params import Params, load_params
from tasks.quant.formats import file_sha256
from tasks.quant.gptq import Gptq
from tasks.quant.grid import Grid
from tasks.quant.hessian import Hessians
from tasks.quant.methods import NEEDS_HESSIANS, quantize
from tasks.replication.calibration import read_calibration
from tasks.risk.scoring import Requests, divergence, read_requests

VERSION = 1
METHODS = ("rtn", "clip_search", "hqq", "gptq")
FORMS = ((32, False), (64, False), (0, False), (64, True))  # group size, symmetric
BITS = (2, 3, 4)
PAPER = {2: 0.9437, 3: 0.1832, 4: 0.0513}  # mean ΔNLL of Qwen3-30B-A3B (arXiv 2609.12550)
SOURCE_GROUP = 32  # the embedded weights were unpacked from groups of 32: they lie on that grid
FLOOR = 0.001  # nats: a mean ΔNLL below counts as this in the distance to the paper


@dataclass(frozen=True)
class Setting:
    method: str
    group_size: int  # 0: the whole row
    symmetric: bool
    bits: int

    @property
    def name(self) -> str:
        form = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.method} W{self.bits} group {self.group_size or 'row'} {form}"

    @property
    def row(self) -> tuple[str, int, bool]:
        """The table's row."""
        return self.method, self.group_size, self.symmetric


@dataclass(frozen=True)
class Result(Setting):
    """Damage in nats per response token: mean over requests, and its standard error."""

    dnll: float
    dnll_error: float
    kl: float
    kl_error: float

    @property
    def setting(self) -> Setting:
        return Setting(self.method, self.group_size, self.symmetric, self.bits)


class Experts:
    """The routed experts of a loaded model, and what they were before anything was quantized."""

    def __init__(self, model: Any, stored: torch.dtype, hessians: list[dict[str, Hessians]] | None) -> None:
        """`stored` is the checkpoint's type, which decides the type of the scales."""
        self._views = [layer.matrices() for layer in moe_layers(model)]
        self._reference = [
            {name: view.to(stored, copy=True) for name, view in views.items()} for views in self._views
        ]
        self._hessians = hessians
        for views, kept in zip(self._views, self._reference, strict=True):
            if any(not torch.equal(kept[name].to(view.dtype), view) for name, view in views.items()):
                raise InputError(
                    f"the experts are not {stored}, as config.json says: expected one type for all"
                )

    def quantize(self, setting: Setting, gptq: Gptq) -> None:
        """Write the experts of a setting into the model."""
        grid = Grid(setting.bits, setting.group_size, setting.symmetric)
        for place, (views, weights) in enumerate(zip(self._views, self._reference, strict=True)):
            readers = {"hidden": ["gate_proj", "up_proj"], "inner": ["down_proj"]}
            for inputs, names in readers.items():
                both = torch.cat(
                    [weights[name] for name in names], dim=1
                )  # [E, out, in]: one Hessian for both
                hessians = self._hessians[place][inputs] if self._hessians else None
                made = quantize(setting.method, both, grid, inputs, hessians, gptq).dequantize()
                for name, part in zip(
                    names, made.split([weights[n].shape[1] for n in names], dim=1), strict=True
                ):
                    views[name].copy_(part)

    @contextmanager
    def restored(self, kept: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Inside, the experts `kept`, (place of the MoE layer, expert), are as they were before anything was
        quantized."""
        held = [
            (view[expert], view[expert].clone(), self._reference[place][name][expert])
            for place, expert in kept
            for name, view in self._views[place].items()
        ]
        for view, _, exact in held:
            view.copy_(exact)
        try:
            yield
        finally:
            for view, quantized, _ in held:
                view.copy_(quantized)


def chosen(requests: Requests, count: int) -> Requests:
    """The first holdout requests of every class in the file's order, `count` in all."""
    holdout: dict[str, list[int]] = {}
    for row, (name, split) in enumerate(zip(requests.frame["class"], requests.frame["split"], strict=True)):
        if split == "holdout":
            holdout.setdefault(name, []).append(row)
    each, rest = divmod(count, len(holdout))
    most = min(map(len, holdout.values()))
    if rest or not 0 < each <= most:
        raise InputError(
            f"--requests is {count}: expected a multiple of the {len(holdout)} classes, at most "
            f"{len(holdout) * most}"
        )
    rows = sorted(row for own in holdout.values() for row in own[:each])
    return Requests(
        requests.frame.loc[rows].reset_index(drop=True),
        [requests.sequences[row] for row in rows],
        requests.prompt_length[rows],
    )


@dataclass(frozen=True)
class Losses:
    """Of the response tokens of all requests, one request after the other: M predictions."""

    hidden: torch.Tensor  # [M, H] before the lm_head
    nll: np.ndarray  # [M] float64 nats
    kl: np.ndarray  # [M] float64 nats, from the reference; zeros for itself


@torch.inference_mode()
def losses(model: Any, requests: Requests, batch_tokens: int, label: str, reference: Losses | None) -> Losses:
    """One forward pass; the lm_head on the response's predictions alone, and once more on the reference's."""
    own: dict[int, torch.Tensor] = {}
    for batch in prefill(model, requests.sequences, batch_tokens, label):
        for place, row in enumerate(batch.rows):
            first, end = int(requests.prompt_length[row]) - 1, len(requests.sequences[row]) - 1
            own[row] = batch.hidden[place, first:end].clone()
    hidden = torch.cat([own[row] for row in range(len(own))])
    targets = torch.tensor(
        [
            token
            for ids, n in zip(requests.sequences, requests.prompt_length, strict=True)
            for token in ids[n:]
        ]
    )
    nll, kl = torch.empty(len(targets)), torch.zeros(len(targets))
    chunk = max(1, HEAD_CHUNK_VALUES // model.config.vocab_size)
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        log_model = head_logits(model, hidden[part]).log_softmax(dim=-1)
        nll[part] = -log_model.gather(1, targets[part, None])[:, 0]
        if reference is not None:
            kl[part] = divergence(head_logits(model, reference.hidden[part]).log_softmax(dim=-1), log_model)
    return Losses(hidden, nll.double().numpy(), kl.clamp_(min=0).double().numpy())


def request_means(requests: Requests, reference: Losses, own: Losses) -> dict[str, np.ndarray]:
    """The damage "dnll" and "kl" of every request [R]: means over its response tokens."""
    counts = [len(ids) - int(n) for ids, n in zip(requests.sequences, requests.prompt_length, strict=True)]
    ends = np.cumsum(counts).tolist()
    return {
        damage: np.array([part.mean() for part in np.split(values, ends[:-1])])
        for damage, values in (("dnll", own.nll - reference.nll), ("kl", own.kl))
    }


def measured(setting: Setting, requests: Requests, reference: Losses, own: Losses) -> Result:
    found = {}
    for damage, means in request_means(requests, reference, own).items():
        found[damage] = float(means.mean())
        found[f"{damage}_error"] = float(means.std(ddof=1) / np.sqrt(len(means)))
    return Result(**asdict(setting), **found)


def run(settings: Sequence[Setting], count: int, artifacts: Path, out: Path, params: Params) -> None:
    """Measure the settings that `out` lacks, on `count` holdout requests, and append them."""
    batch_tokens, own = params.runtime.batch_tokens, params.quantize_instances.gptq
    gptq = Gptq(damping=own.damping, shrinkage=own.shrinkage)
    folder = artifacts / "reference"
    model = load_model(folder)
    requests = chosen(
        read_requests(artifacts / "requests" / "requests.parquet", model.config.vocab_size), count
    )
    calibration = read_calibration(artifacts / "requests")
    if {tuple(ids) for ids in calibration} & {tuple(ids) for ids in requests.sequences}:
        raise InputError("a calibration sequence is also a holdout request: run prepare_requests again")
    stamp = {
        "version": VERSION,
        "requests": digest(requests.sequences),
        "calibration": digest(calibration),
        "reference": [file_sha256(path) for path in sorted(folder.glob("*.safetensors"))],
        "gptq": asdict(gptq),
    }
    begin(out, stamp)
    done = {result.setting for result in read(out)}
    left = [setting for setting in settings if setting not in done]
    if not left:
        return
    hessians = None
    if any(setting.method in NEEDS_HESSIANS for setting in left):
        walk = walk_layers(folder, calibration, batch_tokens, "reference", "Hessians of the reference")
        hessians = [step.hessians() for step in walk]
    with timed(f"reference: {count} requests"):
        reference = losses(model, requests, batch_tokens, "prefill", None)
    experts = Experts(model, read_config(folder).dtype, hessians)
    for setting in track(left, "settings", len(left)):
        experts.quantize(setting, gptq)
        own_losses = losses(model, requests, batch_tokens, setting.name, reference)
        result = measured(setting, requests, reference, own_losses)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def begin(path: Path, stamp: dict[str, Any]) -> None:
    """Begin the file of results, or carry on: a line that a kill cut short is dropped.

    Raises InputError when it holds results of other inputs.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else json.dumps(stamp) + "\n"
    whole = text[: text.rfind("\n") + 1]
    if json.loads(whole.splitlines()[0]) != stamp:
        raise InputError(
            f"{path}: holds results of another model, other requests or settings: move it away, or --out"
        )
    with replacing_file(path) as temporary:
        temporary.write_text(whole, encoding="utf-8")


def read(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def distance(row: dict[int, Result]) -> float | None:
    """Mean over the widths of |ln(ΔNLL / the paper's)|; None where a width is missing."""
    if set(row) != set(PAPER):
        return None
    return float(np.mean([abs(np.log(max(row[bits].dnll, FLOOR) / PAPER[bits])) for bits in PAPER]))


def table(results: Sequence[Result], count: int) -> str:
    """The results in Markdown: one row a method and form, and which comes nearest to the paper."""
    rows: dict[tuple[str, int, bool], dict[int, Result]] = {}
    for result in sorted(
        results, key=lambda one: (METHODS.index(one.method), FORMS.index((one.group_size, one.symmetric)))
    ):
        rows.setdefault(result.row, {})[result.bits] = result
    lines = [
        f"Damage of quantized experts on the embedded model, nats per response token: mean of {count} holdout requests",
        "± its standard error. KL is KL(reference || quantized). Every expert at one width; gptq with inputs of the",
        "reference. Distance: mean over the widths of |ln(ΔNLL / paper's)|.",
        "",
        "| method | group | grid | " + " | ".join(f"W{bits} ΔNLL (KL)" for bits in BITS) + " | distance | |",
        "|---" * (len(BITS) + 5) + "|",
        "| paper, Qwen3-30B-A3B | | | " + " | ".join(f"{PAPER[bits]:.2f}" for bits in BITS) + " | 0 | |",
    ]
    ranked = []
    for (method, group, symmetric), row in rows.items():
        source = group == SOURCE_GROUP
        far = distance(row)
        if far is not None and not source:
            ranked.append((far, method, group, symmetric))
        cells = [_cell(row.get(bits)) for bits in BITS]
        grid = "symmetric" if symmetric else "asymmetric"
        lines.append(
            f"| {method} | {group or 'row'} | {grid} | {' | '.join(cells)} | "
            f"{'' if far is None else f'{far:.2f}'} | {'source grid' if source else ''} |"
        )
    lines += [
        "",
        f"source grid: the embedded weights were stored in groups of {SOURCE_GROUP} and lie on that grid, so",
    ]
    lines += ["that W4 there is no result, and not ranked (the refitted down projections alone are off it)."]
    if ranked:
        far, method, group, symmetric = min(ranked)
        lines += [
            "",
            f"Nearest to the paper's 0.94 / 0.18 / 0.05: {method}, group {group or 'the whole row'}, "
            f"{'symmetric' if symmetric else 'asymmetric'} (distance {far:.2f}).",
        ]
    return "\n".join(lines) + "\n"


def _cell(result: Result | None) -> str:
    return "" if result is None else f"{result.dnll:.3f} ± {result.dnll_error:.3f} ({result.kl:.3f})"


def digest(sequences: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in sequences]).encode()).hexdigest()


def main(
    requests: Annotated[int, typer.Option(help="holdout requests, a multiple of the classes")] = 42,
    method: Annotated[list[str] | None, typer.Option(help="only these methods")] = None,
    group: Annotated[list[int] | None, typer.Option(help="only these group sizes; 0: the whole row")] = None,
    artifacts: Annotated[Path, typer.Option(help="of a run with source smollm2-moe")] = Path("artifacts"),
    out: Annotated[Path, typer.Option(help="results, one line a setting")] = Path(
        "benchmarks/embedded_quantizers.jsonl"
    ),
) -> None:
    """Measure every setting that the results lack, and print the table."""
    settings = [
        Setting(name, size, symmetric, bits)
        for name in METHODS if not method or name in method
        for size, symmetric in FORMS if not group or size in group
        for bits in BITS
    ]  # fmt: skip
    if not settings:
        raise InputError(
            f"no setting is left: methods are {list(METHODS)}, groups {sorted({s for s, _ in FORMS})}"
        )
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    run(settings, requests, artifacts, out, params)
    text = table(read(out), requests)
    with replacing_file(out.with_suffix(".md")) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_step(main)
