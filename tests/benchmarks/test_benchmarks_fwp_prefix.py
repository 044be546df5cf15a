"""FWP of a prefix read off the whole text's pass is that of the prefix alone; the table by hand."""

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks import fwp_prefix
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model, load_tokenizer
from tasks.risk.online import Signals, read_signals
from tasks.risk.scoring import Requests, score
from tasks.sources.tokens import Tokens
from tests.seeded_models import seeded_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A reference and an instance that differ in their weights."""
    folder = tmp_path_factory.mktemp("prefix") / "artifacts"
    seeded_checkpoint(folder / "reference")
    for seed, name in ((1, "W3"), (2, "W4")):
        seeded_checkpoint(folder / "instances" / name, seed=seed)
    return folder


@pytest.mark.parametrize("align", ["token", "predictor"])
def test_a_prefix_is_as_the_text_cut_there(folders, align):
    generator = np.random.default_rng(0)
    sequences = [generator.integers(2, 300, 100).tolist() for _ in range(3)]
    requests = Requests(pd.DataFrame({"id": ["a", "b", "c"]}), sequences, np.full(3, 100))
    scores, routing, hidden = {}, None, None
    for name in ("reference", "instances/W4", "instances/W3"):
        model = load_model(folders / name)
        found = score(model, requests, name, 200, hidden)
        scores[name.rpartition("/")[2]] = found[0]
        if name.endswith("W4"):
            routing, scorer = found[1], model
        if name == "reference":
            hidden = found[2]
    phi = generator.uniform(0, 1, (3, 8))
    rows = fwp_prefix.prefix_rows(requests.ids, scores, routing, "W4", "W3", align, phi)
    assert [row["tokens"] for row in rows] == [100] * 3
    for length in (64, 100):
        cut = [own[:length] for own in sequences]
        alone = read_signals(
            scorer, cut, requests.ids, Signals(align, fragility={"W3": phi}), 200, "cut", False
        )
        columns = {"none (PPL)": "log_ppl", "measured": "log_fwp_measured_W3"}
        columns |= {name: f"log_fwp_{name}" for name in ("gate_prob", "router_row_norm")}
        for way, column in columns.items():
            found = [row["log_fwp"][way][str(length)] for row in rows]
            np.testing.assert_allclose(found, alone[column], rtol=1e-4, err_msg=way)
    for number, row in enumerate(rows):
        change = scores["W3"].nll - scores["reference"].nll
        own = change[
            scores["W3"].offset[number] + 1 : scores["W3"].offset[number + 1]
        ]  # of the tokens 2 .. 99
        assert row["dnll"] == pytest.approx(own.mean(), rel=1e-5)
        assert row["dnll_after"] == {"64": pytest.approx(own[62:].mean(), rel=1e-5)}  # of the tokens 64 .. 99
        assert row["kl"] > 0


def test_table_by_hand():
    # Four texts; the first tokens order them as the final FWP does but for one pair of neighbours: 1 - 6 * 2 / 60 = 0.8
    final, first, damage = [1.0, 2, 3, 4], [1.0, 2, 4, 3], [4.0, 3, 2, 1]
    rows = [
        {
            "text": str(n), "tokens": 128, "log_fwp": {"gate_prob": {"64": first[n], "128": final[n]}},
            "kl": damage[n], "dnll": final[n], "kl_after": {"64": damage[n]}, "dnll_after": {"64": final[n]},
        }
        for n in range(4)
    ]  # fmt: skip
    lines = fwp_prefix.report(rows, "W4", "W3", "packaged").splitlines()[6:]
    cells = [[cell.strip().split(" [")[0] for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["gate_prob", "64", "0.80", "-0.80", "0.80", "-0.80", "0.80"]
    assert cells[1] == ["gate_prob", "128", "1", "-1.00", "1.00", "–", "–"]


def test_texts_are_long_enough(folders):
    tokens = Tokens(load_tokenizer(folders / "reference"), bos=True, chat_template=False)
    names, sequences = fwp_prefix.long_texts("packaged", tokens, 5, 200)
    assert len(set(names)) == 5 and {len(own) for own in sequences} == {200}
    assert len({name.partition("/")[0] for name in names}) == 2  # code and documentation
    with pytest.raises(InputError, match="texts of 10000000 tokens, 5 are wanted"):
        fwp_prefix.long_texts("packaged", tokens, 5, 10_000_000)


def test_the_command(folders, tmp_path, monkeypatch):
    arguments = ["--artifacts", folders, "--texts", 3, "--tokens", 70, "--file", tmp_path / "a.jsonl"]
    monkeypatch.setattr("sys.argv", ["fwp_prefix", *map(str, arguments), "--report", str(tmp_path / "a.md")])
    fwp_prefix.main()
    assert len([json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]) == 3
    assert "| router_row_norm | 64 |" in (tmp_path / "a.md").read_text()
