"""Prompts from outside the pipeline: predictions equal to those of the pipeline's own code, and every bad input."""

import json
import shutil
import tracemalloc
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from tasks import calibrate_fwp
from tasks.contracts import Fragility, InputError, read_json, write_json
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.params import load_params
from tasks.risk.drift import Drift
from tasks.risk.features import fragility_signals, prefill_signals
from tasks.risk.forecast import PREDICTOR_VERSION
from tasks.risk.forecast_table import show
from tasks.risk.fragility import router_row_norm
from tasks.risk.maps import Rows
from tasks.risk.predictor import Predictor, refit
from tasks.risk.scoring import Requests, score
from tasks.score_prompts import notes, run
from tasks.sources import prompts as prompts_module
from tasks.sources.tokens import Tokens
from tests.seeded_models import TEXT, seeded_checkpoint

ROOT = Path(__file__).parents[2]
PARAMS = load_params(ROOT / "params.yaml")
INSTANCES = PARAMS.quantize_instances.names
CONTEXT = 64
WORDS = TEXT.split()


def text(seed: int, words: int) -> str:
    generator = np.random.default_rng(seed)
    return " ".join(WORDS[place] for place in generator.integers(0, len(WORDS), words))


# prompts of two classes, some of them shorter than `min_tokens`
ROWS = [{"id": f"r{n}", "class": "ab"[n % 2], "prompt": text(n, 4 + n % 9)} for n in range(24)]
MIN_TOKENS = 16


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    """A scorer of random weights, and predictors that the pipeline's code fitted to made-up damage."""
    folder = tmp_path_factory.mktemp("score_prompts") / "artifacts"
    scorer = seeded_checkpoint(folder / "instances/W4", max_position_embeddings=CONTEXT)
    model = load_model(scorer)
    frame = signals(model, scorer)
    generator = np.random.default_rng(0)
    predictors = {}
    for name in INSTANCES:
        rows = Rows.of(frame, name)
        damage = 0.1 * frame["log_ppl"].to_numpy() + 0.05 * generator.standard_normal(len(frame))
        fitted = refit("ridge", {}, rows, damage, MIN_TOKENS)
        predictors[name] = fitted.to_dict() | {"interval": [-0.1, 0.2]}
    values = {
        "version": 2, "scorer": "W4", "damage": "kl", "scored": "response", "align": "token",
        "strength": "router_row_norm", "fragility": "taylor_kl", "instances": predictors,
        "fit_range": Drift.of(frame, INSTANCES).to_dict(),
    }  # fmt: skip
    (folder / "fwp").mkdir()
    write_json(folder / "fwp/predictor.json", values, digits=17)
    (folder / "decomposition").mkdir()
    arrays = {f"taylor_kl_{name}": own for name, own in phi().items()}
    Fragility({**arrays, "router_row_norm": router_row_norm(model)}).save(folder / "decomposition")
    return folder


def phi() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {name: generator.uniform(0, 0.1, (3, 8)) for name in INSTANCES}


def signals(model, scorer: Path) -> pd.DataFrame:
    """The frame that the pipeline would fit on: recorded routing, class and all."""
    tokens = Tokens(load_tokenizer(scorer), bos=True, chat_template=False)
    ids = [tokens.prompt(row["prompt"])[1] for row in ROWS]
    lengths = np.array([len(own) for own in ids])
    requests = Requests(pd.DataFrame(ROWS)[["id", "class"]], [[*own, 5] for own in ids], lengths)
    scores, routing, _ = score(model, requests, "W4", 500)
    plain = prefill_signals(scores, routing, np.ones((3, 8)), ["router_row_norm"], "token")
    own = fragility_signals(scores, routing, phi(), "token")
    frame = pd.concat([requests.frame, pd.Series(lengths, name="prompt_tokens"), plain, own], axis=1)
    return frame.assign(log_fwp=frame["log_fwp_router_row_norm"])


def written(folder: Path, rows: list, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_predictions_are_those_of_the_pipeline(artifacts, tmp_path):
    output = tmp_path / "out.parquet"
    run(written(tmp_path, ROWS), artifacts, PARAMS, output, batch_tokens=100)
    found = pd.read_parquet(output)
    model = load_model(artifacts / "instances/W4")
    expected = signals(model, artifacts / "instances/W4")
    assert found["id"].tolist() == [row["id"] for row in ROWS]
    assert found["class"].tolist() == [row["class"] for row in ROWS]
    assert found["prompt_tokens"].tolist() == expected["prompt_tokens"].tolist()
    values = read_json(artifacts / "fwp/predictor.json")
    for name in INSTANCES:
        predictor = Predictor.from_dict(values["instances"][name])
        own = predictor.predict(Rows.of(expected, name))
        np.testing.assert_allclose(found[f"predicted_{name}"], own, rtol=1e-4)
        np.testing.assert_allclose(found[f"low_{name}"], own - 0.1, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[f"high_{name}"], own + 0.2, rtol=1e-4)
        np.testing.assert_allclose(found[f"separable_{name}"], expected[f"separable_{name}"], rtol=1e-4)
    assert not found["outside"].any()  # the fit requests themselves
    assert found["predicted_W2"].std() > 1e-3


def test_windows_formats_and_repeats_change_nothing(artifacts, tmp_path, monkeypatch):
    path = written(tmp_path, ROWS)
    run(path, artifacts, PARAMS, tmp_path / "a.parquet")
    monkeypatch.setattr(prompts_module, "WINDOW_PROMPTS", 5)
    monkeypatch.setattr(prompts_module, "WINDOW_TOKENS", 90)
    run(path, artifacts, PARAMS, tmp_path / "b.parquet")
    run(path, artifacts, PARAMS, tmp_path / "c.jsonl")
    run(path, artifacts, PARAMS, tmp_path / "d.jsonl")
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "d.jsonl").read_bytes()
    whole = pd.read_parquet(tmp_path / "a.parquet")
    parts = pd.read_parquet(tmp_path / "b.parquet")
    lines = pd.DataFrame([json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()])
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-4)
    pd.testing.assert_frame_equal(parts, lines[list(parts)], check_dtype=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.parquet",
        "b.parquet",
        "c.jsonl",
        "d.jsonl",
        path.name,
    ]


def test_no_class_and_what_is_unlike_the_fit_requests(artifacts, tmp_path):
    plain = {"prompt": ROWS[7]["prompt"]}
    rows = [plain, {**plain, "class": "a"}, {**plain, "class": "c"}, {"prompt": text(1, 30), "class": "a"}]
    path, output = written(tmp_path, rows), tmp_path / "out.parquet"
    forecaster, totals, checked = run(path, artifacts, PARAMS, output)
    found = pd.read_parquet(output)
    assert found["id"].tolist() == ["line 1", "line 2", "line 3", "line 4"]
    assert checked.without_class == 1
    # without a class as with one never seen: an average one; but only the latter is a reason
    assert found["predicted_W3"][0] == pytest.approx(found["predicted_W3"][2])
    assert found["predicted_W3"][0] != pytest.approx(found["predicted_W3"][1])
    assert found["outside"].tolist() == [False, False, True, True]
    assert found["outside_reason"][2] == "class 'c' never seen"
    assert "prompt length above the fit range" in found["outside_reason"][3]
    printed = StringIO()
    show(totals, forecaster, notes(checked, totals, path, None), Console(file=printed, width=200))
    shown = printed.getvalue()
    for part in (
        "1 of 4 prompts have no class", "class 'c' never seen 1", "2 of 4 prompts are unlike the fit requests",
        "nats per token", "W2", "next: keep every row: python -m tasks.score_prompts",
    ):  # fmt: skip
        assert part in shown, shown


def test_short_prompts_have_their_class_mean_and_are_counted(artifacts, tmp_path):
    output = tmp_path / "out.parquet"
    _, totals, _ = run(
        written(tmp_path, [{"prompt_ids": [0, 5, 9], "class": "a"}]), artifacts, PARAMS, output
    )
    mean = read_json(artifacts / "fwp/predictor.json")["instances"]["W2"]["class_mean"]["means"]["a"]
    assert pd.read_parquet(output)["predicted_W2"].tolist() == pytest.approx([mean])
    assert totals.short == 1


def test_measured_fwp(artifacts, tmp_path):
    """Every instance has an FWP of its own."""
    folder = shutil.copytree(artifacts, tmp_path / "artifacts")
    values = read_json(folder / "fwp/predictor.json") | {"strength": "measured"}
    write_json(folder / "fwp/predictor.json", values, digits=17)
    output = tmp_path / "out.parquet"
    run(written(tmp_path, ROWS), folder, PARAMS, output)
    found = pd.read_parquet(output)
    expected = signals(load_model(folder / "instances/W4"), folder / "instances/W4")
    own = [expected[f"log_fwp_measured_{name}"] for name in INSTANCES]
    np.testing.assert_allclose(found["log_fwp"], np.mean(own, axis=0), rtol=1e-4)
    moved = expected.assign(log_fwp=own[0])
    predictor = Predictor.from_dict(values["instances"][INSTANCES[0]])
    np.testing.assert_allclose(
        found[f"predicted_{INSTANCES[0]}"], predictor.predict(Rows.of(moved, INSTANCES[0])), rtol=1e-4
    )


def test_an_encoder_decoder_without_fragility(artifacts, tmp_path):
    """Its predictors read no separable term, so no decomposition is needed."""
    folder = tmp_path / "artifacts"
    scorer = seeded_checkpoint(folder / "instances/W4", "switch_transformers")
    values = read_json(artifacts / "fwp/predictor.json")
    ids = [[5, 9, 30, 7, 200, 11], [8, 8, 2], list(range(10, 50))]
    own = prompt_frame(load_model(scorer), ids)
    fitted = refit("isotonic", {}, Rows.of(own), np.array([0.1, 0.2, 0.3]), 0).to_dict() | {
        "interval": [0.0, 0.1]
    }
    values |= {"instances": dict.fromkeys(INSTANCES, fitted), "fit_range": Drift.of(own, INSTANCES).to_dict()}
    (folder / "fwp").mkdir()
    write_json(folder / "fwp/predictor.json", values, digits=17)
    output = tmp_path / "out.parquet"
    run(written(tmp_path, [{"prompt_ids": row} for row in ids]), folder, PARAMS, output)
    found = pd.read_parquet(output)
    np.testing.assert_allclose(found["log_fwp"], own["log_fwp"], rtol=1e-5)
    assert "separable_W2" not in found and not found["outside"].any()


def prompt_frame(model, ids: list[list[int]]) -> pd.DataFrame:
    """The signals of prompts as the pipeline reads them off recorded routing, each with a response of one token."""
    lengths = np.array([len(row) for row in ids])
    requests = Requests(
        pd.DataFrame({"id": [str(n) for n in range(len(ids))]}), [[*row, 5] for row in ids], lengths
    )
    scores, routing, _ = score(model, requests, "W4", 500)
    plain = prefill_signals(
        scores, routing, np.ones(routing.router_row_norm.shape), ["router_row_norm"], "token"
    )
    return plain.assign(
        **{"class": "a", "prompt_tokens": lengths, "log_fwp": plain["log_fwp_router_row_norm"]}
    )


LONG = {"id": "long", "prompt": text(3, 80)}


def test_a_prompt_beyond_the_context(artifacts, tmp_path):
    path, output = written(tmp_path, [ROWS[0], LONG]), tmp_path / "out.parquet"
    with pytest.raises(
        InputError, match=rf":2: prompt 'long' has \d+ tokens, the model takes {CONTEXT}; .*--truncate"
    ):
        run(path, artifacts, PARAMS, output)
    assert not output.exists()
    _, totals, checked = run(path, artifacts, PARAMS, output, truncate=True)
    assert checked.truncated == 1
    found = pd.read_parquet(output)
    assert found["truncated"].tolist() == [False, True]
    assert found["prompt_tokens"][1] == CONTEXT
    # the first tokens are kept
    tokens = Tokens(load_tokenizer(artifacts / "instances/W4"), bos=True, chat_template=False)
    ids = tokens.prompt(LONG["prompt"])[1][:CONTEXT]
    run(written(tmp_path, [ROWS[0], {"prompt_ids": ids}]), artifacts, PARAMS, tmp_path / "cut.parquet")
    same = pd.read_parquet(tmp_path / "cut.parquet")
    assert same["log_fwp"].tolist() == pytest.approx(found["log_fwp"].tolist(), rel=1e-5)
    assert any("longer than the model's context" in line for line in notes(checked, totals, path, output))


BAD = {
    "not json": (["{nonsense"], r"prompts.jsonl:1: not JSON"),
    "not an object": ([ROWS[0], "[1]"], r"prompts.jsonl:2: list, expected an object"),
    "no prompt": ([{"id": "x", "text": "a"}], r"prompt 'x' has neither 'prompt' nor 'prompt_ids'.*\['id', 'text'\]"),
    "both": ([{"id": "x", "prompt": "a", "prompt_ids": [1]}], "prompt 'x' has both"),
    "empty": ([ROWS[0], {"id": "e", "prompt": " "}], ":2: prompt 'e' is empty"),
    "number": ([{"prompt": 3}], "prompt 'line 1' is 3, expected text"),
    "one token": ([{"id": "one", "prompt_ids": [5]}], "prompt 'one' has 1 tokens.*at least 3"),
    "one token of text": ([{"id": "one", "prompt": "a"}], "prompt 'one' has 2 tokens.*at least 3"),
    "vocabulary": ([{"prompt_ids": [1, 2, 352]}], r"numbers outside 0\.\.351"),
    "ids": ([{"prompt_ids": [1, 2, 0.5]}], "not a list of whole numbers"),
    "repeated": ([*ROWS, ROWS[3]], "id 'r3' stands there twice"),
    "repeated line": ([{"prompt": "a b c d"}, {"id": "line 1", "prompt": "a b c d"}], "id 'line 1' stands there twice"),
    "id": ([{"id": ["x"], "prompt": "a b c d"}], r"id is \['x'\], expected text"),
    "class": ([{"class": 3, "prompt": "a b c d"}], "class is 3, expected text"),
    "nothing": ([""], "holds no prompt"),
    "half a character": (['{"prompt": "a b c \\ud800 d"}'], r"prompt 'line 1' is 'a b c \\ud800 d', expected text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_are_found_before_the_model_is_loaded(artifacts, tmp_path, case, monkeypatch):
    rows, message = BAD[case]
    monkeypatch.setattr(
        "tasks.score_prompts.load_model", lambda *_, **__: pytest.fail("the model was loaded")
    )
    output = tmp_path / "out.parquet"
    output.write_text("kept")
    with pytest.raises(InputError, match=message):
        run(written(tmp_path, rows), artifacts, PARAMS, output)
    assert output.read_text() == "kept"


def test_repeated_ids_are_found_across_windows(artifacts, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts_module, "WINDOW_PROMPTS", 4)
    with pytest.raises(InputError, match="id 'r1' stands there twice"):
        run(written(tmp_path, [*ROWS, ROWS[1]]), artifacts, PARAMS)


def test_missing_file_and_unknown_format(artifacts, tmp_path):
    with pytest.raises(InputError, match=r"none.jsonl: no such file"):
        run(tmp_path / "none.jsonl", artifacts, PARAMS)
    with pytest.raises(InputError, match=r"out.csv: expected a name that ends in one of .parquet, .jsonl"):
        run(written(tmp_path, ROWS), artifacts, PARAMS, tmp_path / "out.csv")


def test_the_output_is_not_the_input(artifacts, tmp_path):
    path = written(tmp_path, ROWS)
    with pytest.raises(InputError, match="is the file of the prompts itself"):
        run(path, artifacts, PARAMS, path)


def test_the_version_is_that_of_the_stage():
    assert calibrate_fwp.VERSION == PREDICTOR_VERSION


def changed(values: dict, **own) -> dict:
    return {**values, **own}


OTHERS = {
    "missing": (None, "predictor.json: no such file.*calibrate_fwp"),
    "version": (lambda v: changed(v, version=1), "is of version 1, expected 2"),
    "scorer": (lambda v: changed(v, scorer="W3"), "calibrated on prefills of W3, but .* is W4"),
    "instances": (
        lambda v: changed(v, instances={"W2": v["instances"]["W2"]}),
        r"predicts for \['W2'\], but params.yaml's instances are \['W2', 'W3', 'W4'\]",
    ),
    "no damage": (lambda v: {k: own for k, own in v.items() if k != "damage"}, "has no 'damage'"),
    "estimator": (lambda v: changed(v, fragility="swap"), "no fragility 'swap_W2'"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_predictors_that_do_not_belong(artifacts, tmp_path, case):
    change, message = OTHERS[case]
    folder = shutil.copytree(artifacts, tmp_path / "artifacts")
    path = folder / "fwp/predictor.json"
    if change is None:
        path.unlink()
    else:
        write_json(path, change(read_json(path)), digits=17)
    with pytest.raises(InputError, match=message):
        run(written(tmp_path, ROWS), folder, PARAMS)


def test_fragility_that_does_not_belong(artifacts, tmp_path):
    folder = shutil.copytree(artifacts, tmp_path / "artifacts")
    path = written(tmp_path, ROWS)
    known = Fragility.load_from(folder / "decomposition").arrays
    Fragility({**known, "router_row_norm": known["router_row_norm"][::-1]}).save(folder / "decomposition")
    with pytest.raises(InputError, match=r"is of another model.* with other routers"):
        run(path, folder, PARAMS)
    Fragility({name: own[:2] for name, own in known.items()}).save(folder / "decomposition")
    with pytest.raises(InputError, match=r"has \(2, 8\) \(MoE layers, experts\), the scorer W4 has \(3, 8\)"):
        run(path, folder, PARAMS)
    (folder / "decomposition/fragility.safetensors").unlink()
    with pytest.raises(InputError, match="no such file; run the stage decompose_damage"):
        run(path, folder, PARAMS)


def test_a_broken_scorer(artifacts, tmp_path, monkeypatch):
    def broken(*args, **options):
        model = load_model(*args, **options)
        with torch.no_grad():
            model.get_output_embeddings().weight[3] = float("nan")
        return model

    monkeypatch.setattr("tasks.score_prompts.load_model", broken)
    output = tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="the loss of prompt 'r0' is not a finite number"):
        run(written(tmp_path, ROWS[:1]), artifacts, PARAMS, output)
    assert not output.exists()


def test_memory_does_not_grow_with_the_prompts(artifacts, tmp_path, monkeypatch):
    """Python's and numpy's peak over 900 prompts against 200, windows of 50."""
    monkeypatch.setattr(prompts_module, "WINDOW_PROMPTS", 50)
    kept = load_model(artifacts / "instances/W4")
    monkeypatch.setattr("tasks.score_prompts.load_model", lambda *_, **__: kept)

    def peak(count: int) -> int:
        rows = [{"id": f"n{n}", "prompt": text(n % 50, 4)} for n in range(count)]
        path, output = written(tmp_path, rows, f"{count}.jsonl"), tmp_path / f"{count}.parquet"
        del rows
        tracemalloc.start()
        try:
            run(path, artifacts, PARAMS, output)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)  # what is imported and cached at the first call
    few, many = peak(200), peak(900)
    assert len(pd.read_parquet(tmp_path / "900.parquet")) == 900
    assert many - few < 700 * 128, (
        few,
        many,
    )  # some copies of 8 bytes an id; a row of results takes hundreds
