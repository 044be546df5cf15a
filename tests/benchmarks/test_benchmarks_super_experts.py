from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import embedded_quantizers as embedded
from benchmarks import super_experts
from benchmarks.super_experts import (
    COUNTS,
    RANDOM,
    RANKINGS,
    WITH,
    Ranking,
    Setting,
    read,
    run,
    settings_of,
    table,
)
from tasks import quantize_instances
from tasks.contracts import InputError, read_json
from tasks.moe.checkpoint import load_model
from tasks.params import load_params
from tasks.risk.scoring import read_requests
from tests.conftest import ROOT
from tests.seeded_models import VOCABULARY, seeded_checkpoint

_PARAMS = load_params(ROOT / "params.yaml")
SECTION = _PARAMS.quantize_instances.model_copy(update={"method": "rtn", "group_size": 32})
PARAMS = _PARAMS.model_copy(update={"quantize_instances": SECTION})


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded reference with 2 x 8 experts, eight requests of two classes and calibration tokens."""
    root = tmp_path_factory.mktemp("super") / "artifacts"
    seeded_checkpoint(root / "reference", "qwen2_moe")
    random = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return random.integers(2, VOCABULARY, size=length).tolist()

    frame = pd.DataFrame(
        {
            "id": [f"r{row}" for row in range(8)],
            "class": ["a", "b"] * 4,
            "split": "holdout",
            "prompt": "",
            "response": "",
            "prompt_ids": [ids(5 + row) for row in range(8)],
            "response_ids": [ids(3 + row % 2) for row in range(8)],
        }
    )
    (root / "requests").mkdir()
    frame.to_parquet(root / "requests" / "requests.parquet")
    calibration = pd.DataFrame({"id": ["c0", "c1"], "ids": [ids(40), ids(25)]})
    calibration.to_parquet(root / "requests" / "calibration.parquet")
    return root


def test_the_comparison(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.jsonl"
    run([3], 4, 0, artifacts, out, PARAMS)
    rankings, results = read(out)
    assert [result.setting for result in results] == settings_of([3])
    by = {(result.ranking, result.protect): result for result in results}

    # As the stage protects them: the same experts, the same bytes, the same damage.
    protecting = SECTION.model_copy(update={"protect": 3})
    manifest = quantize_instances.run(
        artifacts / "reference", tmp_path / "W3", 3, protecting, artifacts / "requests"
    )
    own = by[WITH, 3]
    assert own.experts == [[row["layer"], row["expert"]] for row in manifest["protected"]]
    assert own.size_bytes == manifest["expert_bytes"]
    requests = embedded.chosen(read_requests(artifacts / "requests" / "requests.parquet", VOCABULARY), 4)
    tokens = PARAMS.runtime.batch_tokens
    reference = embedded.losses(load_model(artifacts / "reference"), requests, tokens, "reference", None)
    losses = embedded.losses(load_model(tmp_path / "W3"), requests, tokens, "W3", reference)
    means = embedded.request_means(requests, reference, losses)
    np.testing.assert_allclose(own.dnll, means["dnll"], atol=1e-7)
    np.testing.assert_allclose(own.kl, means["kl"], atol=1e-7)
    assert read_json(tmp_path / "W3" / "manifest.json")["protect"] == 3

    assert by["", 0].experts == [] and by["", 0].size_bytes < own.size_bytes
    assert [len(by[ranking, count].experts) for ranking in RANKINGS for count in COUNTS] == [*COUNTS] * 3
    assert by[RANDOM, 3].experts == by[RANDOM, 10].experts[:3]  # the same order for every count
    for name in RANKINGS:  # every expert is as it was once more before the next setting
        assert np.mean(by[name, 10].kl) < np.mean(by["", 0].kl)

    text = table(rankings, results, "rtn")
    assert text.count("\n| W3 |") == 10 and f"| W3 | 3 | {WITH} | {own.size_bytes / 2**20:.2f} |" in text
    top = np.unravel_index(np.argmax(rankings[3].every), (2, 8))
    assert f"| 1 | {top[0] + 1} | {top[1]} |" in text  # layer 0 is dense

    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while the last line was written
    monkeypatch.setattr(super_experts, "output_errors", lambda *_: pytest.fail("ranked again"))
    run([3], 4, 0, artifacts, out, PARAMS)
    assert out.read_text() == "".join(lines)
    with pytest.raises(InputError, match="holds results of another model, other requests or settings"):
        run([3], 2, 0, artifacts, out, PARAMS)


def test_orders() -> None:
    ranking = Ranking(4, [1, 3], [[1.0, 9.0], [4.0, 9.0]], [[1.0, 0.0], [4.0, 3.0]])
    assert ranking.order(WITH, 0) == [(0, 1), (1, 1), (1, 0), (0, 0)]
    assert ranking.order("output error without position 0", 0)[0] == (1, 0)
    assert sorted(ranking.order(RANDOM, 0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {tuple(ranking.order(RANDOM, seed)) for seed in range(9)} != {tuple(ranking.order(RANDOM, 0))}
    assert settings_of([2])[:2] == [Setting(2, 0, ""), Setting(2, 1, WITH)]
