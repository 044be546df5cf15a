"""Requests from a dataset of the Hugging Face hub, or a local dataset folder, through the datasets
library.
"""

from __future__ import annotations

from tasks.contracts import InputError
from tasks.params import HubSource
from tasks.sources.rows import Row, check_columns, checked_row, refuse_repeated_ids


def read_rows(source: HubSource) -> list[Row]:
    """All rows of the split. Only data files are read: dataset scripts are refused by the library.

    Raises InputError when the dataset, revision or split cannot be had, when a column is missing, and for a
    bad row.
    """
    if not source.id:
        raise InputError(
            "prepare_requests.hub.id is empty: give a dataset id, such as owner/name, or a folder"
        )
    import datasets  # takes a second, and only this source needs it
    from datasets.exceptions import DatasetsError

    where = f"dataset {source.id}, revision {source.revision}, split {source.split}"
    try:
        table = datasets.load_dataset(source.id, revision=source.revision, split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{where}: cannot be read: {reason[0]}. Check id, revision and split; without a network "
            "the dataset must be in the local cache, or its folder given as prepare_requests.hub.id"
        ) from None
    columns = {name: source.columns.get(name, name) for name in ("id", "class", "prompt", "response")}
    check_columns(columns.values(), table.column_names, where)
    labels = getattr(table.features[columns["class"]], "names", None)  # a ClassLabel is stored as a number
    found: list[tuple[str, Row]] = []
    for number, values in enumerate(table):
        values = dict(values)
        if labels and isinstance(values[columns["class"]], int):
            values[columns["class"]] = labels[values[columns["class"]]]
        found.append(
            (f"{where}, row {number}", checked_row(values, "hub", f"{where}, row {number}", columns))
        )
    refuse_repeated_ids(found)
    if not found:
        raise InputError(f"{where}: no rows")
    return [row for _, row in found]
