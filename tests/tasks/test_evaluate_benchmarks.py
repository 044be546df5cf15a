import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from tasks import evaluate_benchmarks
from tasks.contracts import InputError, LayerPlan, ReplicationPlan, write_json
from tasks.moe.checkpoint import load_model
from tasks.moe.replicas import model_hash
from tasks.params import EvaluateBenchmarks, load_params
from tests.seeded_models import seeded_checkpoint

TEXTS = [
    "Once upon a time there was a small fox who lived near the river.",
    "def area(width, height):\n    return width * height",
    "Anna has 12 apples and gives away 5.",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Two seeded models of one shape: `reference`, and `other` that stands for an instance."""
    folder = tmp_path_factory.mktemp("models")
    seeded_checkpoint(folder / "reference", max_position_embeddings=2048)
    seeded_checkpoint(folder / "other", seed=1, max_position_embeddings=2048)
    return folder


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    questions = [
        {
            "id": f"q{number}",
            "subject": "x",
            "question": f"What is {number}?",
            "choices": list("wxyz"),
            "answer": number % 4,
        }
        for number in range(16)
    ]
    texts = [{"id": f"t{number}", "text": text} for number, text in enumerate(TEXTS)]
    for name, rows in (("questions", questions), ("perplexity", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def params(**changes) -> EvaluateBenchmarks:
    values = {"tasks": ["mmlu_packaged", "heldout_perplexity"], "limit": {"mmlu_packaged": 12}, **changes}
    return load_params().evaluate_benchmarks.model_copy(update=values)


def run(name: str, models: Path, requests: Path, results: Path, **changes) -> dict:
    folder = models / ("reference" if name == "reference" else "other")
    return evaluate_benchmarks.run(name, folder, models / "reference", requests, results, params(**changes))


@pytest.fixture(scope="module")
def evaluated(models, requests, tmp_path_factory):
    results = tmp_path_factory.mktemp("benchmarks")
    return results, run("reference", models, requests, results), run("W3", models, requests, results)


def test_the_reference_has_scores_and_no_differences(evaluated, tmp_path):
    _, reference, _ = evaluated
    choice, text = reference["tasks"]["mmlu_packaged"], reference["tasks"]["heldout_perplexity"]
    assert choice["n"] == 12 and 0 <= choice["accuracy"] <= 1 and choice["log_prob_right"] < 0
    assert text["texts"] == 3 and text["nll"] > 0
    assert not [key for key in (*choice, *text) if "difference" in key]
    write_json(tmp_path / "metrics.json", reference)  # no NaN, no object that JSON does not know


def test_differences_are_those_of_the_tables(evaluated):
    results, reference, other = evaluated
    ours, base = (pd.read_parquet(results / name / "mmlu_packaged.parquet") for name in ("W3", "reference"))
    found = other["tasks"]["mmlu_packaged"]
    assert ours["row"].tolist() == base["row"].tolist()
    assert found["difference"] == pytest.approx(ours["correct"].mean() - base["correct"].mean())
    shift = ours["log_prob_right"].mean() - base["log_prob_right"].mean()
    assert found["log_prob_right_difference"] == pytest.approx(shift)
    text, base_text = (model["tasks"]["heldout_perplexity"] for model in (other, reference))
    assert text["difference"] == pytest.approx(text["nll"] - base_text["nll"])
    assert text["tokens"] == base_text["tokens"] and text["difference_stderr"] > 0


def test_lis_is_between_one_and_experts_over_k(evaluated):
    for metrics in evaluated[1:]:
        assert len(metrics["lis"]) == 3
        assert (np.array(metrics["lis"]) >= 1).all() and (np.array(metrics["lis"]) <= 8 / 2).all()
        assert metrics["lis_mean"] == pytest.approx(np.mean(metrics["lis"]))
        assert metrics["forward_tokens"] > 100


def test_equal_models_differ_by_nothing(models, requests, evaluated, tmp_path):
    results = evaluated[0]
    same = evaluate_benchmarks.run(
        "same", models / "reference", models / "reference", requests, results, params()
    )
    assert (
        same["tasks"]["mmlu_packaged"]["difference"] == 0 and same["tasks"]["mmlu_packaged"]["p_value"] == 1
    )
    assert same["tasks"]["heldout_perplexity"]["difference"] == 0
    for task in params().tasks:  # and the files are equal byte for byte
        one, two = (results / name / f"{task}.parquet" for name in ("same", "reference"))
        assert one.read_bytes() == two.read_bytes()


def test_a_variant_is_measured_by_what_its_copies_computed(models, requests, evaluated, tmp_path):
    """One expert of each layer gets an equal replica: same answers, and no more imbalance than before."""
    results, reference, _ = evaluated
    model = load_model(models / "reference")
    copied = [3, 0, 5]
    layers = [
        LayerPlan(layer, [*range(8), copy], [0] * 9) for layer, copy in zip(range(3), copied, strict=True)
    ]
    ReplicationPlan(model_hash(model), 0, "round_robin", 0, layers).save(tmp_path / "rq" / "plan.json")
    save_file({}, tmp_path / "rq" / "physical.safetensors")
    found = evaluate_benchmarks.run("rq", tmp_path / "rq", models / "reference", requests, results, params())
    assert found["tasks"]["mmlu_packaged"]["difference"] == 0
    assert found["tasks"]["heldout_perplexity"]["nll"] == pytest.approx(
        reference["tasks"]["heldout_perplexity"]["nll"], rel=1e-5
    )
    # over nine copies instead of eight experts: LIS is 9 / 8 of the one against eight
    assert found["lis_physical"] == pytest.approx(np.array(found["lis"]) * 9 / 8)
    assert (np.array(found["lis"]) <= np.array(reference["lis"]) + 1e-9).all()
    assert found["forward_tokens"] == reference["forward_tokens"]


def test_bad_input_ends_before_the_model_is_loaded(models, requests, evaluated, tmp_path, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate_benchmarks, "load_model", never)
    results = evaluated[0]
    with pytest.raises(InputError, match="did you mean 'mmlu_packaged'"):
        run("W3", models, requests, results, tasks=["mmlu_pack"])
    with pytest.raises(InputError, match="data_dir, which is empty"):
        run("W3", models, requests, results, tasks=["piqa"], data_dir=None)
    with pytest.raises(InputError, match=r"mmlu_packaged\.parquet is missing: run `python -m"):
        run("W3", models, requests, tmp_path)
    with pytest.raises(InputError, match="holds other rows"):
        run("W3", models, requests, results, limit={"mmlu_packaged": 11})


def test_folder_of_a_model():
    params = load_params()
    assert evaluate_benchmarks.folder_of("reference", params) == Path("artifacts/reference")
    first = params.quantize_instances.names[0]
    assert evaluate_benchmarks.folder_of(first, params) == Path("artifacts/instances") / first
    variant = next(iter(params.build_variants.variants))
    assert evaluate_benchmarks.folder_of(variant, params) == Path("artifacts/variants") / variant
    with pytest.raises(InputError, match="no model 'referense' in this run; did you mean 'reference'"):
        evaluate_benchmarks.folder_of("referense", params)


def test_it_works_offline_and_leaves_nothing_at_home(models, requests, tmp_path):
    code = f"""
from pathlib import Path
from tasks.evaluate_benchmarks import run
from tasks.params import load_params
folder = Path({str(models / "reference")!r})
values = load_params().evaluate_benchmarks.model_copy(update={{"tasks": ["mmlu_packaged"]}})
requests, results = Path({str(requests)!r}), Path({str(tmp_path / "results")!r})
print(run("reference", folder, folder, requests, results, values)["tasks"])
"""
    home = tmp_path / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert "'accuracy'" in done.stdout, done.stderr
    assert [str(path) for path in home.rglob("*") if path.is_file()] == []
