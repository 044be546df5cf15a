"""Scoring on a small random model, against computations from the full logits, and its errors."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.contracts import InputError, PrefillRouting, TokenScores, read_json
from tasks.moe.checkpoint import load_model
from tasks.moe.registry import moe_layers
from tasks.risk.scoring import divergence
from tasks.score_requests import run
from tests.seeded_models import VOCABULARY, seeded_checkpoint

LENGTHS = [(3, 1), (9, 6), (20, 4), (5, 12), (14, 3), (7, 7)]  # tokens of prompt and response


def write_requests(path, lengths=LENGTHS, ids=None):
    generator = np.random.default_rng(0)
    rows = []
    for at, (prompt, response) in enumerate(lengths):
        tokens = generator.integers(2, VOCABULARY, prompt + response).tolist()
        name = ids[at] if ids else f"r{at}"
        kind, split = "xy"[at % 2], ("fit", "holdout")[at // 2 % 2]
        rows.append((name, kind, split, tokens[:prompt], tokens[prompt:]))
    frame = pd.DataFrame(rows, columns=["id", "class", "split", "prompt_ids", "response_ids"])
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path)
    return frame


class World:
    """A reference, an instance with disturbed experts, and requests; every model is scored once."""

    def __init__(self, root):
        self.root, self.requests = root, root / "requests.parquet"
        self.frame = write_requests(self.requests)
        self.reference = seeded_checkpoint(root / "reference", family="qwen2_moe")
        model = load_model(self.reference)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in moe_layers(model):
                for matrix in layer.matrices().values():
                    matrix += 0.05 * torch.randn(matrix.shape, generator=generator)
        self.instance = root / "W3"
        model.save_pretrained(self.instance)
        self.score("reference")
        self.score("W3", self.instance)

    def score(self, name, folder=None, batch_tokens=64, scores=None, requests=None, dtype="float32"):
        scores = scores or self.root / "scores"
        folder = folder or self.reference
        metrics = self.root / "metrics" / f"{name}.json"
        run(name, folder, requests or self.requests, scores, metrics, dtype, batch_tokens)
        return TokenScores.load_from(scores / name)

    def logits(self, folder, row):
        prompt, response = self.frame.loc[row, ["prompt_ids", "response_ids"]]
        tokens = torch.tensor([list(prompt) + list(response)])
        with torch.no_grad():
            return load_model(folder)(input_ids=tokens, labels=tokens), tokens[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("scores"))


def test_losses_are_those_of_transformers(world):
    scores = TokenScores.load_from(world.root / "scores/W3")
    assert scores.ids == [f"r{at}" for at in range(6)]
    assert scores.offset.tolist() == np.cumsum([0, 3, 14, 23, 16, 16, 13]).tolist()  # tokens - 1 of each
    assert scores.prompt_length.tolist() == [3, 9, 20, 5, 14, 7]
    for row in range(6):
        output, tokens = world.logits(world.instance, row)
        own = slice(scores.offset[row], scores.offset[row + 1])
        direct = torch.nn.functional.cross_entropy(output.logits[0, :-1], tokens[1:], reduction="none")
        assert scores.nll[own] == pytest.approx(direct.numpy(), abs=1e-4)
        assert scores.nll[own].mean() == pytest.approx(float(output.loss), abs=1e-4)


def test_kl_is_exact_over_the_whole_vocabulary(world):
    scores = TokenScores.load_from(world.root / "scores/W3")
    for row in range(6):
        log_p, log_q = (
            world.logits(folder, row)[0].logits[0, :-1].double().log_softmax(dim=-1)
            for folder in (world.reference, world.instance)
        )
        direct = (log_p.exp() * (log_p - log_q)).sum(dim=-1).numpy()
        own = slice(scores.offset[row], scores.offset[row + 1])
        assert scores.kl[own] == pytest.approx(direct, rel=1e-3, abs=1e-5)
    assert scores.kl.min() >= 0 and scores.kl.mean() > 0.01


def test_divergence_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL = 1/2 ln 2 + 1/2 ln(2/3) = 1/2 ln(4/3) = 0.14384
    log_p, log_q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergence(log_p, log_q) == pytest.approx([0.14384], abs=1e-5)


def test_divergence_survives_the_rounding_of_normalisers():
    # 50,000 logits around 30: a float32 normaliser is off by about 1e-6; the KL of near-equal models is 5e-7.
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(64, 50_000, generator=generator) + 30
    q = p + 1e-3 * torch.randn(64, 50_000, generator=generator)
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    got = divergence(p.log_softmax(-1), q.log_softmax(-1))
    assert got.double().numpy() == pytest.approx(exact.numpy(), abs=1e-8)


def test_the_reference_against_itself_has_no_damage(world, tmp_path):
    own = TokenScores.load_from(world.root / "scores/reference")
    assert own.kl is None
    again = world.score("W4", world.reference)
    assert np.array_equal(again.nll, own.nll)
    assert again.kl.max() <= 1e-6


@pytest.mark.parametrize("batch_tokens", [1, 24, 4096])
def test_batching_changes_nothing(world, tmp_path, batch_tokens):
    scores = tmp_path / "scores"
    world.score("reference", batch_tokens=batch_tokens, scores=scores)
    got = world.score("W3", world.instance, batch_tokens=batch_tokens, scores=scores)
    want = TokenScores.load_from(world.root / "scores/W3")
    assert got.nll == pytest.approx(want.nll, abs=1e-4)
    assert got.kl == pytest.approx(want.kl, abs=1e-4)
    routing, known = (PrefillRouting.load_from(s / "W3") for s in (scores, world.root / "scores"))
    assert np.array_equal(routing.index, known.index)
    assert routing.gate_prob == pytest.approx(known.gate_prob, abs=1e-4)


def test_the_first_response_token_counts_and_position_0_does_not(world):
    scores = TokenScores.load_from(world.root / "scores/W3")
    # r1: prompt of 9, response of 6, predictions 3..16. Prediction 3 + 8 is made from the last prompt token.
    assert scores.scored(1, "response") == slice(3 + 8, 17)
    assert scores.scored(1, "prompt") == slice(3 + 1, 3 + 8)
    output, tokens = world.logits(world.instance, 1)
    first = -output.logits[0, 8].log_softmax(dim=-1)[
        tokens[9]
    ]  # what the last prompt token says of the first
    assert scores.nll[scores.scored(1, "response")][0] == pytest.approx(float(first), abs=1e-4)


def test_routing_is_of_the_prompt_alone(world):
    routing = PrefillRouting.load_from(world.root / "scores/W3")
    assert routing.offset.tolist() == [0, 3, 12, 32, 37, 51, 58]
    assert routing.index.shape == (58, 2, 2) and routing.index.dtype == np.uint16
    assert routing.gate_prob.shape == routing.weight.shape == (58, 2, 2)
    assert routing.weight.sum(axis=-1) == pytest.approx(np.ones((58, 2)), abs=1e-5)  # norm_topk_prob
    assert (routing.gate_prob.sum(axis=-1) < 1 - 1e-4).any()  # before renormalisation
    assert routing.router_row_norm.shape == (2, 8)
    assert routing.router_row_norm.mean(axis=1) == pytest.approx([1, 1], abs=1e-6)
    rows = moe_layers(load_model(world.instance))[1].router_rows().detach().norm(dim=1)
    assert routing.router_row_norm[1] == pytest.approx((rows / rows.mean()).numpy(), abs=1e-6)


def test_metrics(world):
    scores = TokenScores.load_from(world.root / "scores/W3")
    reference = read_json(world.root / "metrics/reference.json")
    means = [TokenScores.load_from(world.root / "scores/reference").nll[scores.scored(r, "response")].mean()
             for r in range(6)]  # fmt: skip
    assert reference["nll_mean"] == pytest.approx(np.mean(means), rel=1e-4)
    assert reference["tokens"] == 1 + 6 + 4 + 12 + 3 + 7
    metrics = read_json(world.root / "metrics/W3.json")
    kl = [scores.kl[scores.scored(row, "response")].mean() for row in range(6)]
    assert metrics["all"]["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-4)
    assert metrics["fit"]["classes"]["x"]["requests"] == 2  # r0 and r4
    assert metrics["fit"]["classes"]["x"]["kl_mean"] == pytest.approx((kl[0] + kl[4]) / 2, rel=1e-4)
    assert -1 <= metrics["reliability"]["kl"] <= 1


def test_scoring_twice_gives_the_same_bytes(world, tmp_path):
    world.score("reference", scores=tmp_path)
    for name in (
        "scores.safetensors",
        "routing.safetensors",
        "hidden.safetensors",
        "ids.json",
        "scores.json",
    ):
        again, first = tmp_path / "reference" / name, world.root / "scores/reference" / name
        assert again.read_bytes() == first.read_bytes(), name


def test_bfloat16_runs_in_bfloat16(world, tmp_path):
    scores = world.score("reference", scores=tmp_path, dtype="bfloat16")
    full = TokenScores.load_from(world.root / "scores/reference")
    assert 1e-4 < np.abs(scores.nll - full.nll).max() < 1
    itself = world.score("W4", world.reference, scores=tmp_path, dtype="bfloat16")
    assert itself.kl.max() <= 1e-6
    with pytest.raises(InputError, match=r"computed in bfloat16, this instance in float32"):
        world.score("W3", world.instance, scores=tmp_path)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([(9, 3), (0, 3)], "'r1' has a prompt of 0 tokens"),
        ([(9, 3), (1, 3)], "'r1' has a prompt of 1 tokens"),
        ([(9, 3), (4, 0)], "'r1' has no response"),
        ([], "holds no request"),
    ],
)
def test_requests_that_cannot_be_scored_are_named(world, tmp_path, lengths, message):
    write_requests(tmp_path / "requests.parquet", lengths)
    with pytest.raises(InputError, match=message):
        world.score("reference", scores=tmp_path, requests=tmp_path / "requests.parquet")


def test_double_ids_and_foreign_tokens_are_named(world, tmp_path):
    path = tmp_path / "requests.parquet"
    write_requests(path, ids=["a", "b", "c", "b", "e", "f"])
    with pytest.raises(InputError, match="'b' stands there twice"):
        world.score("reference", scores=tmp_path, requests=path)
    frame = write_requests(path)
    frame.at[2, "prompt_ids"] = [5, VOCABULARY, 7]
    frame.to_parquet(path)
    with pytest.raises(InputError, match=f"'r2' has token ids outside 0..{VOCABULARY - 1}"):
        world.score("reference", scores=tmp_path, requests=path)
    with pytest.raises(InputError, match="run the stage prepare_requests"):
        world.score("reference", scores=tmp_path, requests=tmp_path / "none.parquet")


def test_scores_of_other_requests_or_another_head_are_refused(world, tmp_path):
    with pytest.raises(InputError, match="run the stage score_reference first"):
        world.score("W3", world.instance, scores=tmp_path)
    path = tmp_path / "requests.parquet"
    write_requests(path, ids=["r0", "r1", "r2", "r3", "r4", "other"])
    with pytest.raises(InputError, match="request 'other' has no score"):
        world.score("W3", world.instance, requests=path)
    write_requests(path, [(3, 1), (9, 6), (20, 4), (5, 12), (14, 3), (7, 8)])
    with pytest.raises(InputError, match="other token sequences"):
        world.score("W3", world.instance, requests=path)
    stranger = seeded_checkpoint(tmp_path / "stranger", family="qwen2_moe", seed=7)
    with pytest.raises(InputError, match="its lm_head is not the reference's"):
        world.score("W3", stranger)


def test_a_loss_that_is_no_number_names_the_request(world, tmp_path, monkeypatch):
    # Token 17's activations are no numbers, as after an overflow (weights that are none are refused at loading);
    # only r3 holds it in its prompt.
    frame = write_requests(tmp_path / "requests.parquet")
    for column in ("prompt_ids", "response_ids"):
        frame[column] = [[18 if token == 17 else token for token in ids] for ids in frame[column]]
    frame.at[3, "prompt_ids"] = [17, *frame.at[3, "prompt_ids"][1:]]
    frame.to_parquet(tmp_path / "requests.parquet")
    broken = seeded_checkpoint(tmp_path / "broken")  # qwen3_moe: embedding and lm_head are not tied

    def overflowing(*args, **options):
        model = load_model(*args, **options)
        model.get_input_embeddings().weight.data[17] = np.nan
        return model

    monkeypatch.setattr("tasks.score_requests.load_model", overflowing)
    with pytest.raises(InputError, match="loss of request 'r3' is not a finite number"):
        world.score("reference", broken, scores=tmp_path, requests=tmp_path / "requests.parquet")
    assert not (tmp_path / "reference").exists()


def test_the_temperature_is_undone(world, tmp_path):
    # gate_prob is the softmax of logits / router_temperature: another config value changes it alone.
    config = json.loads((world.reference / "config.json").read_text())
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in world.reference.iterdir():
        (flat / file.name).write_bytes(file.read_bytes())
    (flat / "config.json").write_text(json.dumps({**config, "router_temperature": 0.25}))
    world.score("reference", flat, scores=tmp_path)
    got = PrefillRouting.load_from(tmp_path / "reference")
    known = PrefillRouting.load_from(world.root / "scores/reference")
    assert np.array_equal(got.index, known.index)
    # p^4 over its sum raises the ratio of two selected probabilities to the fourth power
    ratio, flat_ratio = (r.gate_prob[..., 0] / r.gate_prob[..., 1] for r in (got, known))
    assert ratio == pytest.approx(flat_ratio**4, rel=1e-3)
