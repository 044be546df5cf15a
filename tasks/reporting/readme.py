"""README's result tables: the text between `<!-- results:<name> -->` and `<!-- /results:<name> -->`."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.contracts import replacing_file


def between(name: str, text: str) -> str | None:
    """What stands between the markers of table `name`, or None where a marker is missing."""
    found = re.search(_pattern(name), text, flags=re.DOTALL)
    return found.group(2).strip("\n") if found else None


def with_tables(text: str, tables: dict[str, str]) -> tuple[str, list[str]]:
    """README's text with the tables between their markers, and the names of the tables without markers."""
    missing = []
    for name, table in tables.items():
        text, count = re.subn(
            _pattern(name),
            lambda found, table=table: f"{found[1]}\n{table}\n{found[3]}",
            text,
            flags=re.DOTALL,
        )
        if count == 0:
            missing.append(name)
    return text, missing


def write_tables(readme: str | Path, tables: dict[str, str]) -> list[str]:
    """Put the tables into the file, if that changes it; returns the names without markers."""
    readme = Path(readme)
    if not readme.exists():
        return list(tables)
    before = readme.read_text(encoding="utf-8")
    after, missing = with_tables(before, tables)
    if after != before:
        with replacing_file(readme) as temporary:
            temporary.write_text(after, encoding="utf-8")
            temporary.chmod(readme.stat().st_mode)
    return missing


def _pattern(name: str) -> str:
    return rf"(<!-- results:{re.escape(name)} -->)(.*?)(<!-- /results:{re.escape(name)} -->)"
