"""The decomposition step on a small model: what it writes adds up, and what it reports is what swaps give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from tasks.contracts import Fragility, InputError, read_json
from tasks.decompose_damage import calibration_requests, main, run, sampled
from tasks.moe.checkpoint import load_model
from tasks.params import DecomposeDamage, ParamsError, check_params, load_params
from tasks.quantize_instances import run as quantize
from tasks.risk.damage_audit import fitting, spread
from tasks.risk.decomposition import TERMS
from tasks.risk.fragility import estimate_sums, reference_gradients
from tasks.risk.scoring import Requests, read_requests
from tasks.risk.swaps import SwapLosses
from tests.seeded_models import VOCABULARY, seeded_checkpoint
from tests.tiny_run import ROOT

LAYERS, EXPERTS = 3, 8
CALIBRATION = [30, 2, 24, 11]  # the second has nothing to score
ESTIMATORS = ("taylor_kl", "taylor_dnll", "output_error")


def settings(**changes) -> DecomposeDamage:
    own = load_params(ROOT / "params.yaml").decompose_damage.model_dump()
    small = {
        "compute_dtype": "float64",
        "holdout_requests": 4,
        "pairs": 2,
        "swap_tokens": 30,
        "swap_layers": 2,
        "super_experts": 2,
    }
    return DecomposeDamage(**{**own, **small, **changes})


class World:
    """A seeded checkpoint, its instances W2 and W4, 12 requests of two classes, calibration sequences."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reference = seeded_checkpoint(root / "reference")
        quantizing = load_params(ROOT / "params.yaml").quantize_instances
        quantizing = quantizing.model_copy(update={"method": "rtn", "group_size": 32})
        for bits in (2, 4):
            quantize(self.reference, root / f"instances/W{bits}", bits, quantizing)
        random = np.random.default_rng(0)

        def ids(length):
            return random.integers(2, VOCABULARY, size=length).tolist()

        (root / "requests").mkdir()
        self.requests_file = root / "requests/requests.parquet"
        rows = [
            (f"r{row}", "ab"[row % 2], ("fit", "holdout")[row // 2 % 2], ids(6 + row), ids(5 + row % 4))
            for row in range(12)
        ]
        columns = ["id", "class", "split", "prompt_ids", "response_ids"]
        pd.DataFrame(rows, columns=columns).to_parquet(self.requests_file)
        self.calibration = [ids(length) for length in CALIBRATION]
        table = pd.DataFrame({"id": [f"c{row}" for row in range(4)], "ids": self.calibration})
        table.to_parquet(root / "requests/calibration.parquet")

    def run(self, out="out", instances=("W2", "W4"), damage="kl", **changes):
        torch.set_num_threads(1)
        made = run(
            self.reference,
            self.root / "instances",
            self.root / "requests",
            list(instances),
            settings(**changes),
            damage,
            "response",
            128,
            self.root / out / "decomposition",
            self.root / out / "decomposition.json",
        )
        assert read_json(self.root / out / "decomposition.json").keys() == made.keys()
        return made


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("decompose"))


@pytest.fixture(scope="module")
def made(world):
    return world.run()


def test_the_terms_of_every_request_add_up_to_its_damage(world, made):
    table = pd.read_parquet(world.root / "out/decomposition/terms.parquet")
    assert list(table.columns) == ["instance", "id", "split", "total", *TERMS, "sampling_error"]
    assert table["instance"].tolist() == ["W2"] * 6 + ["W4"] * 6
    assert table[list(TERMS)].sum(axis=1).to_numpy() == pytest.approx(table["total"].to_numpy(), abs=1e-12)
    assert (table["total"] > 0).all()  # KL
    assert made["requests"]["fit"] == 2 and made["requests"]["holdout"] == 4
    for name in ("W2", "W4"):
        own = table[(table["instance"] == name) & (table["split"] == "holdout")]
        figures = made["instances"][name]["terms"]
        assert figures["requests"] == 4 and (figures["pairs"], figures["all_pairs"]) == (2, 3)
        assert figures["total"]["mean"] == pytest.approx(own["total"].mean())
        assert figures["rest_with_sampling_error"]["mean"] == pytest.approx(own["higher_order"].mean())
        assert figures["interaction"]["sampling_error"] > 0 and (own["sampling_error"] > 0).all()
        assert figures["total"]["mean_low"] < figures["total"]["mean"] < figures["total"]["mean_high"]
    assert (
        made["instances"]["W2"]["terms"]["total"]["mean"] > made["instances"]["W4"]["terms"]["total"]["mean"]
    )


def test_total_is_what_swapping_every_layer_gives(world, made):
    """Against losses that skip nothing, asked in another order."""
    table = pd.read_parquet(world.root / "out/decomposition/terms.parquet").set_index(["instance", "id"])
    reference, instance = (
        load_model(folder, torch.float64) for folder in (world.reference, world.root / "instances/W2")
    )
    requests = read_requests(world.requests_file, VOCABULARY)
    losses = SwapLosses(reference, instance, requests, 4096, "layer", skip=False)
    total = losses.losses(frozenset(range(LAYERS)), "free")["kl"]
    known = dict(zip(requests.ids, total, strict=True))
    for (name, request), row in table.iterrows():
        if name == "W2":
            assert row["total"] == pytest.approx(known[request], rel=1e-9)


def test_fragility_is_of_calibration_tokens_alone(world, made):
    arrays = Fragility.load_from(world.root / "out/decomposition").arrays
    names = {Fragility.key(e, i, first) for e in ESTIMATORS for i in ("W2", "W4") for first in (True, False)}
    assert set(arrays) == {"router_row_norm", *names}
    for array in arrays.values():
        assert array.shape == (LAYERS, EXPERTS) and array.dtype == np.float64 and np.isfinite(array).all()
    reference, instance = (
        load_model(folder, torch.float64) for folder in (world.reference, world.root / "instances/W4")
    )
    calibration = calibration_requests(world.calibration, 10**6)
    assert [len(own) for own in calibration.sequences] == [30, 24, 11]
    sums = estimate_sums(reference_gradients(reference, calibration).passes, reference, instance)
    for first in (True, False):
        for damage in ("kl", "dnll"):
            expected = np.nan_to_num(sums.taylor(damage, first))
            assert arrays[Fragility.key(f"taylor_{damage}", "W4", first)] == pytest.approx(expected)
        expected = np.nan_to_num(sums.output_error(first))
        assert arrays[Fragility.key("output_error", "W4", first)] == pytest.approx(expected)
    untouched = made["experts_without_tokens"]
    assert untouched["with_first"] == int(np.isnan(sums.output_error(True)).sum())
    assert untouched["without_first"] >= untouched["with_first"]


def test_requests_never_reach_fragility(world, made, tmp_path):
    """Other requests, the same fragility to the bit."""
    table = pd.read_parquet(world.requests_file)
    try:
        table.assign(prompt_ids=table["prompt_ids"][::-1].to_numpy()).to_parquet(world.requests_file)
        world.run("other", instances=["W2"])
    finally:
        table.to_parquet(world.requests_file)
    one, other = (Fragility.load_from(world.root / out / "decomposition").arrays for out in ("out", "other"))
    for name, array in other.items():
        assert np.array_equal(array, one[name]), name
    terms = [
        pd.read_parquet(world.root / out / "decomposition/terms.parquet")["total"][:6]
        for out in ("out", "other")
    ]
    assert not np.allclose(*terms)


def test_agreement_and_super_experts_are_judged_by_exact_swaps(world, made):
    assert made["calibration"] == {
        "sequences": 3, "tokens": 65, "swap_sequences": 1, "swap_tokens": 30, "swap_layers": [0, 2],
    }  # fmt: skip
    for name in ("W2", "W4"):
        found = made["instances"][name]
        assert set(found["agreement"]) == {*ESTIMATORS, "router_row_norm"}
        for estimator in ESTIMATORS:
            for kind in ("with_first", "without_first", "all_tokens"):
                own = found["agreement"][estimator][kind]
                assert set(own["layers"]) == {"0", "2"} and -1 <= own["mean"] <= 1
                assert ("wrong_sign" in own) == (estimator == "taylor_kl")  # the one in the same unit
        assert len(found["super_experts"]) == 2
    reference, instance = (
        load_model(folder, torch.float64) for folder in (world.reference, world.root / "instances/W2")
    )
    one = calibration_requests(world.calibration[:1], 10**6)
    losses = SwapLosses(reference, instance, one, 128, "expert", skip=False)
    before, whole = losses.losses(frozenset(), "free"), losses.losses(frozenset(range(24)), "free")
    singles = []
    for own in made["instances"]["W2"]["super_experts"]:
        alone = losses.losses(frozenset([own["layer"] * EXPERTS + own["expert"]]), "frozen")
        for damage in ("kl", "dnll"):
            single = float((alone[damage] - before[damage])[0])
            total = float((whole[damage] - before[damage])[0])
            assert own["single"][damage] == pytest.approx(single, abs=1e-9)
            if total > 0:
                assert own["share"][damage] == pytest.approx(single / total, rel=1e-4)
            else:
                assert damage not in own["share"]
        assert own["phi"]["taylor_kl"].keys() == {"with_first", "without_first"}
        singles.append(own["single"]["kl"])
    assert singles == sorted(singles, reverse=True)


def test_cost_is_counted_in_tokens(made):
    """Layers 0 and 2 of 3 have all experts swapped, on 30 tokens: 8 runs of 3 and 8 of 1 layer. For all of
    them: the reference's run and 8 of 3, 2 and 1."""
    cost = made["cost"]
    assert cost["estimators"]["swap"]["forward_tokens"] == pytest.approx(30 * (1 + 8 * (3 + 2 + 1) / 3))
    assert cost["estimators"]["taylor"] == {"forward_tokens": 65, "backward_tokens": 130}
    assert cost["estimators"]["output_error"] == {"forward_tokens": 65, "backward_tokens": 0}
    assert cost["backward_tokens"] == 130
    first, second = (made["instances"][name]["cost"] for name in ("W2", "W4"))
    # The second instance pays for no run of the reference: free and frozen, of the requests.
    assert first["decomposition"] - second["decomposition"] == pytest.approx(2 * made["requests"]["tokens"])
    assert cost["forward_tokens"] == pytest.approx(
        65 + sum(sum(own["cost"].values()) for own in made["instances"].values())
    )


def test_the_same_inputs_give_the_same_bytes(world, made):
    world.run("again")
    for name in ("decomposition.json", *(f"decomposition/{own}" for own in
                 ("fragility.safetensors", "terms.parquet", "decomposition.json"))):  # fmt: skip
        assert (world.root / "again" / name).read_bytes() == (world.root / "out" / name).read_bytes(), name


def test_experts_as_blocks_and_more_pairs_than_there_are(world):
    made = world.run(
        "experts", instances=["W4"], level="expert", pairs=10**6, fit_requests=1, holdout_requests=1,
        swap_layers=99, super_experts=99, damage="dnll",
    )  # fmt: skip
    figures = made["instances"]["W4"]["terms"]
    assert figures["pairs"] == figures["all_pairs"] == 24 * 23 // 2
    assert "higher_order" in figures and "sampling_error" not in figures["interaction"]
    assert figures["requests"] == 1 and made["calibration"]["swap_layers"] == [0, 1, 2]
    assert len(made["instances"]["W4"]["super_experts"]) == 24
    assert made["unrouted_blocks"]["W4"] >= 0 and made["damage"] == "dnll"


def test_places_and_sequences_are_chosen_by_hand():
    """Of 15 layers 1: the middle one; 2: those at a quarter and three quarters. 245 and 119 make 364, 264 more
    would be too many, 91 make 455."""
    assert spread(15, 1) == [7] and spread(15, 2) == [3, 11] and spread(2, 9) == [0, 1]
    assert fitting([245, 450, 119, 264, 91, 101], 512) == [0, 2, 4]
    assert fitting([30, 8], 8) == [0]


def test_requests_are_taken_from_every_class_in_turn(world):
    requests = read_requests(world.requests_file, VOCABULARY)
    few = sampled(requests, 2, 4, seed=0).frame
    assert few.groupby(["split", "class"]).size().to_dict() == {
        ("fit", "a"): 1, ("fit", "b"): 1, ("holdout", "a"): 2, ("holdout", "b"): 2,
    }  # fmt: skip
    assert few["id"].tolist() == [name for name in requests.ids if name in set(few["id"])]
    assert sampled(requests, 99, 99, seed=0).ids == requests.ids
    chosen = {tuple(sampled(requests, 2, 2, seed=seed).ids) for seed in range(8)}
    assert len(chosen) > 1
    own = sampled(requests, 1, 1, seed=3)
    for name, sequence, length in zip(own.ids, own.sequences, own.prompt_length, strict=True):
        row = requests.ids.index(name)
        assert sequence == requests.sequences[row] and length == requests.prompt_length[row]


def test_a_split_without_requests_is_named(world):
    requests = read_requests(world.requests_file, VOCABULARY)
    for split, other in (("fit", "holdout"), ("holdout", "fit")):
        frame = requests.frame.assign(split=other)
        with pytest.raises(InputError, match=f"split '{split}' has no request"):
            sampled(Requests(frame, requests.sequences, requests.prompt_length), 2, 2, 0)


def test_unusable_instances_are_named_and_nothing_is_written(world, tmp_path):
    with pytest.raises(
        InputError, match=r"instances/W8: no instance there; run the stage quantize_instances"
    ):
        world.run("bad", instances=["W8"])
    other = seeded_checkpoint(tmp_path / "other", seed=1)
    quantizing = load_params(ROOT / "params.yaml").quantize_instances
    quantizing = quantizing.model_copy(update={"method": "rtn", "group_size": 32})
    quantize(other, world.root / "instances/W3", 3, quantizing)
    with pytest.raises(InputError, match=r"W3: the instance is not one of this reference: '.*' differs"):
        world.run("bad", instances=["W3"])
    assert not (world.root / "bad").exists()


def test_fewer_than_two_pairs_are_refused():
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["decompose_damage"]["pairs"] = 1
    with pytest.raises(ParamsError, match=r"decompose_damage\.pairs"):
        check_params(values)


def test_an_encoder_decoder_says_that_it_is_not_supported(tmp_path):
    reference = seeded_checkpoint(tmp_path / "reference", "switch_transformers")
    (tmp_path / "instances/W4").mkdir(parents=True)
    (tmp_path / "instances/W4/config.json").write_text("{}")
    out, metrics_file = tmp_path / "decomposition", tmp_path / "decomposition.json"
    args = (
        reference,
        tmp_path / "instances",
        tmp_path / "requests",
        ["W4"],
        settings(),
        "kl",
        "response",
        64,
    )
    metrics = run(*args, out, metrics_file)
    assert metrics == read_json(metrics_file) and metrics["supported"] is False
    assert "encoder-decoder" in metrics["reason"]
    arrays = Fragility.load_from(out).arrays
    assert list(arrays) == ["router_row_norm"] and arrays["router_row_norm"].shape == (3, 8)
    assert pd.read_parquet(out / "terms.parquet").empty


def test_main_reads_the_pool_from_the_parameters(world, tmp_path, monkeypatch):
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["quantize_instances"]["bits"] = [4]
    params["runtime"]["threads"] = 1
    params["decompose_damage"] |= {"swap_tokens": 8, "pairs": 2, "super_experts": 1}
    params["calibrate_fwp"]["scorer"] = "W4"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "artifacts").mkdir()
    for name in ("reference", "instances", "requests"):
        (tmp_path / "artifacts" / name).symlink_to(world.root / name)
    monkeypatch.chdir(tmp_path)
    main()
    found = read_json("metrics/decomposition.json")
    assert list(found["instances"]) == ["W4"] and found["damage"] == params["calibrate_fwp"]["damage"]
    assert Fragility.load_from("artifacts/decomposition").arrays
