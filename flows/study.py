"""`python -m flows.study`: the same DAG on the larger profile params.study.yaml, in its own copy .study/.

The project's params.yaml, artifacts, metrics and dvc.lock stay as they are; .study/ has its own. DVC's cache,
fetched files and MLflow are the project's: what both have in common is computed once, and all runs compare.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tasks.contracts import InputError
from tasks.params import Params, ParamsError, check_params

FOLDER = Path(".study")
OVERLAY = Path("params.study.yaml")
FOLDERS = ("tasks", "flows")
FILES = ("dvc.yaml", "pyproject.toml", ".dvcignore", ".dvc/config", "README.md", "LICENSE")
# The cache's path is relative to .study/.dvc, where this file lies. .study is no git repository.
CONFIG = "[core]\n    no_scm = true\n[cache]\n    dir = ../../.dvc/cache\n"


def overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` written over it, section by section; lists and values are replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        inside = merged.get(key)
        merged[key] = (
            overlay(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
        )
    return merged


def study_values() -> dict[str, Any]:
    """params.yaml with the profile over it; without benchmark files, said, only packaged tasks."""
    values = overlay(_read(Path("params.yaml")), _read(OVERLAY))
    benchmarks = values["evaluate_benchmarks"]
    if benchmarks["data_dir"] is not None and not Path(benchmarks["data_dir"]).is_dir():
        print(f"study: no folder {benchmarks['data_dir']}: only the packaged benchmarks", file=sys.stderr)
        benchmarks |= _read(Path("params.yaml"))["evaluate_benchmarks"]
    return values


def study_params() -> Params:
    """The checked parameters of the study. Raises ParamsError."""
    return check_params(study_values(), f"params.yaml with {OVERLAY}")


def prepare() -> None:
    """Bring .study/ up to date with the project's code and parameters. Raises ParamsError."""
    study_params()
    (FOLDER / ".dvc").mkdir(parents=True, exist_ok=True)
    (FOLDER / "mlruns").mkdir(exist_ok=True)
    for name in FOLDERS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.copytree(name, FOLDER / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if Path(name).exists():
            shutil.copy2(name, FOLDER / name)
    (FOLDER / ".dvc/config.local").write_text(CONFIG)
    text = yaml.safe_dump(study_values(), sort_keys=False, allow_unicode=True)
    (FOLDER / "params.yaml").write_text(text, encoding="utf-8")


def main() -> None:
    """Run the study and print its tables; exit status of the first command that fails."""
    try:
        prepare()
    except (InputError, ParamsError) as error:
        sys.exit(f"study: error: {error}")
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for command in (["dvc", "repro"], ["flows.results"]):
        status = subprocess.run(
            [sys.executable, "-m", *command], cwd=FOLDER, env={**os.environ, "PATH": search}, check=False
        ).returncode
        if status:
            sys.exit(status)
    print(f"All of this is in {FOLDER}/; the comparison (make ui) holds these runs beside the project's own.")


def _read(path: Path) -> dict[str, Any]:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; run from the project's root") from None


if __name__ == "__main__":
    main()
