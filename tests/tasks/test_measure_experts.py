import json

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.contracts import ExpertStatistics, InputError
from tasks.measure_experts import check_counts, run, summary
from tasks.moe.checkpoint import load_model
from tasks.params import MeasureExperts
from tests.seeded_models import VOCABULARY, seeded_checkpoint

PARAMS = MeasureExperts(capacity_quantile=0.95, lis_batch_size=2)
LENGTHS = [12, 3, 25, 1, 18]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    seeded_checkpoint(folder / "reference", "qwen2_moe")
    random = np.random.default_rng(0)
    (folder / "requests").mkdir()
    ids = [random.integers(2, VOCABULARY, size=length) for length in LENGTHS]
    frame = pd.DataFrame({"id": [str(row) for row in range(len(ids))], "ids": ids})
    frame.to_parquet(folder / "requests" / "calibration.parquet")
    return folder


def measure(inputs, out, batch_tokens):
    run(
        inputs / "reference", inputs / "requests", out / "experts", out / "experts.json", PARAMS, batch_tokens
    )
    metrics = json.loads((out / "experts.json").read_text())
    return ExpertStatistics.load_from(out / "experts" / "experts.safetensors"), metrics


def test_statistics_of_a_seeded_model(inputs, tmp_path):
    statistics, metrics = measure(inputs, tmp_path, 60)
    assert statistics.layers.tolist() == metrics["layers"] == [1, 2]
    assert statistics.load.sum(axis=1).tolist() == [sum(LENGTHS) * 2] * 2
    assert metrics["tokens"] == sum(LENGTHS)
    assert metrics["lis"] == pytest.approx(
        (8 * statistics.load.max(axis=1) / statistics.load.sum(axis=1)).tolist(), rel=1e-5
    )
    assert (statistics.importance[statistics.load > 0] > 0).all()
    assert (statistics.importance[statistics.load == 0] == 0).all()
    assert metrics["experts_without_tokens"] == (statistics.load == 0).sum()
    assert -1 <= metrics["load_importance_spearman"] <= 1


def test_the_references_loss_is_that_of_transformers_own_logits(inputs, tmp_path):
    _, metrics = measure(inputs, tmp_path, 60)
    model = load_model(inputs / "reference")
    losses = []
    for ids in pd.read_parquet(inputs / "requests" / "calibration.parquet")["ids"]:
        ids = torch.tensor(ids)
        with torch.inference_mode():
            chances = model(ids[None]).logits[0].log_softmax(-1)
        losses += (
            -chances[place, ids[place + 1]].item() for place in range(1, len(ids) - 1)
        )  # not from position 0
    assert metrics["nll_reference"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_batching_changes_no_count_and_the_same_run_gives_the_same_bytes(inputs, tmp_path):
    alone, _ = measure(inputs, tmp_path / "alone", 1)
    batched, _ = measure(inputs, tmp_path / "batched", 60)
    assert (alone.load == batched.load).all()
    np.testing.assert_allclose(alone.importance, batched.importance, rtol=1e-4)
    np.testing.assert_allclose(alone.importance_rms, batched.importance_rms, rtol=1e-4)
    measure(inputs, tmp_path / "again", 60)
    for name in ("experts.safetensors", "experts.json"):
        assert (tmp_path / "again/experts" / name).read_bytes() == (
            tmp_path / "batched/experts" / name
        ).read_bytes()


def test_calibration_without_predictions_is_an_error(inputs, tmp_path):
    pd.DataFrame({"id": ["a"], "ids": [[5, 6]]}).to_parquet(tmp_path / "calibration.parquet")
    with pytest.raises(InputError, match="no sequence has three tokens"):
        run(inputs / "reference", tmp_path, tmp_path / "out", tmp_path / "m.json", PARAMS, 60)
    assert not (tmp_path / "out").exists()


def test_counts_that_do_not_add_up_stop_the_step():
    load = np.array([[3, 1], [2, 2]])
    check_counts(load, 4, load)
    with pytest.raises(RuntimeError, match="5 picks"):
        check_counts(load, 5, load)
    with pytest.raises(RuntimeError):
        check_counts(load, 4, load[::-1])


def test_a_layer_of_equal_loads_has_no_rank_correlation():
    load = np.ones((1, 2, 4), dtype=int) * [[[2, 2, 2, 2], [4, 2, 1, 1]]]
    values = summary(np.arange(2), load, np.array([[4.0, 3, 2, 1]] * 2), np.ones((2, 4)), 8, 1.0, PARAMS)
    # layer 1: ranks 4, 3, 1.5, 1.5 against 4, 3, 2, 1: 4.5 / sqrt(4.5 * 5)
    assert values["load_importance_spearman"] == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert values["layers_without_rank_correlation"] == 1
    assert "load_importance_spearman_rms" not in values
