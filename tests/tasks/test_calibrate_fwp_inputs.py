"""What calibrate_fwp does without: signals, classes, numbers that are missing or of no use."""

import numpy as np
import pytest

from tasks.contracts import ExpertStatistics, InputError, TokenScores
from tests.tasks.made_scores import EXPERTS, LAYERS, World


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    """How many trees is no matter here, and they take most of the time."""
    monkeypatch.setattr("tasks.risk.boosted.TREES", 2)


def test_a_model_without_fragility_does_without(tmp_path):
    world = World(tmp_path)
    world.write_fragility({})
    metrics, table = world.run()
    assert metrics["absent_signals"] == ["separable", "measured"]
    assert not any(column.startswith(("separable", "log_fwp_measured")) for column in table)
    assert set(metrics["strengths"]) == {"gate_prob", "router_row_norm"}
    assert "ridge_separable" not in metrics["holdout"]["W2"]["predictors"]
    assert metrics["holdout"]["W2"]["predictors"]["ridge"]["r2"] > 0.95
    assert "separable" not in metrics["splits"]["targets"]["kl_response"]["W2"]["adds"]
    with pytest.raises(InputError, match="strength is 'measured', but this model has no fragility"):
        world.run(strength="measured")


def test_requests_unlike_the_fit_requests_are_flagged_and_counted(tmp_path):
    world = World(tmp_path)
    holdout = np.flatnonzero(world.frame["split"] == "holdout")
    kinds = world.frame["class"].to_numpy(copy=True)
    kinds[holdout[:5]] = "new"
    world.frame.assign(**{"class": kinds}).to_parquet(tmp_path / "requests.parquet")
    metrics, table = world.run()
    assert (table.loc[holdout[:5], "outside_reason"].str.contains("class 'new' never seen")).all()
    assert metrics["drift"]["holdout"]["reasons"]["class 'new' never seen"] == 5
    assert metrics["drift"]["holdout"]["outside"] == table["outside"].sum()
    assert metrics["drift"]["fit"]["outside"] == 0
    fit = table[table["split"] == "fit"]
    assert table.loc[holdout[0], "class_mean_W2"] == pytest.approx(fit["kl_W2"].mean())
    assert np.isfinite(table["predicted_W2"]).all()


def test_constant_signals_are_named(tmp_path):
    world = World(tmp_path)
    world.write_fragility({name: np.zeros((LAYERS, EXPERTS)) for name in world.phi})
    metrics, table = world.run()
    assert metrics["constant_signals"] == ["separable"]
    # no expert is fragile: every token weighs the same
    assert metrics["strengths"]["measured_W2"]["equals_ppl"] is True
    assert metrics["strengths"]["measured_W2"]["unweighted_requests"] == 120
    assert table["log_fwp_measured_W2"].to_numpy() == pytest.approx(table["log_ppl"].to_numpy())


def test_unusable_inputs_are_named(tmp_path):
    world = World(tmp_path, requests=24)
    (tmp_path / "scores/W4/scores.safetensors").unlink()
    with pytest.raises(InputError, match=r"no scores of W4; run"):
        world.run()
    world.write("W4")
    world.frame.assign(id=["other", *world.frame["id"][1:]]).to_parquet(tmp_path / "requests.parquet")
    with pytest.raises(InputError, match="request 'other' has no score"):
        world.run()
    world.frame.assign(split="fit").to_parquet(tmp_path / "requests.parquet")
    with pytest.raises(InputError, match="split 'holdout' is empty"):
        world.run()
    world.frame.assign(**{"class": "a"}).to_parquet(tmp_path / "requests.parquet")
    with pytest.raises(InputError, match="has one class, 'a'"):
        world.run()
    world.frame.to_parquet(tmp_path / "requests.parquet")
    ExpertStatistics(*(np.ones((3, EXPERTS)) for _ in range(4))).save(tmp_path / "experts.safetensors")
    with pytest.raises(InputError, match="different models"):
        world.run()
    load = np.ones((LAYERS, EXPERTS))
    load[1] = 0
    ExpertStatistics(np.arange(LAYERS), load, load, load).save(tmp_path / "experts.safetensors")
    with pytest.raises(InputError, match="layer 1 got no calibration token"):
        world.run()
    assert not (tmp_path / "out").exists()


def test_unusable_scores_classes_and_fragility_are_named(tmp_path):
    world = World(tmp_path, requests=24)
    broken = TokenScores.load_from(tmp_path / "scores/W2")
    broken.nll[broken.scored(3, "response").start] = np.nan
    broken.save(tmp_path / "scores/W2")
    with pytest.raises(
        InputError, match=r"scores of W2: a loss of request 'r3' is NaN.*1 such requests of 24"
    ):
        world.run()
    world.write("W2")
    broken = TokenScores.load_from(tmp_path / "scores/W4")
    broken.kl[broken.scored(5, "prompt").start] = np.inf
    broken.nll[broken.offset[5]] = np.nan  # made from position 0 alone: never scored, no fault
    broken.save(tmp_path / "scores/W4")
    with pytest.raises(InputError, match="scores of W4: a kl of request 'r5' is NaN or infinite"):
        world.run()
    world.write("W4")
    kinds = world.frame["class"].to_numpy(copy=True)
    kinds[0] = "lonely"  # a fit request
    world.frame.assign(**{"class": kinds}).to_parquet(tmp_path / "requests.parquet")
    with pytest.raises(InputError, match=r"class 'lonely' has 1 fit request.*merge.*min_class_size"):
        world.run()
    world.frame.to_parquet(tmp_path / "requests.parquet")
    world.write_fragility(
        {name: phi for name, phi in world.phi.items() if name != "taylor_kl_without_first_W2"}
    )
    with pytest.raises(InputError, match=r"no fragility 'taylor_kl_without_first_W2' \(1 such\)"):
        world.run()
    world.write_fragility({name: phi[:1] for name, phi in world.phi.items()})
    with pytest.raises(InputError, match=r"fragility of W2 is \(1, 6\).*expected finite \(2, 6\)"):
        world.run()
    (tmp_path / "decomposition/fragility.safetensors").unlink()
    with pytest.raises(InputError, match="run the stage decompose_damage first"):
        world.run()
    assert not (tmp_path / "out").exists()
