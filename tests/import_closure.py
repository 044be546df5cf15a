"""Which files of tasks/ a step imports, directly and through others, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def import_closure(start: Path) -> set[str]:
    """Paths relative to the project of `start` and everything under tasks/ that it imports, lazily or not.

    Empty `__init__.py` files are left out: no result depends on them.
    """
    found: set[str] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(ROOT).as_posix()
        if name in found or not path.read_text(encoding="utf-8").strip():
            continue
        found.add(name)
        waiting += _imported_files(path)
    return found


def _imported_files(path: Path) -> list[Path]:
    files: list[Path] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}: relative import; name the module in full")
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "tasks":
                continue
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                place = ROOT.joinpath(*parts[:length])
                candidates = [place.with_suffix(".py"), place / "__init__.py"]
                files += [candidate for candidate in candidates if candidate.is_file()]
    return files
