"""The calibration step on made scores with a planted law between FWP and damage."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from tasks.calibrate_fwp import main, run
from tasks.contracts import ExpertStatistics, InputError, PrefillRouting, TokenScores, read_json
from tasks.params import CalibrateFwp, load_params
from tasks.risk.fwp import log_fwp, prompt_tokens, token_strength
from tasks.risk.holdout_table import show
from tasks.risk.maps import Rows
from tasks.risk.predictor import Predictor

ROOT = Path(__file__).parents[2]
INSTANCES = ["W2", "W4"]
LAYERS, EXPERTS, PICKS = 2, 6, 2


def settings(**changes):
    own = load_params(ROOT / "params.yaml").calibrate_fwp.model_dump()
    return CalibrateFwp(**{**own, "bootstrap": 60, "strength": "gate_prob", **changes})


class World:
    """Artifacts of 120 made requests; W2 KL per response token: 0.5 + 0.2 log FWP + class level + noise."""

    def __init__(self, root, noise=0.02, requests=120, split=None, classes=("a", "b", "c")):
        self.root = root
        generator = np.random.default_rng(0)
        prompt, response = generator.integers(40, 80, requests), generator.integers(8, 20, requests)
        offset, starts = (np.concatenate([[0], np.cumsum(n)]) for n in (prompt + response - 1, prompt))
        kind = np.array(classes)[np.arange(requests) % len(classes)]
        if split is None:
            split = np.where(np.arange(requests) // len(classes) % 2 == 0, "fit", "holdout")
        ids = [f"r{row}" for row in range(requests)]
        self.frame = pd.DataFrame({"id": ids, "class": kind, "split": split})
        self.frame.to_parquet(root / "requests.parquet")

        shape = (starts[-1], LAYERS, PICKS)
        index = generator.integers(0, EXPERTS, shape).astype(np.uint16)
        gate_prob = generator.uniform(0.05, 0.9, shape).astype(np.float32)
        norms = generator.uniform(0.5, 1.5, (LAYERS, EXPERTS)).astype(np.float32)
        routing = PrefillRouting(starts, index, gate_prob, gate_prob, norms)
        difficulty = np.repeat(generator.uniform(1, 4, requests), prompt + response - 1)
        nll = (difficulty * generator.exponential(1, offset[-1])).astype(np.float32)
        reference = TokenScores(ids, offset, prompt, nll, None)
        tokens = prompt_tokens(reference, routing, "token")
        self.log_fwp = log_fwp(
            tokens.nll, token_strength(routing, "gate_prob")[tokens.position], tokens.offset
        )
        level = 0.5 + 0.2 * self.log_fwp + 0.3 * (kind == "b")
        per_token = np.repeat(level, prompt + response - 1)
        random = noise * generator.normal(size=offset[-1])
        self.damage = {"W2": per_token + random, "W4": 0.1 * per_token + random}
        self.reference, self.routing = reference, routing
        for name in ["reference", *INSTANCES]:
            self.write(name)
        load = generator.integers(10, 100, (LAYERS, EXPERTS)).astype(np.int64)
        self.load = load
        ExpertStatistics(np.arange(LAYERS), load, load * 1.0, load * 1.0).save(root / "experts.safetensors")

    def write(self, name, rows=slice(None), scale=1.0):
        """Write the scores of `name`; the damage of request `rows` times `scale`."""
        folder = self.root / "scores" / name
        folder.mkdir(parents=True, exist_ok=True)
        own = self.reference
        nll, kl = own.nll, None
        if name != "reference":
            factor = np.ones(len(own.ids))
            factor[rows] = scale
            kl = (self.damage[name] * np.repeat(factor, np.diff(own.offset))).astype(np.float32)
            nll = own.nll.copy()
            for row in range(len(own.ids)):  # the prompt's losses, which are signals, stay
                part = own.scored(row, "response")
                nll[part] += kl[part]
        TokenScores(own.ids, own.offset, own.prompt_length, nll, kl).save(folder)
        self.routing.save(folder)

    def run(self, out="out", **changes):
        target = self.root / out
        metrics = run(
            self.root / "requests.parquet",
            self.root / "scores",
            self.root / "experts.safetensors",
            INSTANCES,
            settings(**changes),
            target / "fwp",
            target / "fwp.json",
        )
        return metrics, pd.read_parquet(target / "fwp/predictions.parquet")


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
    per_instance = [f"{c}_{i}" for i in INSTANCES for c in ("dnll", "kl", "predicted", "class_mean")]
    fixed = ["id", "class", "split", "prompt_tokens", "scored_tokens", "log_fwp"]
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
    assert saved["version"] >= 1 and saved["scorer"] == "W4" and saved["damage"] == "kl"
    holdout = table[table["split"] == "holdout"]
    for name in INSTANCES:
        predicted = Predictor.from_dict(saved["instances"][name]).predict(Rows.of(holdout))
        assert np.array_equal(predicted, holdout[f"predicted_{name}"])


def test_holdout_damage_changes_no_prediction(tmp_path):
    world = World(tmp_path)
    _, before = world.run("before")
    holdout = np.flatnonzero((world.frame["split"] == "holdout").to_numpy())
    for name in INSTANCES:
        world.write(name, holdout, scale=7.0)
    _, after = world.run("after")
    assert not np.allclose(before["kl_W2"], after["kl_W2"])
    for name in INSTANCES:
        assert np.array_equal(before[f"predicted_{name}"], after[f"predicted_{name}"])
        assert np.array_equal(before[f"class_mean_{name}"], after[f"class_mean_{name}"])
    assert (tmp_path / "before/fwp/predictor.json").read_bytes() == (
        tmp_path / "after/fwp/predictor.json"
    ).read_bytes()


def test_a_prompt_that_grew_damage_moves_only_fits_without_it(tmp_path):
    world = World(tmp_path)
    _, before = world.run("before")
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
    assert set(strengths) == {"gate_prob", "router_row_norm"}
    for report in strengths.values():
        assert report["std_weight"] > 0.05 and report["equals_ppl"] is False
        assert 0.5 < report["correlation_log_ppl"] < 1
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


def test_the_table_prints_every_predictor_and_ceiling(result, capsys):
    show(result[0])
    shown = capsys.readouterr().out
    assert "W2" in shown and "W4" in shown and "ceiling" in shown
    for name in ("ridge", "isotonic_ppl", "class_mean", "ridge_routing_frequency"):
        assert name in shown


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
    params["calibrate_fwp"] |= {"bootstrap": 30, "min_tokens": 8}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    monkeypatch.chdir(tmp_path)
    main()
    assert set(read_json("metrics/fwp.json")["holdout"]) == {"W2", "W4"}
    assert "holdout: predicted against true kl, scorer W4" in capsys.readouterr().out
