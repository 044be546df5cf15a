"""Files are replaced whole or not at all, JSON is reproducible, and arrays come back as they were saved."""

import numpy as np
import pytest

from tasks.contracts import (
    ExpertStatistics,
    LayerPlan,
    PrefillRouting,
    ReplicationPlan,
    TokenScores,
    read_json,
    replacing_file,
    replacing_folder,
    write_json,
)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), replacing_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_folder_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "out"
    with replacing_folder(folder) as temporary:
        (temporary / "a").write_text("old")
    with pytest.raises(RuntimeError), replacing_folder(folder) as temporary:
        (temporary / "a").write_text("half")
        raise RuntimeError
    assert (folder / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_killed_run_left_is_cleaned_up(tmp_path):
    (tmp_path / ".out.abc.tmp").mkdir()
    with replacing_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_json_is_sorted_rounded_and_finite(tmp_path):
    write_json(tmp_path / "a.json", {"b": np.float64(1 / 3), "a": np.array([1, 2]), "c": (np.int64(3), True)})
    assert (tmp_path / "a.json").read_text().split() == (
        ["{", '"a":', "[", "1,", "2", "],", '"b":', "0.333333,", '"c":', "[", "3,", "true", "]", "}"]
    )
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "a.json", {"a": float("nan")})


def test_scored_positions_of_a_request():
    # Two requests. The first has 4 prompt tokens and 2 response tokens: 5 predictions, of tokens 1..5. Prediction 0
    # (token 1 from position 0 alone) is never scored; predictions 1, 2 are of prompt tokens 2, 3; 3, 4 of the response.
    scores = TokenScores(["a", "b"], np.array([0, 5, 7]), np.array([4, 1]), np.zeros(7), None)
    assert scores.scored(0, "prompt") == slice(1, 3)
    assert scores.scored(0, "response") == slice(3, 5)
    # The second has one prompt token: its first response token is predicted from position 0 alone, so it is left out.
    assert scores.scored(1, "response") == slice(6, 7)
    with pytest.raises(ValueError, match="expected 'prompt' or 'response'"):
        scores.scored(0, "answer")


def test_scores_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="do not match"):
        TokenScores(["a"], np.array([0, 5]), np.array([4]), np.zeros(6), None)


def test_saved_arrays_come_back(tmp_path):
    rng = np.random.default_rng(0)
    scores = TokenScores(["a"], np.array([0, 3]), np.array([2]), rng.random(3), rng.random(3))
    scores.save(tmp_path)
    loaded = TokenScores.load_from(tmp_path)
    assert loaded.ids == ["a"]
    np.testing.assert_array_equal(loaded.kl, scores.kl)

    routing = PrefillRouting(
        np.array([0, 2]),
        np.ones((2, 1, 2), np.uint16),
        np.ones((2, 1, 2), np.float32),
        rng.random((2, 1, 2)),
        rng.random((1, 4)),
    )
    routing.save(tmp_path)
    np.testing.assert_array_equal(PrefillRouting.load_from(tmp_path).gate_prob, routing.gate_prob)

    statistics = ExpertStatistics(np.array([1]), np.array([[3, 4]]), rng.random((1, 2)), rng.random((1, 2)))
    statistics.save(tmp_path / "experts.safetensors")
    np.testing.assert_array_equal(ExpertStatistics.load_from(tmp_path / "experts.safetensors").load, [[3, 4]])

    plan = ReplicationPlan("hash", 64, "random", 0, [LayerPlan(1, [0, 1, 1], [0, 8, 8])])
    plan.save(tmp_path / "plan.json")
    assert ReplicationPlan.load_from(tmp_path / "plan.json") == plan
