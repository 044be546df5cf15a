from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from typer.testing import CliRunner

from flows import dag, plan, study
from tasks.contracts import GIB, InputError
from tasks.cost import QWEN3_30B_A3B, StageCost
from tasks.params import load_params
from tests.flows.toy_dag import ROOT


@pytest.fixture(autouse=True)
def fixed_speed(monkeypatch):
    monkeypatch.setattr(plan, "matrix_gflops", lambda threads: 50.0)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what the real graph needs, and nothing that has run."""
    (tmp_path / ".dvc").mkdir()
    for name in ("dvc.yaml", "params.yaml", "params.study.yaml", ".dvc/config"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    for folder in ("tasks", "flows"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(*arguments: str) -> str:
    """Print the plan in this process."""
    result = CliRunner().invoke(plan_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def plan_app():
    import typer

    app = typer.Typer()
    app.command()(plan.main)
    return app


def test_the_plan_of_a_first_run_lists_every_stage(project):
    text = output()
    for node in dag.read_graph():
        assert node.name in text
    assert "together" in text and "Fits this machine." in text


def test_a_model_of_30_billion_parameters_does_not_fit_24_gib(project, monkeypatch):
    monkeypatch.setattr(plan, "machine_memory", lambda: 24 * GIB)
    text = output("--model", "Qwen/Qwen3-30B-A3B")
    assert "30.5 billion parameters, 48 MoE layers of 128 experts" in text
    # the golden sizes of method.md section 1
    assert "2 bits 11.31, 3 bits 14.68, 4 bits 18.06, 16 bits 56.87" in " ".join(text.split())
    assert "Does not fit" in text and "this machine has 24 GiB" in " ".join(text.split())


def test_the_hub_source_needs_no_option(project):
    values = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))
    values["prepare_reference"]["source"] = "hub"
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    assert plan.own_model(load_params()) == QWEN3_30B_A3B


def test_a_folder_with_a_config_answers_too(project):
    config = {
        "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
    }  # fmt: skip
    (project / "mine").mkdir()
    (project / "mine/config.json").write_text(json.dumps(config))
    _, shape = plan.other_model(load_params(), "mine")
    assert (shape.moe_layers, shape.experts, shape.expert_parameters) == (2, 8, 2 * 8 * 3 * 64 * 32)


def test_an_unknown_model_says_what_is_expected(project):
    with pytest.raises(InputError, match=r"neither a folder with a config\.json nor .*Qwen/Qwen3-30B-A3B"):
        plan.other_model(load_params(), "Qwen/Qwen9")


def test_what_does_not_fit_is_named():
    costs = {"a": StageCost(1, 1.0, 3 * GIB, 2 * GIB), "b": StageCost(1, 1.0, 5 * GIB, 2 * GIB)}
    assert plan.verdicts(costs, 8 * GIB, 8 * GIB) == ["Fits this machine."]
    memory, disk = plan.verdicts(costs, 4 * GIB, 3 * GIB)
    assert "b needs about 5.0 GiB of memory, this machine has 4 GiB" in memory
    assert "4.0 GiB of disk, 3.0 GiB are free" in disk


# --- the study ------------------------------------------------------------


def test_an_overlay_replaces_values_and_keeps_the_rest():
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 2}
    assert study.overlay(base, {"a": {"y": [3], "z": 4}}) == {"a": {"x": 1, "y": [3], "z": 4}, "b": 2}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 2}


def test_the_study_works_in_a_copy_and_leaves_the_project_alone(project, monkeypatch):
    before = (project / "params.yaml").read_bytes()
    study.prepare()
    assert (project / "params.yaml").read_bytes() == before
    monkeypatch.chdir(project / ".study")
    params = load_params()
    assert set(params.build_variants.variants) > {"rq"}
    assert "build_variants@rq2" in [node.name for node in dag.read_graph()]


def test_without_benchmark_files_the_study_says_so(project, capsys):
    assert study.study_params().evaluate_benchmarks.data_dir is None
    assert "only the packaged benchmarks" in capsys.readouterr().err


def test_the_study_fits_three_hours(project):
    """At 60 GFLOP/s, what a large matrix product reaches on 2 free cores."""
    study.prepare()
    values = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))
    profile = yaml.safe_load((project / "params.study.yaml").read_text(encoding="utf-8"))
    params = study.check_params(study.overlay(values, profile))  # with all benchmarks
    shape = plan.own_model(params)
    with contextlib.chdir(".study"):
        names = [node.name for node in dag.read_graph()]
    assert sum(plan.stage_cost(name, params, shape, 60.0).seconds for name in names) < 3 * 3600
