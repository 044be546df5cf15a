"""The quantizer benchmark's arithmetic, its data, and a run of it without peers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.peers.process import Peer, PeerError, write_problem
from benchmarks.quantizer_data import QUICK, Problem, layer_problems, synthetic
from benchmarks.quantizer_report import (
    OURS,
    Claim,
    Row,
    claims,
    error_table,
    output_energy,
    output_error,
    report,
    speed_table,
    table,
    weight_error,
)
from benchmarks.quantizers import OURSELVES, PEERS, SPEED_RUNS, Bench, chosen_peers, main
from tasks.contracts import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_output_error_by_hand() -> None:
    # Expert 0: W = (3, 4), Ŵ = (3, 2), x = (1, 2): output 3 + 8 = 11, error 2 · 2 = 4 -> 16 of 121.
    # Expert 1: W = (1, 0), Ŵ = (0, 0), two tokens (1, 5) and (2, 7): outputs 1 and 2, all of it lost -> 5 of 5.
    weights = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    quantized = torch.tensor([[[3.0, 2.0]], [[0.0, 0.0]]])
    inputs = [torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 5.0], [2.0, 7.0]])]
    assert output_error(weights, quantized, inputs, output_energy(weights, inputs)) == pytest.approx(21 / 126)
    assert output_energy(weights, inputs) == 121 + 5
    assert output_error(weights, weights, inputs, 126) == 0


def test_an_expert_without_held_out_tokens_does_not_count() -> None:
    weights = torch.tensor([[[2.0]], [[1.0]]])
    quantized = torch.tensor([[[1.0]], [[9.0]]])
    inputs = [torch.ones(3, 1), torch.empty(0, 1)]
    assert output_error(weights, quantized, inputs, output_energy(weights, inputs)) == pytest.approx(3 / 12)


def test_weight_error_by_hand() -> None:
    # (0 + 4 + 1 + 0) of (9 + 16 + 1 + 0)
    weights = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    quantized = torch.tensor([[[3.0, 2.0]], [[0.0, 0.0]]])
    assert weight_error(weights, quantized) == pytest.approx(5 / 26)


def row(tool: str, setting: str, output: float, weight: float = 1.0, **changes: object) -> Row:
    made = Row("layer", tool, setting, 2, False, output, weight, 6_000_000, 2.0, 2.0)
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def test_claims_compare_like_with_like() -> None:
    rows = [
        row(OURS, "gptq", 0.06),
        row(OURS, "gptq", 9.0, symmetric=True),  # no peer in this form: no claim
        row(OURS, "hqq", 0.2, 0.1005),
        row(OURS, "clip_search", 0.2, 0.11),
        row("llmcompressor", "default", 0.1),
        row("llmcompressor", "tuned", 0.05),
        row("hqq", "default", 0.12, 0.1),
        row("hqq", "16-bit scales", 0.12, 0.1),
        row("hqq", "default", 0.01, num_bits=3),
    ]
    found = {claim.text: claim for claim in claims(rows, [])}
    expected = {
        "layer, W2 asym: output error of gptq over the best peer's (llmcompressor tuned)": (
            0.06 / 0.05,
            False,
        ),
        "layer, W2 asym: output error of gptq over llmcompressor's at min-max": (0.6, True),
        "layer, W2 asym: output error of gptq over the hqq library's": (0.5, False),  # limit 0.45
        "layer, W2 asym: weight error of hqq over the hqq library's with 16-bit scales": (1.005, True),
        "layer, W2 asym: weight error of clip_search over the hqq library's": (1.1, False),
    }
    assert {text: (claim.value, claim.holds) for text, claim in found.items()} == {
        text: (pytest.approx(value), holds) for text, (value, holds) in expected.items()
    }


def test_speed_claims_divide_speeds() -> None:
    # 6 million parameters: ours in 1 s, the peer's in 1.2 s as it treats experts; hqq in 0.5 s against 2 s.
    # What the peer would take with gate and up joined is shown, and no claim.
    timings = [
        row(OURS, "gptq", 1.0, cpu_s=1.0),
        row("llmcompressor", "min-max", 1.0, cpu_s=1.2),
        row("llmcompressor", "min-max, gate and up joined", 1.0, cpu_s=0.9),
        row(OURS, "hqq", 1.0, cpu_s=0.5),
        row("hqq", "default", 1.0, cpu_s=2.0),
    ]
    assert timings[3].speed == 12
    found = [(round(claim.value, 9), claim.limit, claim.holds) for claim in claims([], timings)]
    assert found == [(1.2, 1.3, False), (4.0, 5, False)]


def test_a_claim_says_which_way_it_goes() -> None:
    assert Claim("error", 0.75, 0.75).line() == "PASS  error: 0.750 (≤ 0.75)"
    assert Claim("speed", 1.2, 1.3, at_least=True).line() == "FAIL  speed: 1.200 (≥ 1.3)"


def test_tables() -> None:
    rows = [
        row(OURS, "gptq", 0.06),
        row("hqq", "default", 0.1234, num_bits=3),
        row(OURS, "gptq", 0.2, num_bits=3),
    ]
    assert error_table(rows, "output_error").splitlines() == [
        "|  | W2 | W3 |",
        "| --- | --: | --: |",
        f"| {OURS} gptq | **0.06** | 0.2 |",
        "| hqq default |  | **0.123** |",
    ]
    assert table(["a", "b"], [["c", "d"]]).splitlines() == ["| a | b |", "| --- | --: |", "| c | d |"]
    lines = speed_table([row("slow", "", 1.0, cpu_s=4.0), row("quick", "", 1.0)]).splitlines()
    assert lines[2].startswith("| W2 asym, quick  | 3.00 | 2.00 | 2.00 |")
    assert "slow  (more than one thread)" in lines[3]  # 4 s of CPU in 2 s


def test_the_report_shows_losses_and_tuning() -> None:
    rows = [row(OURS, "gptq", 0.06), row("llmcompressor", "tuned", 0.05, options='{"damping": 0.1}')]
    checked = claims(rows, [])
    text = report(rows, rows, checked, {"llmcompressor": {"llmcompressor": "0.1"}}, "a machine", 64)
    assert "0 of 1 hold" in text and "| FAIL | layer, W2 asym: output error" in text
    assert "| layer, W2 asym, llmcompressor | damping: 0.1 |" in text


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return synthetic("synthetic", QUICK)


def test_a_layer_s_problems(problems: list[Problem]) -> None:
    first, second = problems
    assert (first.matrix, second.matrix) == ("gate_up", "down")
    assert first.weights.shape == (4, 128, 128) and second.weights.shape == (4, 128, 64)
    assert int(first.tokens.sum()) == QUICK.top_k * QUICK.calibration_tokens
    assert first.tokens[0] > 8 * first.tokens[-1], "routing is skewed"
    again = synthetic("synthetic", QUICK)
    assert all(
        torch.equal(a.own, b.own) and torch.equal(a.weights, b.weights)
        for a, b in zip(problems, again, strict=True)
    )


def test_statistics_are_those_of_the_routed_tokens() -> None:
    # Two experts, hidden 2, width 1; tokens (1, 0) -> 0, (0, 2) -> 1, (1, 1) -> both.
    gate, up = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]])
    down = torch.ones(2, 2, 1)
    hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    index = torch.tensor([[0, 0], [1, 1], [0, 1]])
    held_out = (torch.tensor([[4.0, 0.0]]), torch.tensor([[1, 1]]))
    first, second = layer_problems("layer", "", gate, up, down, (hidden, index), held_out)
    assert first.tokens.tolist() == [2, 2]
    assert first.own[0].tolist() == [[2.0, 1.0], [1.0, 1.0]]  # (1,0) and (1,1)
    assert first.own[1].tolist() == [[1.0, 1.0], [1.0, 5.0]]  # (0,2) and (1,1)
    assert first.everyone[0].tolist() == first.everyone[1].tolist() == [[2.0, 1.0], [1.0, 5.0]]
    silu = torch.nn.functional.silu(torch.tensor(1.0))
    assert second.own[0].item() == pytest.approx(
        float(2 * (2 * silu) ** 2)
    )  # tokens 0 and 2 both have gate 1, up 2
    assert [len(inputs) for inputs in first.held_out] == [0, 1]


def test_coordinate_search_keeps_what_helps() -> None:
    errors = {(0, 0): 4.0, (1, 0): 3.0, (2, 0): 5.0, (1, 1): 2.0}

    runs: list[tuple[int, int]] = []

    class Counted(Bench):
        def run(self, problems, tool, method, bits, symmetric, options) -> Row:
            place = options["a"], options["b"]
            runs.append(place)
            return row(tool, "", errors[place])

    bench = Counted({}, Path())
    layer = synthetic("synthetic", QUICK)
    axes = ([{"a": 1}, {"a": 2}], [{"b": 1}])
    best, options = bench.tuned(layer, "llmcompressor", 2, True, {"a": 0, "b": 0}, axes)
    assert best.output_error == 2.0 and options == {"a": 1, "b": 1}
    bench.tuned(layer, "llmcompressor", 2, True, {"a": 0, "b": 0}, axes)
    assert runs == [(0, 0), (1, 0), (2, 0), (1, 1)], "no setting runs twice"


def test_peers_that_cannot_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quantizers.ROOT", tmp_path)
    assert chosen_peers("none") == []
    with pytest.raises(InputError, match="names 'quanto'"):
        chosen_peers("quanto")
    with pytest.raises(InputError, match=r"pip install -r benchmarks/requirements-gptqmodel\.txt"):
        chosen_peers("gptqmodel")


def test_settings_name_known_tools() -> None:
    for tool in [*PEERS.values(), OURSELVES]:
        assert (ROOT / "benchmarks/peers" / f"{tool.module}.py").is_file()
    for tool, _, _, _, options in SPEED_RUNS:
        assert tool == OURS or set(options) == set(PEERS[tool].default)
    for name in ("peers", "gptqmodel"):
        pins = (ROOT / f"benchmarks/requirements-{name}.txt").read_text().splitlines()
        assert all("==" in pin for pin in pins if not pin.startswith("#"))


def test_a_quick_run_without_peers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        main(peers="none", quick=True, output=tmp_path / "report.md")
    finally:
        torch.set_num_threads(threads)
    text = (tmp_path / "report.md").read_text()
    assert "Peers: none" in text and f"| {OURS} gptq | **" in text, "ours is best of its own methods"
    assert "speed" in capfd.readouterr().err


def test_a_peer_that_fails_says_why(tmp_path: Path, problems: list[Problem]) -> None:
    write_problem(problems[0], tmp_path / "problem.safetensors")
    with Peer("expertpool", Path(sys.executable), tmp_path) as peer:
        assert "torch" in peer.ready()
        with pytest.raises(PeerError, match=r"gptq at 3 bits: InputError: group_size 48 does not divide"):
            peer.quantize(tmp_path / "problem.safetensors", "gptq", 3, 48, True, {})
    with (
        Peer("nobody", Path(sys.executable), tmp_path) as peer,
        pytest.raises(PeerError, match="No module named"),
    ):
        peer.ready()
