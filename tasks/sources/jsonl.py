"""Requests from a local JSON Lines file: one object a line with id, class, prompt and response."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.contracts import InputError
from tasks.sources.rows import Row, checked_row, refuse_repeated_ids


def read_rows(path: str | Path) -> list[Row]:
    """All rows of the file, in its order.

    Raises InputError naming file and line for a line that is not a JSON object, for a field that is
    missing, empty or not text, and for an id used twice. Lines end at a line feed alone: text may hold
    other line separators.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(
            f"{path}: no such file: give prepare_requests.jsonl.file the path of a JSON Lines file with "
            "id, class, prompt and response"
        ) from None
    found: list[tuple[str, Row]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = json.loads(line)
        except ValueError as error:  # also undecodable bytes
            raise InputError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{where}: {type(values).__name__}, expected an object")
        found.append((where, checked_row(values, "jsonl", where, {})))
    refuse_repeated_ids(found)
    if not found:
        raise InputError(f"{path}: no rows")
    return [row for _, row in found]
