"""optimum's GPTQ through `tasks.backends.optimum_gptq`, and each known fault of the libraries as they are.

Runs in the environment that `make test-gptq` sets up.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tasks.backends import gptq_library, optimum_gptq
from tasks.backends.gptq_matrices import audit_coverage, declared_formats, fused_experts, linear_matrices
from tasks.backends.optimum_gptq import Settings, load, plan, run
from tasks.contracts import InputError, read_json
from tests.seeded_models import FAMILIES, TEXT, VOCABULARY, seeded_checkpoint

ROOT = Path(__file__).parent.parent
SEQUENCES = [
    torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(6)
]
# Sizes that GPTQ can pack, where the family's own tiny ones are not divisible by 32.
LOW_RANK = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
DECODERS = sorted(FAMILIES.keys() & {
    "qwen2_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe"
})  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    optimum_gptq.require_packages()
    logging.disable(logging.WARNING)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Qwen3-MoE in bfloat16, as published models are: 2 layers, 8 experts of width 32, hidden 64."""
    folder = seeded_checkpoint(tmp_path_factory.mktemp("reference") / "float32", num_hidden_layers=2)
    tokenizer = optimum_gptq.AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder.parent / "bfloat16")
    tokenizer.save_pretrained(folder.parent / "bfloat16")
    return folder.parent / "bfloat16"


@pytest.fixture(scope="session")
def quantized(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, optimum_gptq.Result]:
    """The reference with everything quantized to 4 bits."""
    output = tmp_path_factory.mktemp("quantized") / "all"
    return output, run(reference, output, SEQUENCES, Settings(4, 32, "all"))


def plain_quantizer(reference: Path, dataset: Any, **options: Any) -> tuple[Any, Any]:
    """The library used as its documentation shows, nothing else."""
    from optimum.gptq import GPTQQuantizer

    model = AutoModelForCausalLM.from_pretrained(reference)
    quantizer = GPTQQuantizer(bits=4, dataset=dataset, group_size=32, **options)
    quantizer.quantize_model(model, optimum_gptq.AutoTokenizer.from_pretrained(reference))
    return quantizer, model


def logits(model: Any, ids: list[int] = SEQUENCES[0]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.float()


def examples() -> list[dict[str, torch.Tensor]]:
    tokens = [torch.tensor([ids]) for ids in SEQUENCES]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]


# --- what is quantized ------------------------------------------------------------------------------------------


def test_everything_asked_for_is_quantized(quantized):
    output, result = quantized
    # 2 layers x (q, k, v, o) and 2 layers x 8 experts x (gate, up, down)
    assert result.asked == result.quantized == {"dense": 8, "experts": 48}
    # An expert matrix holds 64 x 32 values. Attention: q, o [64, 64], k, v [32, 64]. Two bytes a value.
    assert result.reference_bytes == 2 * (48 * 64 * 32 + 2 * (2 * 64 * 64 + 2 * 32 * 64)) == 245_760
    # gate, up [32, 64]: 1024 of qweight, 2 groups x 32 x (0.5 of qzeros + 2 of scales), 4 x 64 of g_idx: 1440.
    # down [64, 32]: 1024 + 1 x 64 x 2.5 + 4 x 32 = 1312. q, o: 2048 + 2 x 64 x 2.5 + 256 = 2624; k, v: 1440.
    assert result.quantized_bytes == 16 * (2 * 1440 + 1312) + 2 * (2 * 2624 + 2 * 1440) == 83_328
    assert result.rounded == [] and result.sequential == "groups"
    assert read_json(output / "optimum_gptq.json")["quantized_bytes"] == result.quantized_bytes


def test_what_was_not_asked_for_is_as_in_the_reference(quantized, reference):
    before, after = load_file(reference / "model.safetensors"), load_file(quantized[0] / "model.safetensors")
    kept = after.keys() & before.keys()
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert len(before) == len(kept) + 56


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_reads_back_exactly_and_more_bits_are_nearer(bits, reference, tmp_path):
    result = run(reference, tmp_path / "out", SEQUENCES, Settings(bits, 32, "experts"))
    assert result.reload_difference == 0.0 and result.quantized == {"dense": 0, "experts": 48}
    exact = logits(AutoModelForCausalLM.from_pretrained(reference))
    error = float((logits(load(tmp_path / "out")) - exact).norm() / exact.norm())
    # Measured 1.06, 0.63, 0.30, 0.017: random weights, whose experts carry most of the logits.
    low, high = {2: (0.3, 2.0), 3: (0.2, 1.0), 4: (0.05, 0.6), 8: (0.001, 0.06)}[bits]
    assert low < error < high


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((family, "all") for family in DECODERS), ("qwen2_moe", "dense"), ("granitemoe", "dense")],
)
def test_families(family, targets, tmp_path):
    """Shared experts, dense layers, low-rank attention, biases, interleaved and transposed experts."""
    sizes = LOW_RANK if family.startswith("deepseek") else {}
    reference = seeded_checkpoint(tmp_path / "reference", family, num_hidden_layers=2, **sizes)
    result = run(reference, tmp_path / "out", SEQUENCES[:3], Settings(4, 32, targets))
    # Attention 2 x 4, or 2 x 5 with low-rank queries and keys; of a dense layer 0 and of shared experts 3 each.
    dense = {"qwen2_moe": 14, "deepseek_v2": 16, "deepseek_v3": 16}.get(family, 8)
    experts = 24 if dense > 8 else 48  # layer 0 is dense
    assert result.asked == result.quantized == {"dense": dense, "experts": experts if targets == "all" else 0}
    assert (
        result.reload_difference < 1e-5
    )  # logits of several units, in float32; tensors are equal bit for bit
    assert result.sequential == ("blocks" if dense > 8 else "groups")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    routers = ("gate.qweight", "router.qweight", "shared_expert_gate.qweight", "lm_head.qweight")
    assert not any(name.endswith(routers) for name in names)


def test_experts_without_tokens_are_named(reference, tmp_path):
    # 2 tokens pick 2 of 8 experts each: at least 4 experts in each of 2 layers see none, 3 matrices each.
    result = run(reference, tmp_path / "out", [SEQUENCES[0][:2]], Settings(4, 32, "experts"))
    assert 24 <= len(result.rounded) < 48
    assert read_json(tmp_path / "out" / "optimum_gptq.json")["rounded"] == result.rounded
    by_expert = {name.rsplit(".", 1)[0] for name in result.rounded}
    assert len(result.rounded) == 3 * len(by_expert)  # an expert sees tokens in all its matrices or in none


def test_equal_bytes_from_equal_inputs(quantized, reference, tmp_path):
    run(reference, tmp_path / "again", SEQUENCES, Settings(4, 32, "all"))
    for path in sorted(quantized[0].iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


# --- faults of the libraries, and what the wrapper makes of them ---------------------------------------------------


def test_fused_experts_are_skipped_in_silence_which_the_audit_reports(reference, tmp_path):
    quantizer, model = plain_quantizer(reference, TEXT.splitlines())
    quantizer.save(model, str(tmp_path / "plain"))
    skeleton = AutoModelForCausalLM.from_pretrained(reference)
    fused = fused_experts(skeleton)
    assert len(fused) == 4  # gate_up_proj and down_proj of 2 layers
    with pytest.raises(
        InputError, match=r"4 of 12 matrices .* not quantized: model\.layers\.0\.mlp\.experts\.down_proj"
    ):
        audit_coverage(tmp_path / "plain", linear_matrices(skeleton, "all"), 4, 32, fused)


def test_a_defuser_that_does_nothing_is_an_error_before_any_work(reference, tmp_path, monkeypatch):
    import defuser

    monkeypatch.setattr(defuser, "convert_model", lambda *_, **__: False)
    with pytest.raises(
        InputError, match=r"4 fused expert weights would stay in 16 bits.*gate_up_proj \[8, 64, 64\]"
    ):
        run(reference, tmp_path / "out", SEQUENCES, Settings(4, 32, "all"))


def test_a_defuser_that_changes_an_expert_is_an_error(reference, tmp_path, monkeypatch):
    defuse = gptq_library.defuse

    def faulty(model):
        defuse(model)
        for name, parameter in model.named_parameters():
            if name == "model.layers.1.mlp.experts.5.up_proj.weight":
                parameter.data.neg_()

    monkeypatch.setattr(gptq_library, "defuse", faulty)
    with pytest.raises(
        InputError, match=r"changed 1 of 8 experts of model\.layers\.1\.mlp\.experts .* first expert 5"
    ):
        run(reference, tmp_path / "out", SEQUENCES, Settings(4, 32, "experts"))


def test_save_writes_v1_tensors_under_a_v2_configuration(reference, quantized, tmp_path):
    quantizer, model = plain_quantizer(reference, TEXT.splitlines())
    quantizer.save(model, str(tmp_path / "plain"))
    assert declared_formats(tmp_path / "plain") == {"config.json": "gptq_v2", "quantize_config.json": "gptq"}
    dense = linear_matrices(AutoModelForCausalLM.from_pretrained(reference), "dense")
    with pytest.raises(InputError, match=r"qzeros are of the format gptq, but config\.json says gptq_v2"):
        audit_coverage(tmp_path / "plain", dense, 4, 32)
    assert declared_formats(quantized[0]) == {"config.json": "gptq", "quantize_config.json": "gptq"}


def test_save_fails_on_token_ids_and_keeps_texts(reference, quantized, tmp_path):
    quantizer, model = plain_quantizer(reference, examples())
    with pytest.raises(TypeError, match="not JSON serializable"):
        quantizer.save(model, str(tmp_path / "plain"))
    for file in ("config.json", "quantize_config.json"):  # token ids went into `quantized` too
        values = json.loads((quantized[0] / file).read_text())
        assert values.get("quantization_config", values)["dataset"] is None


def test_transformers_alone_reads_random_experts_and_load_does_not(quantized):
    loaded: Any = AutoModelForCausalLM.from_pretrained(quantized[0], dtype="auto", output_loading_info=True)
    assert {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)} <= loaded[1][
        "missing_keys"
    ]
    model = load(quantized[0])
    assert sum(type(module).__name__ == "TorchLinear" for module in model.modules()) == 56


def test_a_checkpoint_that_lost_a_tensor_does_not_load(quantized, tmp_path):
    shutil.copytree(quantized[0], tmp_path / "less")
    weights = load_file(tmp_path / "less" / "model.safetensors")
    weights["extra.weight"] = weights.pop("model.layers.1.mlp.experts.3.up_proj.scales")
    save_file(weights, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"1 missing \(model\.layers\.1\.mlp\.experts\.3\.up_proj\.scales\).*1 unexpected"
    ):
        load(tmp_path / "less")


def test_dense_alone_loads_in_transformers_without_us(reference, tmp_path):
    run(reference, tmp_path / "dense", SEQUENCES, Settings(4, 32, "dense"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype="auto", output_loading_info=True
    )
    model, info = loaded
    assert not any(info.values())
    expected = logits(load(tmp_path / "dense"))
    # transformers' choice of kernel on a CPU rounds otherwise: measured 0.066 of the norm of this random model's
    # logits, where tokens near a tie change experts
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.2


def test_the_default_kernel_overwrites_its_weights_when_it_runs(reference):
    """Why the wrapper names a kernel: with the library's choice, using the model before saving spoils what is saved."""
    _, model = plain_quantizer(reference, TEXT.splitlines())
    module = model.get_submodule("model.layers.0.self_attn.q_proj")
    before = module.qweight.clone()
    logits(model.eval())
    assert module.qweight.dtype != before.dtype or not torch.equal(module.qweight, before)


def test_sizes_not_divisible_by_32_end_before_any_work(tmp_path):
    reference = seeded_checkpoint(
        tmp_path / "reference", num_hidden_layers=2, moe_intermediate_size=48, head_dim=12
    )
    with pytest.raises(
        InputError, match=r"56 of 56 matrices .* divisible by 32.*q_proj \[48, 64\].* and 50 more"
    ):
        plan(reference, Settings(4, 16, "all"))
    with pytest.raises(InputError, match=r"48 of 48 matrices .*experts\.0\.down_proj \[64, 48\]"):
        run(reference, tmp_path / "out", SEQUENCES, Settings(4, 16, "experts"))
    assert not (tmp_path / "out").exists()


def test_group_sizes_that_would_fit_are_named(reference):
    with pytest.raises(
        InputError, match=r"group size 64 does not divide .* 16 of 56 .*sizes that would: 16, 32"
    ):
        plan(reference, Settings(4, 64, "all"))
    with pytest.raises(InputError, match=r"group size is 48, expected one of 16, 32"):
        plan(reference, Settings(4, 48, "all"))


def test_a_quantized_checkpoint_is_no_reference(quantized):
    with pytest.raises(InputError, match="quantized already"):
        plan(quantized[0], Settings(4, 32, "dense"))


def test_nothing_is_replaced_by_a_checkpoint_that_fails(reference, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("kept")
    exact = optimum_gptq.load

    def nudged(folder):
        model = exact(folder)
        model.get_submodule("lm_head").weight.data.mul_(1.01)
        return model

    monkeypatch.setattr(optimum_gptq, "load", nudged)
    with pytest.raises(
        InputError, match=r"1 of \d+ tensors are not as they were in memory, first lm_head\.weight"
    ):
        run(reference, tmp_path / "out", SEQUENCES, Settings(4, 32, "dense"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_reference_is_never_replaced(reference):
    for output in (reference, reference.parent):
        with pytest.raises(InputError, match="is, or holds, the reference"):
            run(reference, output, SEQUENCES, Settings(4, 32, "dense"))
    assert (reference / "model.safetensors").is_file()


def test_a_reference_without_tokenizer_ends_before_any_work(reference, tmp_path):
    shutil.copytree(reference, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match="bare: no tokenizer there"):
        run(tmp_path / "bare", tmp_path / "out", SEQUENCES, Settings(4, 32, "dense"))


def test_tokens_of_another_vocabulary_are_refused(reference, tmp_path):
    with pytest.raises(InputError, match=r"token ids from 0 to 352, expected 0 to 351"):
        run(reference, tmp_path / "out", [[0, 352]], Settings(4, 32, "dense"))


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_needs_no_compiler(reference, tmp_path):
    """From the command line, on text, with no program on the PATH: no g++ for a packer or a compiled kernel."""
    (tmp_path / "text.txt").write_text(TEXT.replace("\n", "\n\n"))
    command = [sys.executable, "-m", "tasks.backends.optimum_gptq", str(reference), str(tmp_path / "out")]
    options = [
        "--targets",
        "all",
        "--bits",
        "2",
        "--group-size",
        "32",
        "--calibration",
        str(tmp_path / "text.txt"),
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env={**environment, "PATH": str(tmp_path)}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "experts         48         48" in done.stdout
    assert "0 keys missing, 0 unexpected, logits differ by 0" in done.stdout
    assert f"next: python -m tasks.audit_checkpoint {tmp_path / 'out'}" in done.stdout
    assert "quantizing blocks: 2/2" in done.stderr


def test_workers_and_packing_are_set(reference):
    assert os.environ["GPTQMODEL_CPU_WORKERS"] == "1"
    assert os.environ["GPTQMODEL_DISABLE_PACK_EXT"] == "1"
