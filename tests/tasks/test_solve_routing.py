"""The routing step end to end on made predictions, through its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from tasks.console import run_step
from tasks.contracts import InputError, read_json, write_json
from tasks.params import SolveRouting
from tasks.solve_routing import main, run
from tests.tasks.routing.made_predictions import made_predictions

ROOT = Path(__file__).resolve().parents[2]
PARAMS = SolveRouting(
    budget="relative",
    budget_value=0.758,
    budget_scope="overall",
    reward="bits",
    delta=0.1,
    replicates=39,
    folds=5,
    seed=0,
)


def route(
    folder: Path, frame: pd.DataFrame | None = None, instances=("W2", "W3", "W4"), damage="kl", **changes
):
    file = folder / "artifacts/fwp/predictions.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    (made_predictions(instances) if frame is None else frame).to_parquet(file)
    own = {"name": "isotonic", "settings": {}, "min_tokens": 1}
    write_json(file.with_name("predictor.json"), {"instances": dict.fromkeys(instances, own)})
    return run(
        file,
        file.with_name("predictor.json"),
        list(instances),
        damage,
        PARAMS.model_copy(update=changes),
        folder / "artifacts/routing",
        folder / "metrics/routing.json",
    )


def test_metrics_are_those_of_the_allocations(tmp_path):
    """Recomputed from allocations.parquet and predictions.parquet alone."""
    metrics = route(tmp_path)
    frame = pd.read_parquet(tmp_path / "artifacts/fwp/predictions.parquet").set_index("id")
    fit = frame[frame["split"] == "fit"]
    w4, w3 = fit["kl_W4"].mean(), fit["kl_W3"].mean()
    assert metrics["budget"]["tau"]["overall"] == pytest.approx(w4 + 0.758 * (w3 - w4))
    allocations = pd.read_parquet(tmp_path / "artifacts/routing/allocations.parquet")
    assert set(allocations["policy"]) == set(metrics["policies"])
    for name, rows in allocations.groupby("policy"):
        policy = metrics["policies"][name]
        assert sorted(rows["id"]) == sorted(frame.index[frame["split"] == "holdout"])
        bits = rows["instance"].str[1:].astype(int)
        damage = np.array(
            [frame.loc[r, f"kl_{i}"] for r, i in zip(rows["id"], rows["instance"], strict=True)]
        )
        assert policy["multiplier"] == pytest.approx((4 / bits).mean())
        assert policy["multiplier_fixed_work"] == pytest.approx(1 / (bits / 4).mean())
        assert policy["kl_mean"] == pytest.approx(damage.mean())
        assert policy["budget_kept"] == (damage.mean() <= metrics["budget"]["tau"]["overall"])
        assert sum(policy["shares"].values()) == pytest.approx(1)
        maths = frame.loc[rows["id"], "class"].to_numpy() == "maths"
        assert policy["classes"]["maths"]["kl_mean"] == pytest.approx(damage[maths].mean())
        assert policy["classes"]["maths"]["requests"] == maths.sum()


def test_every_policy_is_there_and_the_certificate_holds(tmp_path):
    metrics = route(tmp_path)
    assert list(metrics["policies"]) == [
        "static_W2", "static_W3", "static_W4", "capacity_proportional", "request_agnostic", "class_mean",
        "order_length", "order_routing_frequency", "order_ppl", "order_fwp",
        "request_agnostic_controlled", "class_mean_controlled", "lp_fwp_controlled", "lp_fwp", "true_loss",
    ]  # fmt: skip
    assert metrics["infeasible"] == {}
    assert metrics["certificate"]["holds"] and metrics["certificate"]["relative_gap"] <= 1e-9
    assert metrics["prices"]["overall"] > 0
    assert metrics["policies"]["static_W4"]["budget_kept"]
    assert not metrics["policies"]["static_W2"]["budget_kept"]
    assert metrics["policies"]["true_loss"]["budget_kept"]
    assert (
        metrics["published"]["order_fwp"]["multiplier"]["measured"]
        == metrics["policies"]["order_fwp"]["multiplier"]
    )
    rules = read_json(tmp_path / "artifacts/routing/routing.json")["policies"]
    assert rules["lp_fwp"]["certificate"]["holds"]
    assert set(rules["request_agnostic"]["rule"]["shares"]) == {"W2", "W3", "W4"}


def test_two_runs_write_the_same_bytes(tmp_path):
    route(tmp_path / "a")
    route(tmp_path / "b")
    for name in (
        "artifacts/routing/allocations.parquet",
        "artifacts/routing/routing.json",
        "metrics/routing.json",
    ):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_budgets_per_class_in_either_damage(tmp_path):
    metrics = route(tmp_path, budget_scope="class", damage="dnll")
    assert set(metrics["budget"]["tau"]) == {"code", "maths", "prose"}
    for policy in metrics["policies"].values():
        kept = [entry["kept"] for entry in policy["classes"].values()]
        assert policy["budget_kept"] == all(kept) == policy["budget_kept_dnll"]
        for name, entry in policy["classes"].items():
            assert entry["tau"] == metrics["budget"]["tau"][name]
            assert entry["kept"] == (entry["dnll_mean"] <= entry["tau"])


def test_a_pool_without_w4_is_measured_against_its_widest(tmp_path):
    metrics = route(tmp_path, instances=("W2", "W3"))
    assert metrics["baseline"] == "W3"
    assert metrics["policies"]["static_W2"]["multiplier"] == pytest.approx(1.5)


def test_a_pool_of_one_has_nothing_to_decide(tmp_path):
    metrics = route(tmp_path, instances=("W4",))
    assert list(metrics["policies"]) == ["static_W4"]
    assert "certificate" not in metrics


def test_an_oracle_that_cannot_keep_the_budget_is_listed_without_figures(tmp_path):
    frame = made_predictions()
    for name in ("W2", "W3", "W4"):
        frame.loc[frame["split"] == "holdout", f"kl_{name}"] += 1
    metrics = route(tmp_path, frame)
    assert metrics["infeasible"].keys() == {"true_loss"}
    assert metrics["infeasible"]["true_loss"]["least_reachable"] > 1
    assert "true_loss" not in metrics["policies"]
    assert not metrics["policies"]["lp_fwp"]["budget_kept"]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: f.drop(columns="predicted_W3"), "missing columns predicted_W3.*instance W3"),
        (lambda f: f.drop(columns="log_fwp"), "missing columns log_fwp"),
        (lambda f: f.assign(id="same"), "id 'same' occurs twice"),
        (lambda f: f.assign(kl_W2=np.nan), "kl_W2 of request 'code/0' is not a finite number"),
        (lambda f: f.assign(split="fit"), "splits are fit, expected"),
        (
            lambda f: f[(f["class"] != "code") | (f["split"] == "holdout")],
            "class 'code' has holdout requests but no",
        ),
    ],
)
def test_unusable_predictions_are_refused_and_nothing_is_written(tmp_path, break_it, message):
    with pytest.raises(InputError, match=message):
        route(tmp_path, break_it(made_predictions()))
    assert not (tmp_path / "artifacts/routing").exists() and not (tmp_path / "metrics").exists()


def write_params(folder: Path, **routing: object) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["solve_routing"] |= routing
    (folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")


def test_command_line(tmp_path):
    route(tmp_path)
    (tmp_path / "metrics/routing.json").unlink()
    write_params(tmp_path)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    step = [sys.executable, "-m", "tasks.solve_routing"]
    done = subprocess.run(
        step, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "true loss" in done.stdout and "relative to W4" in done.stdout
    assert read_json(tmp_path / "metrics/routing.json")["certificate"]["holds"]


def test_command_line_errors_are_one_line_and_replace_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["solve_routing"])

    def fails(**routing: object) -> str:
        write_params(tmp_path, **routing)
        with pytest.raises(SystemExit) as stopped:
            run_step(main)
        assert stopped.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("solve_routing: error: ") and "Traceback" not in error
        return error

    assert "predictions.parquet: no such file; run the stage calibrate_fwp first" in fails()
    route(tmp_path)
    before = (tmp_path / "metrics/routing.json").read_bytes()
    impossible = fails(budget="absolute", budget_value=0.001)
    assert "class 'overall': the least reachable mean damage is 0.0" in impossible
    assert "tau is 0.001" in impossible
    assert "did you mean 'budget'" in fails(budgt="relative")
    assert (tmp_path / "metrics/routing.json").read_bytes() == before


def test_a_promise_beside_the_point_estimate(tmp_path):
    """90 fit and 90 holdout requests, a signal that knows most: the promise holds, costs some gain, and is told."""
    metrics = route(tmp_path, replicates=99)
    plain, safe = metrics["policies"]["lp_fwp"], metrics["policies"]["lp_fwp_controlled"]
    risk = metrics["risk"]["policies"]
    assert set(risk) == {"request_agnostic", "class_mean", "lp_fwp"}
    margin = risk["lp_fwp"]["overall"]
    assert margin["status"] == "guaranteed" and margin["fit"] == margin["fresh"] == 90
    assert 0 < margin["error"] <= margin["margin"] <= margin["room"] / 2
    assert safe["guaranteed"] == 1 and safe["kl_mean"] < plain["kl_mean"]
    assert 1 + (plain["multiplier"] - 1) / 2 <= safe["multiplier"] < plain["multiplier"]
    rules = read_json(tmp_path / "artifacts/routing/routing.json")["policies"]
    assert rules["lp_fwp_controlled"]["rule"]["margin"] == {"overall": pytest.approx(margin["margin"])}


def test_few_requests_promise_nothing(tmp_path):
    """12 fit requests a class and a budget for each: no class has room for its error, all go to the safest."""
    frame = made_predictions(per_class=24)
    metrics = route(tmp_path, frame, budget_scope="class", budget_value=0.3, replicates=39)
    assert {own["status"] for own in metrics["risk"]["policies"]["lp_fwp"].values()} == {"no guarantee"}
    safe = metrics["policies"]["lp_fwp_controlled"]
    assert safe["guaranteed"] == 0 and safe["multiplier"] == 1 and safe["shares"]["W4"] == 1


def test_requests_outside_are_counted_and_safe(tmp_path):
    frame = made_predictions()
    frame["outside"] = frame["id"].isin(["code/1", "maths/63"])  # odd: holdout
    metrics = route(tmp_path, frame)
    assert metrics["requests"]["outside"] == 2
    allocations = pd.read_parquet(tmp_path / "artifacts/routing/allocations.parquet")
    for name in ("lp_fwp", "lp_fwp_controlled"):
        rows = allocations[(allocations["policy"] == name) & allocations["id"].isin(["code/1", "maths/63"])]
        assert set(rows["instance"]) == {"W4"}


def test_too_few_replicates_and_another_pool_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"8 replicates cannot give the 0\.9 quantile"):
        route(tmp_path, replicates=8)
    file = tmp_path / "artifacts/fwp/predictor.json"
    write_json(file, {"instances": {"W4": {}}})
    with pytest.raises(InputError, match="predicts for W4, the pool has W2, W3, W4"):
        run(
            file.with_name("predictions.parquet"),
            file,
            ["W2", "W3", "W4"],
            "kl",
            PARAMS,
            tmp_path / "artifacts/routing",
            tmp_path / "metrics/routing.json",
        )
