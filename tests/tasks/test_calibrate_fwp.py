"""The calibration step on made scores with a planted law between FWP and damage."""

import copy
import shutil

import numpy as np
import pytest
import yaml

from tasks.calibrate_fwp import main
from tasks.contracts import read_json
from tasks.risk.drift import Drift
from tasks.risk.fwp import measured_weight, normalised, prompt_tokens, separable, weighted_log_ppl
from tasks.risk.holdout_table import show
from tasks.risk.maps import Rows
from tasks.risk.predictor import Predictor, refit
from tests.tasks.made_scores import INSTANCES, ROOT, World


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """How many trees is no matter here, and they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.risk.boosted.TREES", 2)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def result(world):
    return world.run()


def test_a_planted_law_is_found_and_baselines_miss_it(result):
    metrics, _ = result
    found = metrics["holdout"]["W2"]["predictors"]
    assert found["ridge"]["r2"] > 0.95
    assert found["ridge"]["spearman_within"] > 0.95
    assert found["ridge"]["slope"] == pytest.approx(1, abs=0.1)
    assert found["ridge"]["r2"] > found["ridge_ppl"]["r2"] > found["class_mean"]["r2"]
    assert found["ridge"]["r2"] == pytest.approx(found["ridge_fwp"]["r2"], abs=0.01)
    assert "spearman_within" not in found["class_mean"]  # constant inside a class
    assert abs(found["isotonic_length"].get("spearman_within", 0)) < 0.5
    signals = metrics["holdout"]["W2"]["signals"]
    assert signals["log_fwp_gate_prob_token"]["spearman_within"] > 0.95
    assert (
        signals["log_fwp_gate_prob_token"]["spearman_within"]
        > signals["log_fwp_gate_prob_predictor"]["spearman_within"]
    )
    assert metrics["holdout"]["W2"]["ceiling"]["measurable"]
    assert set(metrics["other_damage"]["holdout"]) == set(INSTANCES)
    assert metrics["other_damage"]["damage"] == "dnll"


def test_predictions_file(world, result):
    _, table = result
    assert table["id"].tolist() == world.frame["id"].tolist()
    signals = ["log_ppl", "log_length", "routing_frequency", "log_fwp_gate_prob", "log_fwp_router_row_norm"]
    own = ("dnll", "kl", "predicted", "class_mean", "separable", "log_fwp_measured")
    per_instance = [f"{c}_{i}" for i in INSTANCES for c in own]
    fixed = ["id", "class", "split", "prompt_tokens", "scored_tokens", "log_fwp", "outside", "outside_reason"]
    assert set(table.columns) == {*fixed, *signals, *per_instance}
    assert table["log_fwp"].to_numpy() == pytest.approx(world.log_fwp)
    assert np.array_equal(table["log_fwp"], table["log_fwp_gate_prob"])
    # request 4 by hand: its scored tokens are the response's
    part = world.reference.scored(4, "response")
    assert table.loc[4, "kl_W2"] == pytest.approx(world.damage["W2"][part].mean(), rel=1e-5)
    assert table.loc[4, "dnll_W2"] == pytest.approx(world.damage["W2"][part].mean(), rel=1e-4)
    assert table.loc[4, "scored_tokens"] == part.stop - part.start
    assert table.loc[4, "log_ppl"] == pytest.approx(
        world.reference.nll[world.reference.scored(4, "prompt")].mean()
    )
    start, stop = world.routing.offset[4:6]
    share = world.load / world.load.sum(axis=1, keepdims=True)
    by_hand = [
        share[layer, e] for token in world.routing.index[start:stop] for layer in (0, 1) for e in token[layer]
    ]
    assert table.loc[4, "routing_frequency"] == pytest.approx(np.mean(by_hand))
    fit = table[table["split"] == "fit"]
    means = fit.groupby("class")["kl_W4"].mean()
    assert table["class_mean_W4"].to_numpy() == pytest.approx(table["class"].map(means).to_numpy())


def test_the_predictor_file_gives_the_holdout_predictions_again(world, result):
    _, table = result
    saved = read_json(world.root / "out/fwp/predictor.json")
    assert saved["version"] == 2 and saved["scorer"] == "W4" and saved["damage"] == "kl"
    assert saved["fragility"] == "taylor_kl_without_first"
    holdout, fit = table[table["split"] == "holdout"], table[table["split"] == "fit"]
    drift = Drift.from_dict(saved)
    for name in INSTANCES:
        fitted, rows = Predictor.from_dict(saved["instances"][name]), Rows.of(holdout, name)
        assert np.array_equal(fitted.predict(rows), holdout[f"predicted_{name}"])
        low, high = fitted.interval(rows).T
        covered = ((low <= holdout[f"kl_{name}"]) & (holdout[f"kl_{name}"] <= high)).mean()
        assert result[0]["coverage"][name] == pytest.approx(covered)
        assert covered > 0.75  # 60 requests, nominally 0.9: standard error 0.04
        again = refit(fitted.name, fitted.settings, Rows.of(fit, name), fit[f"kl_{name}"].to_numpy(), 32)
        assert again.predict(rows) == pytest.approx(fitted.predict(rows), abs=1e-12)
    outside, reasons = drift.flags(table)
    assert np.array_equal(outside, table["outside"]) and list(reasons) == list(table["outside_reason"])
    assert not table.loc[fit.index, "outside"].any()


@pytest.fixture
def copied(world, result, tmp_path):
    """A world that may be changed, and the predictions before the change."""
    other = copy.copy(world)
    other.root = tmp_path / "copy"
    shutil.copytree(world.root, other.root)
    return other, result[1]


def test_holdout_damage_changes_no_prediction(copied):
    world, before = copied
    holdout = np.flatnonzero((world.frame["split"] == "holdout").to_numpy())
    for name in INSTANCES:
        world.write(name, holdout, scale=7.0)
    _, after = world.run("after")
    assert not np.allclose(before["kl_W2"], after["kl_W2"])
    for name in INSTANCES:
        assert np.array_equal(before[f"predicted_{name}"], after[f"predicted_{name}"])
        assert np.array_equal(before[f"class_mean_{name}"], after[f"class_mean_{name}"])
    assert (world.root / "out/fwp/predictor.json").read_bytes() == (
        world.root / "after/fwp/predictor.json"
    ).read_bytes()


def test_a_prompt_that_grew_damage_moves_only_fits_without_it(copied):
    world, before = copied
    world.write("W2", 0, scale=50.0)  # a fit request
    _, after = world.run("after")
    # its own out-of-fold prediction comes from fits that never saw it; everybody else's moves
    assert before.loc[0, "predicted_W2"] == pytest.approx(after.loc[0, "predicted_W2"], rel=0.2)
    assert not np.allclose(before["predicted_W2"], after["predicted_W2"], rtol=0.2)


def test_the_same_inputs_give_the_same_bytes(world, result):
    world.run("again")
    for name in ("fwp/predictions.parquet", "fwp/predictor.json", "fwp.json"):
        assert (world.root / "again" / name).read_bytes() == (world.root / "out" / name).read_bytes(), name


def test_strengths_are_reported(world, result):
    strengths = result[0]["strengths"]
    assert set(strengths) == {"gate_prob", "router_row_norm", "measured_W2", "measured_W4"}
    for report in strengths.values():
        assert report["std_weight"] > 0.05 and report["equals_ppl"] is False
        assert 0.5 < report["correlation_log_ppl"] < 1
    assert strengths["measured_W2"]["unweighted_requests"] == 0
    # the wider the strengths, the further FWP is from PPL
    assert strengths["gate_prob"]["std_weight"] > strengths["router_row_norm"]["std_weight"]


def test_short_prompts_are_counted_and_get_the_class_mean(world):
    metrics, table = world.run("short", min_tokens=50)
    short = (table["prompt_tokens"] < 50).to_numpy()
    holdout = (table["split"] == "holdout").to_numpy()
    assert metrics["short_prompts"] == {
        "fit": int((short & ~holdout).sum()),
        "holdout": int((short & holdout).sum()),
    }
    chosen = table[short & holdout]
    assert len(chosen) > 3
    assert chosen["predicted_W2"].to_numpy() == pytest.approx(chosen["class_mean_W2"].to_numpy())


def test_other_choices_of_scorer_part_and_form(world):
    metrics, table = world.run(
        "other", scorer="reference", scored="prompt", damage="dnll", predictor="isotonic"
    )
    assert metrics["damage"] == "dnll" and metrics["other_damage"]["damage"] == "kl"
    assert (table["scored_tokens"] == table["prompt_tokens"] - 2).all()
    order = table[table["split"] == "holdout"].sort_values("log_fwp")["predicted_W2"].to_numpy()
    assert (np.diff(order) >= 0).all() or (np.diff(order) <= 0).all()


def test_signals_of_fragility_are_each_instances_own(world, result):
    _, table = result
    tokens = prompt_tokens(world.reference, world.routing, "token")
    for name in INSTANCES:
        phi = world.phi[f"taylor_kl_without_first_{name}"]
        assert table[f"separable_{name}"].to_numpy() == pytest.approx(separable(world.routing, phi))
        weight = normalised(measured_weight(world.routing, phi)[tokens.position], tokens.offset)
        own = weighted_log_ppl(tokens.nll, weight, tokens.offset)
        assert table[f"log_fwp_measured_{name}"].to_numpy() == pytest.approx(own)
    assert not np.allclose(table["separable_W2"], table["separable_W4"])
    signals = result[0]["holdout"]["W2"]["signals"]
    both = {"separable", "separable_with_position_0"}
    assert {*both, "log_fwp_measured_token", "log_fwp_measured_predictor"} <= set(signals)
    assert signals["separable"] != signals["separable_with_position_0"]


def test_the_measured_strength_is_each_instances_own(world):
    _, table = world.run(
        "measured", strength="measured", position_0=True, predictor="isotonic", damage="dnll", min_tokens=8
    )
    for name in INSTANCES:
        assert np.array_equal(table[f"log_fwp_{name}"], table[f"log_fwp_measured_{name}"])
        order = (
            table[table["split"] == "holdout"].sort_values(f"log_fwp_{name}")[f"predicted_{name}"].to_numpy()
        )
        assert (np.diff(order) >= 0).all() or (np.diff(order) <= 0).all()
    both = table[["log_fwp_W2", "log_fwp_W4"]].mean(axis=1)
    assert table["log_fwp"].to_numpy() == pytest.approx(both.to_numpy())
    assert table["separable_W2"].to_numpy() == pytest.approx(
        separable(world.routing, world.phi["taylor_dnll_W2"])
    )
    saved = read_json(world.root / "measured/fwp/predictor.json")
    assert saved["fragility"] == "taylor_dnll"
    assert {"log_fwp", "log_fwp_W2", "separable_W4"} <= set(saved["fit_range"]["signals"])


def test_auto_chooses_what_predicts_and_says_why(world):
    metrics, table = world.run("auto", predictor="auto")
    chosen = metrics["chosen"]["W2"]
    assert chosen["name"] == "ridge_fwp"  # the simplest that has the planted law
    errors = chosen["errors"]
    assert errors["class_mean"]["behind"] > errors["class_mean"]["behind_se"] > 0
    assert errors["ridge_fwp"]["mse"] < 0.1 * errors["class_mean"]["mse"]
    holdout = metrics["holdout"]["W2"]["predictors"]
    assert holdout["auto"] == holdout["ridge_fwp"]
    assert read_json(world.root / "auto/fwp/predictor.json")["instances"]["W2"]["name"] == "ridge_fwp"
    fit = table[table["split"] == "fit"]
    squared = (fit["predicted_W2"] - fit["kl_W2"]) ** 2
    assert squared.mean() == pytest.approx(errors["ridge_fwp"]["mse"])
    assert metrics["splits"]["targets"]["kl_response"]["W2"]["predictors"]["auto"]["chosen"]


def test_splits_say_what_beats_the_class_mean(result):
    splits = result[0]["splits"]
    assert splits["count"] == 2 and splits["requests"] == {"fit": 60, "judged": 60}
    assert set(splits["targets"]) == {"kl_response", "kl_prompt", "dnll_response", "dnll_prompt"}
    found = splits["targets"]["kl_response"]["W2"]
    assert found["ceiling"]["measurable"]
    assert found["predictors"]["ridge"]["within_gain"] > 0.9
    assert found["predictors"]["ridge"]["r2_gain_low"] > 0
    assert found["adds"]["log_fwp"]["r2"] > found["adds"]["log_ppl"]["r2"] > found["adds"]["class"]["r2"]
    for target, beats in splits["beats"].items():
        for name, names in beats.items():
            rows = splits["targets"][target][name]["predictors"]
            assert names == [own for own, figures in rows.items() if figures.get("beats_class_mean")]
    assert "ridge" in splits["beats"]["kl_response"]["W2"]


def test_the_table_prints_every_predictor_and_ceiling(result, capsys):
    show(result[0])
    shown = capsys.readouterr().out
    assert "W2" in shown and "W4" in shown and "ceiling" in shown
    for name in ("ridge", "isotonic_ppl", "class_mean", "ridge_routing_frequency"):
        assert name in shown
    assert "beats the class mean within classes" in shown


def test_the_table_says_so_if_nothing_beats_the_class_mean(result, capsys):
    metrics = copy.deepcopy(result[0])
    metrics["splits"]["beats"]["kl_response"]["W2"] = []
    show(metrics)
    shown = capsys.readouterr().out
    assert "nothing beats the class mean within classes on W2; in use: ridge" in " ".join(shown.split())
    assert "on W4" not in shown


def test_main_reads_the_pool_from_the_parameters(tmp_path, monkeypatch, capsys):
    # W3 has scores on disk but is not in the pool: it must not be read.
    artifacts = tmp_path / "artifacts"
    (artifacts / "requests").mkdir(parents=True)
    (artifacts / "experts").mkdir()
    world = World(artifacts, requests=48)
    (artifacts / "requests.parquet").rename(artifacts / "requests/requests.parquet")
    (artifacts / "experts.safetensors").rename(artifacts / "experts/experts.safetensors")
    world.damage["W3"] = world.damage["W2"]
    world.write("W3")
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["quantize_instances"]["bits"] = [2, 4]
    params["calibrate_fwp"] |= {"bootstrap": 30, "splits": 2, "min_tokens": 8}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    monkeypatch.chdir(tmp_path)
    main()
    assert set(read_json("metrics/fwp.json")["holdout"]) == {"W2", "W4"}
    assert "holdout: predicted against true kl, scorer W4" in capsys.readouterr().out
