"""Predict what every instance would cost prompts from outside the pipeline, from one prefill by the scorer.

In: a JSON Lines file (one object a line: prompt or prompt_ids, optionally id and class), the scorer's checkpoint,
artifacts/fwp/predictor.json and artifacts/decomposition. Out: a table on the terminal; --output a .parquet or
.jsonl file with a row a prompt, in the file's order: id, class, prompt_tokens, truncated, log_ppl, log_length, log_fwp,
separable_<i>, predicted_<i>, low_<i> and high_<i> (90 % interval) of every instance i, nats per token, outside,
outside_reason. Costs one forward pass over the prompts; memory does not grow with their number: they are
read twice, checked before the model is loaded, then scored in windows of 2,048, sorted by length within one.
A command for people, no stage of the pipeline.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tasks.console import run_step
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.moe.tensors import read_config
from tasks.params import Params, load_params
from tasks.risk.forecast import Forecaster
from tasks.risk.forecast_file import check_format, writing
from tasks.risk.forecast_table import Totals, show
from tasks.risk.online import read_signals
from tasks.sources.prompts import Checked, PromptFile
from tasks.sources.tokens import Tokens

VERSION = 1

PROGRESS_SECONDS = 10


def run(
    prompts: Path,
    artifacts: Path,
    params: Params,
    output: Path | None = None,
    batch_tokens: int | None = None,
    truncate: bool = False,
) -> tuple[Forecaster, Totals, Checked]:
    """Score the file `prompts` and write `output` if it is given.

    `batch_tokens`: of one forward pass, by default runtime.batch_tokens. `truncate`: of a prompt beyond the
    model's context, score the first tokens; else it is an error. Raises InputError for a prompt that cannot
    be scored and for artifacts that are missing or do not belong together, before the model is loaded.
    """
    check_format(output)
    if output is not None and output.resolve() == prompts.resolve():
        raise InputError(f"--output {output} is the file of the prompts itself: give another name")
    scorer = params.calibrate_fwp.scorer
    folder = artifacts / "reference" if scorer == "reference" else artifacts / "instances" / scorer
    forecaster = Forecaster.load(
        artifacts / "fwp", artifacts / "decomposition", scorer, params.quantize_instances.names
    )
    config = read_config(folder)
    tokens = Tokens(
        load_tokenizer(folder), params.prepare_requests.bos, params.prepare_requests.chat_template
    )
    context = getattr(config, "max_position_embeddings", None)
    file = PromptFile(prompts, tokens, config.vocab_size, context, truncate)
    checked = file.check()
    model = load_model(folder, dtype=getattr(torch, params.score_requests.compute_dtype))
    forecaster.check_model(model)
    totals, started, printed = Totals(list(forecaster.predictors)), time.monotonic(), time.monotonic()
    with writing(output) as write:
        for window in file.windows():
            frame = read_signals(
                model,
                [prompt.ids for prompt in window],
                [prompt.id for prompt in window],
                forecaster.signals,
                batch_tokens or params.runtime.batch_tokens,
                str(prompts),
                progress=False,
            )
            frame.insert(0, "id", [prompt.id for prompt in window])
            frame.insert(1, "class", [prompt.class_name or "" for prompt in window])
            frame.insert(3, "truncated", [prompt.truncated for prompt in window])
            frame = forecaster.forecast(frame)
            totals.add(frame, forecaster.short(frame))
            write(frame.drop(columns=[name for name in frame if name.startswith("log_fwp_")]))
            if time.monotonic() - printed > PROGRESS_SECONDS or totals.prompts == checked.prompts:
                printed, seconds = time.monotonic(), time.monotonic() - started
                rate = f"{totals.prompts / seconds:.1f} prompts/s, {totals.tokens / seconds:.0f} tokens/s"
                print(f"  scored {totals.prompts}/{checked.prompts}, {rate}", file=sys.stderr, flush=True)
    return forecaster, totals, checked


def notes(checked: Checked, totals: Totals, prompts: Path, output: Path | None) -> list[str]:
    """What was counted beside the predictions, and what to do next."""
    lines = []
    if checked.without_class:
        lines.append(
            f"{checked.without_class} of {checked.prompts} prompts have no class: they count as prompts of an average "
            "one; a field `class`, of those in the requests, narrows the prediction."
        )
    if checked.truncated:
        lines.append(
            f"{checked.truncated} prompts are longer than the model's context: the end was left out."
        )
    if totals.outside > totals.prompts / 2:
        lines.append(
            "next: most prompts are unlike those that the predictors were fitted on: put such requests into "
            "prepare_requests (source: jsonl) and run `make run` again"
        )
    elif output is None:
        lines.append(
            f"next: keep every row: python -m tasks.score_prompts {prompts} --output prompts.parquet"
        )
    else:
        lines.append(
            f"next: {output} has a row for every prompt; compare its predicted_<instance> with your budget"
        )
    return lines


def main(
    prompts: Annotated[Path, typer.Argument(help="JSON Lines: prompt, optionally id and class.")],
    output: Annotated[Path | None, typer.Option(help="A .parquet or .jsonl file for every row.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per forward pass.")] = None,
    truncate: Annotated[
        bool, typer.Option(help="Score the first tokens of a prompt that is too long.")
    ] = False,
    artifacts: Annotated[Path, typer.Option(help="The pipeline's artifacts.")] = Path("artifacts"),
) -> None:
    """Predict the damage of every instance on the prompts in the file PROMPTS."""
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    forecaster, totals, checked = run(prompts, artifacts, params, output, batch_tokens, truncate)
    console = Console(width=None if sys.stdout.isatty() else 150)
    show(totals, forecaster, notes(checked, totals, prompts, output), console)


if __name__ == "__main__":
    run_step(main)
