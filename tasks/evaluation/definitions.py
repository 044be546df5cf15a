"""Which benchmarks there are: YAML task files for lm-eval that read local JSON Lines files, and their
rows.
"""

from __future__ import annotations

import difflib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tasks.contracts import InputError

DEFINITIONS = Path(__file__).parent / "benchmarks"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and the rows that it is run on.

    `config` is lm-eval's, without data files. Each row holds its number in the file as `row`.
    """

    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def kind(self) -> str:
        """multiple_choice, loglikelihood_rolling or generate_until."""
        return self.config["output_type"]


def benchmark_names() -> list[str]:
    return sorted(path.stem for path in DEFINITIONS.glob("*.yaml"))


def read_benchmarks(
    names: Sequence[str], folders: Mapping[str, str | Path | None], limit: Mapping[str, int], seed: int
) -> list[Benchmark]:
    """The benchmarks with their rows, at most `limit[name]` of each, drawn with `seed`, in the file's order.

    `folders` maps "requests" and "data" to the folders that definitions read from; None: not given. Raises
    InputError for an unknown benchmark or limit, for a folder or file that is not there, and for a row
    without one of the definition's fields.
    """
    known = benchmark_names()
    for name in [*names, *limit]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise InputError(f"unknown benchmark '{name}'{hint} There are {', '.join(known)}")
    return [_read(name, folders, limit.get(name), seed) for name in dict.fromkeys(names)]


def _read(name: str, folders: Mapping[str, str | Path | None], limit: int | None, seed: int) -> Benchmark:
    config = yaml.safe_load((DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))
    folder = folders[config["metadata"]["folder"]]
    if folder is None:
        raise InputError(
            f"benchmark '{name}' reads {config['metadata']['file']} from evaluate_benchmarks.data_dir, "
            "which is empty: give the folder, for example ../shared/data"
        )
    path = Path(folder) / config["metadata"]["file"]
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"benchmark '{name}': no file {path}") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append({**_row(line, f"{path}:{number}", config["metadata"]["fields"]), "row": len(rows)})
    if not rows:
        raise InputError(f"benchmark '{name}': {path} has no rows")
    if limit is not None and limit < len(rows):
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        rows = [rows[place] for place in sorted(random.choice(len(rows), limit, replace=False))]
    return Benchmark(name, config, rows)


def _row(line: bytes, where: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    for field in fields:
        if not isinstance(values, dict) or field not in values:
            raise InputError(f"{where}: no field '{field}'")
    return {field: values[field] for field in [*fields, *(["id"] if "id" in values else [])]}
