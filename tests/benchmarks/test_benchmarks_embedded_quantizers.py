import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.embedded_quantizers import (
    BITS,
    Experts,
    Result,
    Setting,
    chosen,
    losses,
    measured,
    read,
    run,
    table,
)
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.params import load_params
from tasks.quant.gptq import Gptq
from tasks.risk.damage import request_means, token_damage
from tasks.risk.scoring import read_requests, score
from tests.conftest import ROOT
from tests.seeded_models import VOCABULARY, seeded_checkpoint

PARAMS = load_params(ROOT / "params.yaml")
RTN, GPTQ = Setting("rtn", 32, False, 2), Setting("gptq", 0, True, 3)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A seeded reference, 12 requests of two classes (two of each are fit) and calibration tokens."""
    root = tmp_path_factory.mktemp("embedded") / "artifacts"
    seeded_checkpoint(root / "reference")
    random = np.random.default_rng(0)

    def ids(length):
        return random.integers(2, VOCABULARY, size=length).tolist()

    lengths = [(5 + row, 2 + row % 4) for row in range(12)]
    frame = pd.DataFrame(
        {
            "id": [f"r{row}" for row in range(12)],
            "class": ["a", "b"] * 6,
            "split": ["fit"] * 4 + ["holdout"] * 8,
            "prompt": "",
            "response": "",
            "prompt_ids": [ids(prompt) for prompt, _ in lengths],
            "response_ids": [ids(response) for _, response in lengths],
        }
    )
    (root / "requests").mkdir()
    frame.to_parquet(root / "requests" / "requests.parquet")
    calibration = pd.DataFrame({"id": ["c0", "c1"], "ids": [ids(40), ids(25)]})
    calibration.to_parquet(root / "requests" / "calibration.parquet")
    return root


@pytest.fixture(scope="module")
def requests(artifacts):
    return chosen(read_requests(artifacts / "requests" / "requests.parquet", VOCABULARY), 4)


def test_the_requests_are_of_holdout_and_every_class(artifacts, requests):
    assert requests.ids == ["r4", "r5", "r6", "r7"]
    assert requests.frame["class"].tolist() == ["a", "b", "a", "b"]
    everything = read_requests(artifacts / "requests" / "requests.parquet", VOCABULARY)
    with pytest.raises(InputError, match="--requests is 3: expected a multiple of the 2 classes, at most 8"):
        chosen(everything, 3)


def test_damage_is_what_the_scoring_stage_finds(artifacts, requests):
    model = load_model(artifacts / "reference")
    experts = Experts(model, torch.float32, None)
    before = losses(model, requests, 100, "reference", None)
    reference, _, hidden = score(model, requests, "reference", 100)
    experts.quantize(RTN, Gptq())
    result = measured(RTN, requests, before, losses(model, requests, 100, "rtn", before))
    scores, _, _ = score(model, requests, "rtn", 100, hidden)
    for damage in ("dnll", "kl"):
        means = request_means(token_damage(reference, scores, damage), scores, "response")
        assert getattr(result, damage) == pytest.approx(means.mean(), rel=1e-3)
        error = np.sqrt(((means - means.mean()) ** 2).sum() / 3 / 4)  # of 4 requests: n - 1 = 3
        assert getattr(result, f"{damage}_error") == pytest.approx(error, rel=1e-3)
    assert result.kl > 0.01


def test_a_setting_depends_on_no_other_and_a_stopped_run_carries_on(artifacts, tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run([RTN, GPTQ], 4, artifacts, one, PARAMS)
    run([GPTQ, RTN], 4, artifacts, other, PARAMS)
    first, second = read(one), read(other)
    assert first == second[::-1] and first[0].kl > 0 and first[1].kl > 0
    lines = one.read_text().splitlines(keepends=True)
    one.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote the last
    run([RTN, GPTQ], 4, artifacts, one, PARAMS)
    assert one.read_text() == "".join(lines)
    run([RTN], 4, artifacts, one, PARAMS)
    assert one.read_text() == "".join(lines)


def test_results_of_other_inputs_are_not_mixed(artifacts, tmp_path):
    run([RTN], 4, artifacts, tmp_path / "results.jsonl", PARAMS)
    with pytest.raises(InputError, match="holds results of another model, other requests or settings"):
        run([RTN], 2, artifacts, tmp_path / "results.jsonl", PARAMS)


def test_the_table_names_the_nearest_but_never_the_source_grid():
    def row(method, group, values, symmetric=False):
        return [
            Result(method, group, symmetric, bits, value, 0.01, value / 2, 0.01)
            for bits, value in zip(BITS, values, strict=True)
        ]

    paper = (0.9437, 0.1832, 0.0513)
    results = [
        *row("rtn", 32, paper),  # at distance 0, but on the source grid
        # |ln 2| + 0 + 0 = 0.693, a third of it 0.23
        *row("hqq", 64, (0.9437 * 2, 0.1832, 0.0513)),
        # 0 + 0 + |ln(0.001 / 0.0513)| = 3.94, a third of it 1.31
        *row("gptq", 64, (0.9437, 0.1832, -0.02), symmetric=True),
        *row("rtn", 64, paper)[:2],  # W4 is not measured yet: no distance
    ]
    text = table(results, 42)
    lines = {
        tuple(cell.strip() for cell in line.split("|")[1:4]): line
        for line in text.splitlines()
        if "|" in line
    }
    assert lines["rtn", "32", "asymmetric"].endswith("| 0.00 | source grid |")
    assert lines["hqq", "64", "asymmetric"].endswith("| 0.23 |  |")
    assert "1.887 ± 0.010 (0.944)" in lines["hqq", "64", "asymmetric"]
    assert lines["gptq", "64", "symmetric"].endswith("| 1.31 |  |")
    assert lines["rtn", "64", "asymmetric"].endswith("|  |  |  |")
    assert "Nearest to the paper's 0.94 / 0.18 / 0.05: hqq, group 64, asymmetric (distance 0.23)." in text
