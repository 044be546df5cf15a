import re
import shutil
from pathlib import Path

import pytest
import typer
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from tasks import audit_checkpoint
from tasks.audit_checkpoint import layer_ranges, next_step, report, run
from tasks.contracts import read_json
from tasks.moe.audit import Audit
from tests import stored_checkpoints as made

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
ATTENTION = r"self_attn\.[qkvo]_proj$"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.half(tmp_path_factory.mktemp("audit") / "reference")


def text(result: Audit, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    report(result, "somewhere", console)
    return console.export_text()


def test_a_plain_reference_has_nothing_quantized(reference: Path, tmp_path: Path) -> None:
    result = run(reference, json_file=tmp_path / "audit.json")
    assert result.exit_status == 1
    # 3 layers of 8 experts with 3 matrices each
    assert result.problems() == [
        "72 of 72 matrices that should be quantized are in 16 bits: model.layers.0.mlp.experts.0.down_proj and 71 more"
    ]
    kinds = ("routed experts", "attention", "routers", "embeddings", "norms and biases")
    assert made.formats_found(result) == {kind: {("floating point", 16)} for kind in kinds}
    assert "nothing here is quantized" in next_step(result, "x")
    values = read_json(tmp_path / "audit.json")
    assert values["exit_status"] == 1 and not values["missing"] and not values["unexpected"]
    assert {tensor["name"] for tensor in values["tensors"]} == {
        name.removesuffix(".weight") for name in load_file(reference / "model.safetensors")
    }
    own = next(tensor for tensor in values["tensors"] if tensor["name"] == EXPERT)
    assert own == {
        "name": EXPERT, "kind": "routed experts", "layer": "model.layers.1", "shape": [32, 64], "matrices": 1,
        "quantized": False, "should_be_quantized": True, "format": "floating point", "bits": 16, "values": 2048,
        "stored_bytes": 4096, "expected_bytes": 4096.0, "not_finite": 0,
    }  # fmt: skip


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_our_instances_are_clean(reference: Path, tmp_path: Path, bits: int, symmetric: bool) -> None:
    result = run(made.instance(reference, tmp_path / "W", bits, symmetric), reference)
    assert (result.problems(), result.exit_status) == ([], 0)
    assert result.verdict == f"clean: all 72 matrices that should be quantized are, at {bits} bits"
    experts = [found for found in result.findings if found.kind == "routed experts"]
    assert {found.storage.group_size for found in experts if found.shape == (32, 64)} == {32}
    # Only `weight_shape`, two integers of 8 bytes, is beyond the expectation.
    assert {found.storage.stored_bytes - found.storage.expected_bytes for found in experts} == {16}
    assert all(found.same for found in result.findings if found.kind != "routed experts")
    assert "symmetric" in result.declared and f"{bits} bits" in result.declared


def test_a_tool_that_passed_over_the_experts(reference: Path, tmp_path: Path) -> None:
    """Attention in GPTQ, experts in 16 bits: what a quantizer that looks for Linear modules leaves."""
    declared = {"quant_method": "gptq", "bits": 4, "sym": True, "format": "gptq"}
    folder = made.rewrite(reference, tmp_path / "skipped", made.gptq(4, 32, 7), ATTENTION, **declared)
    result = run(folder, reference)
    assert result.exit_status == 1
    assert made.formats_found(result)["attention"] == {("gptq", 4)}
    assert result.verdict.startswith(
        "NOT AS IT SHOULD BE: 72 of 72 matrices that should be quantized are in 16 bits"
    )
    assert "passed over the experts" in next_step(result, str(folder))
    shown = text(result)
    assert "! not quantized" in shown and "gptq, 4 bits" in shown and "as in the reference" in shown


def test_what_is_not_recognised_is_unknown(reference: Path, tmp_path: Path) -> None:
    result = run(made.rewrite(reference, tmp_path / "made", made.mlx))
    assert made.formats_found(result)["routed experts"] == {("unknown", None)}
    assert result.exit_status == 1
    assert result.problems()[0].startswith("72 tensors are not stored as they should be: ")
    assert "not recognised: biases BF16, scales BF16, weight U32" in result.problems()[0]
    assert "! not recognised" in text(result)


def test_a_quantized_router_is_a_problem(reference: Path, tmp_path: Path) -> None:
    store = made.compressed("int-quantized", 8)
    folder = made.rewrite(reference, tmp_path / "made", store, r"experts\.\d+\.\w+$|mlp\.gate$|embed_tokens$")
    result = run(folder)
    assert len(result.problems()) == 1
    assert "4 tensors that must stay as they were were changed: model.embed_tokens" in result.problems()[0]
    assert "! quantized, should be kept" in text(result)


def test_other_bits_than_declared_and_bytes_beyond_them(reference: Path, tmp_path: Path) -> None:
    declared = {"quant_method": "gptq", "bits": 3}
    wrong = made.rewrite(reference, tmp_path / "wrong", made.gptq(4, 32, 7), **declared)
    assert "(4 bits where 3 are declared)" in run(wrong).problems()[0]
    groups = {"all": {"weights": {"num_bits": 4}}}
    wide = made.rewrite(
        reference,
        tmp_path / "wide",
        made.compressed("int-quantized", 4),
        quant_method="x",
        config_groups=groups,
    )
    shown = text(run(wide))
    row = next(line for line in shown.splitlines() if "int-quantized" in line)
    # 4-bit codes in whole bytes: (2048 + 128) / (1024 + 128) bytes = 1.889 for gate, up and down alike
    assert "1.889" in row


def test_layers_in_short() -> None:
    names = [f"model.layers.{number}" for number in (0, 1, 2, 5, 7, 8)]
    assert layer_ranges(["", *names]) == "0-2,5,7-8"
    assert layer_ranges(["encoder.block.1", "decoder.block.3", "decoder.block.1"]) == "decoder 1,3; encoder 1"
    assert layer_ranges([""]) == "–"


def test_exit_statuses(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(path: Path, **options: str) -> tuple[int, str, str]:
        with pytest.raises(typer.Exit) as ended:
            audit_checkpoint.main(str(path), **options)
        return ended.value.exit_code, *capsys.readouterr()

    clean = made.instance(reference, tmp_path / "W3", 3)
    status, out, _ = command(clean, reference=str(reference), json=str(tmp_path / "a.json"))
    assert status == 0 and "verdict: clean: all 72 matrices" in out and "next: nothing" in out
    assert read_json(tmp_path / "a.json")["version"] == audit_checkpoint.VERSION
    status, out, _ = command(reference)
    assert status == 1 and "verdict: NOT AS IT SHOULD BE" in out and "next: nothing here is quantized" in out
    with pytest.raises(typer.BadParameter, match="expected 'experts' or 'all'"):
        audit_checkpoint.main(str(reference), expect="some")


@pytest.mark.parametrize("fault", ["truncated", "absent", "pickle", "configuration", "folder"])
def test_what_cannot_be_read(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    folder, file = tmp_path / "broken", tmp_path / "broken" / "model.safetensors"
    shutil.copytree(reference, folder)
    match fault:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-9])
        case "absent":
            file.unlink()
        case "pickle":
            file.rename(folder / "pytorch_model.bin")
        case "configuration":
            (folder / "config.json").write_text("{")
        case "folder":
            folder = tmp_path / "nowhere"
    with pytest.raises(typer.Exit) as ended:
        audit_checkpoint.main(str(folder))
    error = capsys.readouterr().err
    assert ended.value.exit_code == 2 and "cannot be read: " in error
    said = {"truncated": "model.safetensors: .*truncated", "absent": "no weights", "pickle": "save_pretrained",
            "configuration": "config.json: not valid JSON", "folder": "no such folder"}  # fmt: skip
    assert re.search(said[fault], error)


def test_as_a_command(reference: Path) -> None:
    app = typer.Typer()
    app.command()(audit_checkpoint.main)
    done = CliRunner().invoke(app, [str(reference), "--expect", "all"])
    assert done.exit_code == 1 and "84 of 84 matrices" in done.stdout
    assert CliRunner().invoke(app, [str(reference), "--expect", "some"]).exit_code == 2
