"""The file of predictions, written window by window."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.contracts import InputError, replacing_file

FORMATS = (".parquet", ".jsonl")


def check_format(path: Path | None) -> None:
    """Raise InputError unless the name tells the format."""
    if path is not None and path.suffix not in FORMATS:
        raise InputError(f"--output {path}: expected a name that ends in one of {', '.join(FORMATS)}")


@contextmanager
def writing(path: Path | None) -> Iterator[Callable[[pd.DataFrame], None]]:
    """What to call with every window's rows, of the same columns; when all are written, the file replaces `path`.

    None: nothing is written.
    """
    if path is None:
        yield lambda frame: None
        return
    with replacing_file(path) as temporary:
        file = _Lines(temporary) if path.suffix == ".jsonl" else _Parquet(temporary)
        try:
            yield file.write
        finally:
            file.close()


class _Lines:
    """JSON Lines, an object a row."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, frame: pd.DataFrame) -> None:
        for row in frame.to_dict("records"):
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """A row group a window."""

    def __init__(self, path: Path) -> None:
        self._path, self._writer = path, None

    def write(self, frame: pd.DataFrame) -> None:
        table = pa.Table.from_pandas(frame, preserve_index=False)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
