"""What design and dvc.yaml demand of the tree and import-linter cannot say."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.params import Params
from tests.import_closure import ROOT, import_closure

DAG: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
STAGES = {name: stage.get("do", stage) for name, stage in DAG.items()}
STEPS = sorted({stage["cmd"].split()[2].removeprefix("tasks.") for stage in STAGES.values()})
SECTIONS = set(Params.model_fields) - {"runtime"}
SOURCES = sorted(
    path for folder in ("tasks", "flows", "tests") for path in (ROOT / folder).rglob("*.py")
)  # fmt: skip
PACKAGE_DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def step_of(stage: dict[str, Any]) -> str:
    return stage["cmd"].split()[2].removeprefix("tasks.")


def listed_params(stage: dict[str, Any]) -> list[str]:
    """Keys of params.yaml that a stage lists."""
    return [entry for entry in stage["params"] if isinstance(entry, str)]


# --- files ------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_a_step_file_has_its_four_parts(step):
    path = ROOT / f"tasks/{step}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a docstring: what goes in, what comes out, what it costs"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"run", "main"} <= functions
    versions = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        and [target.id for target in node.targets if isinstance(target, ast.Name)] == ["VERSION"]
    ]  # fmt: skip
    assert len(versions) == 1 and isinstance(versions[0], int) and versions[0] >= 1
    assert (
        path.read_text(encoding="utf-8").rstrip().endswith('if __name__ == "__main__":\n    run_step(main)')
    )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_no_file_is_named_for_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [name_of(path) for path in SOURCES if set(path.stem.split("_")) & nothing] == []


def test_tasks_hold_verbs_and_nouns_only():
    plain = {"__init__", "contracts", "params", "console", "cost", "parallel"}
    for_people = {"audit_checkpoint", "score_prompts"}  # verbs that no stage calls
    verbs = {path.stem for path in (ROOT / "tasks").glob("*.py")} - plain
    assert verbs == set(STEPS) | for_people


def test_no_machine_path_in_any_text():
    # A home, or the project's place on someone's disk; /tmp, /proc and the like are the same everywhere.
    machine = re.compile(r"/(?:home|Users|root|work|mnt|workspace)/[\w.]+")
    texts = [
        ROOT / name for name in ("dvc.yaml", "params.yaml", "pyproject.toml", "Makefile", "requirements.lock")
    ]
    found = [
        f"{name_of(path)}: {match.group()}"
        for path in [*SOURCES, *texts]
        for match in machine.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    packages = [line for line in lines if line.strip() and not line.startswith("#")]
    assert [line for line in packages if not re.fullmatch(r"[A-Za-z0-9_.-]+==[^=*]+", line)] == []
    pinned = {canonical(line.split("==")[0]) for line in packages}
    assert [name for name in wanted if canonical(re.split(r"[<>=\[;]", name)[0]) not in pinned] == []
    assert "optimum==2.3.0" in packages


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- dvc.yaml ---------------------------------------------------------


@pytest.mark.parametrize("name", STAGES)
def test_code_deps_are_the_import_closure(name):
    stage = STAGES[name]
    closure = import_closure(ROOT / f"tasks/{step_of(stage)}.py")
    code = [dep for dep in stage["deps"] if dep.startswith("tasks")]

    def covers(dep: str, file: str) -> bool:
        return file == dep or file.startswith(f"{dep}/")

    for file in sorted(closure):
        assert any(covers(dep, file) for dep in code), f"{name} imports {file}: add it to its deps"
    for dep in code:
        assert any(covers(dep, file) for file in closure), f"{name} does not import {dep}: remove it"
    for package, patterns in PACKAGE_DATA.items():
        folder = package.replace(".", "/")
        readers = {file for file in closure if file.startswith(f"{folder}/") and reads_data(file, patterns)}
        for data in {
            f"{folder}/{Path(pattern).parent.as_posix()}".removesuffix("/.") for pattern in patterns
        }:
            assert not readers or any(covers(dep, data) for dep in code), f"{name} reads {data} in {readers}"


def reads_data(file: str, patterns: list[str]) -> bool:
    """Does the source name a folder or a suffix of its package's data?"""
    source = (ROOT / file).read_text(encoding="utf-8")
    return any(
        str(Path(p).parent) in source if Path(p).parent.name else Path(p).suffix in source for p in patterns
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_command_is_constant_text(name):
    command = STAGES[name]["cmd"]
    item = r"(?: (?:reference|W?\$\{item\}|\$\{key\}))?"
    assert re.fullmatch(rf"python -m tasks\.\w+{item}", command)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_its_version(name):
    stage = STAGES[name]
    assert {f"tasks/{step_of(stage)}.py": ["VERSION"]} in stage["params"]


def test_every_section_belongs_to_the_stage_of_its_name():
    used: dict[str, set[str]] = {}
    for stage in STAGES.values():
        for entry in listed_params(stage):
            used.setdefault(entry.split(".")[0], set()).add(step_of(stage))
    assert set(used) == SECTIONS
    assert [section for section in SECTIONS if section not in used[section]] == []


@pytest.mark.parametrize("name", [name for name in STAGES if "foreach" not in DAG[name]])
def test_a_stage_lists_the_sections_that_its_main_reads(name):
    """An item of a fan-out may look at the whole list to check its name; others depend on all they read."""
    stage = STAGES[name]
    tree = ast.parse((ROOT / f"tasks/{step_of(stage)}.py").read_text(encoding="utf-8"))
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    read = {
        node.attr
        for node in ast.walk(main)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in SECTIONS
    }
    if any("foreach" in other and step_of(STAGES[twin]) == step_of(stage) for twin, other in DAG.items()):
        read &= {step_of(stage)}  # the reference's stage of a step that also fans out
    assert read <= {entry.split(".")[0] for entry in listed_params(stage)}


@pytest.mark.parametrize("name", [name for name in STAGES if "foreach" not in DAG[name]])
def test_a_consumer_of_a_fan_out_lists_the_params_it_expands_from(name):
    """A shrunk fan-out leaves old items in the folder: only the parameter makes the consumer stale."""
    stage = STAGES[name]
    for other in DAG.values():
        if "foreach" not in other:
            continue
        produced = [str(path) for path in other["do"].get("outs", [])]
        produced += [next(iter(entry)) for entry in other["do"].get("metrics", [])]
        if any(path.startswith(f"{dep}/") for dep in stage["deps"] for path in produced):
            assert other["foreach"].removeprefix("${").removesuffix("}") in listed_params(stage)


def test_outputs_lie_where_git_does_not_look_and_metrics_where_it_does():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/artifacts/" in ignored and "/mlruns/*" in ignored
    for stage in STAGES.values():
        for out in stage.get("outs", []):
            path = out if isinstance(out, str) else next(iter(out))
            assert path.startswith(("artifacts/", "mlruns/"))
        for metric in stage.get("metrics", []):
            ((path, options),) = metric.items()
            assert path.startswith("metrics/") and options == {"cache": False}
