"""A toy project with a DAG of a few trivial stages, for tests of what runs a DAG."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]

# add -> double@2, double@4 -> total; `lone` depends on nothing.
TOY = """
stages:
  add:
    desc: two numbers -> their sum
    cmd: python add.py
    params: [prepare_requests.count]
    deps: [add.py]
    outs: [artifacts/sum.txt]
  double:
    foreach: ${quantize_instances.bits}
    do:
      cmd: python double.py ${item}
      deps: [double.py, artifacts/sum.txt]
      outs: ["artifacts/double_${item}.txt"]
  total:
    cmd: python total.py
    params: [quantize_instances.bits]
    deps: [total.py, artifacts]
    outs: [total.txt]
  lone:
    cmd: python lone.py
    deps: [lone.py]
    outs: [artifacts_lone.txt]
"""

ADD = """
import pathlib, yaml
count = yaml.safe_load(open("params.yaml"))["prepare_requests"]["count"]
pathlib.Path("artifacts").mkdir(exist_ok=True)
pathlib.Path("artifacts/sum.txt").write_text(f"{count + 1}\\n")
print("added")
"""

DOUBLE = """
import pathlib, sys
total = int(pathlib.Path("artifacts/sum.txt").read_text())
pathlib.Path(f"artifacts/double_{sys.argv[1]}.txt").write_text(f"{total * int(sys.argv[1])}\\n")
"""

TOTAL = """
import pathlib, yaml
bits = yaml.safe_load(open("params.yaml"))["quantize_instances"]["bits"]
total = sum(int(pathlib.Path(f"artifacts/double_{width}.txt").read_text()) for width in bits)
pathlib.Path("total.txt").write_text(f"{total}\\n")
"""

LONE = """
import pathlib
pathlib.Path("artifacts_lone.txt").write_text("alone\\n")
"""


def write_toy(folder: Path) -> Path:
    """Write the toy DAG, with this project's params.yaml and DVC settings, into `folder`."""
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text((ROOT / ".dvc/config").read_text())
    (folder / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    (folder / "dvc.yaml").write_text(TOY)
    params = (ROOT / "params.yaml").read_text(encoding="utf-8")
    assert "bits: [2, 3, 4]" in params
    (folder / "params.yaml").write_text(params.replace("bits: [2, 3, 4]", "bits: [2, 4]"), encoding="utf-8")
    for name, text in {"add.py": ADD, "double.py": DOUBLE, "total.py": TOTAL, "lone.py": LONE}.items():
        (folder / name).write_text(text)
    return folder


def dvc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the dvc command in the current folder, with this interpreter first on its PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )


def read_params() -> dict[str, dict[str, object]]:
    return yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
