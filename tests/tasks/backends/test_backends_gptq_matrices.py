"""What a GPTQ run is asked for and what a checkpoint holds: all that needs no quantizing library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.backends import gptq_library, optimum_gptq
from tasks.backends.gptq_matrices import (
    Matrix,
    audit_coverage,
    check_defused,
    check_sizes,
    declared_formats,
    fused_experts,
    linear_matrices,
    zero_words,
)
from tasks.backends.optimum_gptq import Settings, read_sequences, run
from tasks.contracts import InputError, write_json
from tests.seeded_models import seeded_checkpoint

MATRIX = Matrix("model.layers.0.self_attn.q_proj", (64, 96))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Qwen2-MoE: layer 0 dense, layers 1 and 2 with 8 experts, a shared expert and its gate."""
    return AutoModelForCausalLM.from_pretrained(
        seeded_checkpoint(tmp_path_factory.mktemp("gptq") / "reference", "qwen2_moe")
    )


def written(
    folder: Path, matrix: Matrix = MATRIX, bits: int = 4, stored: str = "gptq", told: str = "gptq"
) -> Path:
    """A checkpoint of one quantized matrix in groups of 32, and a router."""
    tensors = {"model.layers.0.mlp.gate.weight": torch.ones(8, 96)}
    for suffix, (dtype, shape) in matrix.tensors(bits, 32).items():
        kind = torch.float16 if dtype == "F16" else torch.int32
        tensors[f"{matrix.name}.{suffix}"] = torch.ones(shape, dtype=kind)
    words = torch.tensor(zero_words(bits, stored), dtype=torch.int32)
    zeros = tensors[f"{matrix.name}.qzeros"]
    tensors[f"{matrix.name}.qzeros"] = words.repeat(zeros.numel() // bits).reshape(zeros.shape).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"quantization_config": {"format": told}})
    return folder


# --- what is asked for ----------------------------------------------------------------------------


def test_routers_gates_and_the_head_are_not_asked_for(model):
    dense = {matrix.name for matrix in linear_matrices(model, "dense")}
    # 3 layers x 4 of attention, 3 of the dense layer, 2 shared experts x 3
    assert len(dense) == 21 and linear_matrices(model, "experts") == []
    assert "model.layers.1.mlp.shared_expert.down_proj" in dense and "model.layers.0.mlp.up_proj" in dense
    assert not any("gate." in f"{name}." for name in dense) and "lm_head" not in dense
    assert isinstance(model.get_submodule("model.layers.1.mlp.shared_expert_gate"), nn.Linear)


def test_fused_experts_are_seen_and_must_become_linear_layers(model):
    fused = fused_experts(model)
    assert fused["model.layers.1.mlp.experts.gate_up_proj"] == (8, 64, 64)
    assert fused["model.layers.1.mlp.experts.down_proj"] == (8, 64, 32) and len(fused) == 4
    with pytest.raises(
        InputError, match=r"4 fused expert weights would stay in 16 bits.*layers\.1\.mlp\.experts\.down_proj"
    ):
        check_defused(fused, model)


def blocks_of(experts: list[nn.Module]) -> Any:
    """A model of one block whose experts are `experts`."""
    model: Any = nn.Module()
    model.base_model_prefix, model.config = "model", SimpleNamespace(is_encoder_decoder=False)
    model.model = nn.Module()
    layer = nn.Module()
    layer.experts = nn.ModuleList(experts)
    model.model.layers = nn.ModuleList([layer])
    object.__setattr__(model, "base_model", model.model)
    return model


def test_defusing_must_keep_every_value():
    fused = {"model.layers.0.experts.up_proj": (3, 2, 4)}
    check_defused(fused, blocks_of([nn.Linear(4, 2, bias=False) for _ in range(3)]))
    with pytest.raises(InputError, match="24 values in 1 fused weights, 16 in 2 linear"):
        check_defused(fused, blocks_of([nn.Linear(4, 2, bias=False) for _ in range(2)]))


def test_experts_that_are_neither_fused_nor_linear_are_seen():
    """Expert weights as a plain list of parameters, as LLaMA-MoE keeps them, would be passed over too."""
    toy = blocks_of([nn.Linear(4, 2, bias=False)])
    toy.model.layers[0].experts.weight_up = nn.ParameterList([torch.ones(2, 4), torch.ones(2, 4)])
    toy.model.layers[0].experts.up_bias = nn.Parameter(torch.ones(2, 2))  # biases stay as they are
    assert fused_experts(toy) == dict.fromkeys(
        (f"model.layers.0.experts.weight_up.{expert}" for expert in range(2)), (2, 4)
    )


def test_sizes_that_do_not_fit_are_listed_with_those_that_would():
    odd = [Matrix(f"m{number}", (48, 64)) for number in range(8)]
    with pytest.raises(InputError, match=r"8 of 9 matrices .* divisible by 32.*m0 \[48, 64\].*and 2 more"):
        check_sizes([*odd, MATRIX], 32)
    with pytest.raises(
        InputError, match=r"group size 64 does not divide .* 1 of 1 .*\[64, 96\]; sizes that would: 16, 32$"
    ):
        check_sizes([MATRIX], 64)
    with pytest.raises(InputError, match="group size is 7, expected one of 16"):
        check_sizes([MATRIX], 7)
    check_sizes([MATRIX], 32)


# --- what a checkpoint holds ----------------------------------------------------------------------


def test_zero_words_by_hand():
    assert zero_words(4, "gptq") == [0x77777777] * 4  # 8 - 1 in every nibble
    assert zero_words(4, "gptq_v2") == [0x88888888 - 2**32] * 4
    assert zero_words(2, "gptq") == [0x55555555] * 2 and zero_words(8, "gptq") == [0x7F7F7F7F] * 8
    # 3 bits: 32 times 011, least significant first: bits 0, 1, 3, 4, 6, 7, ... of 96 are set.
    words = [sum(1 << bit for bit in range(32) if (32 * word + bit) % 3 != 2) for word in range(3)]
    assert [word % 2**32 for word in zero_words(3, "gptq")] == words


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bytes_of_a_quantized_matrix(bits, tmp_path):
    # 64 x 96 values: packed, 3 groups x 64 zero points packed, 3 x 64 scales of 2 bytes, 96 indices of 4 bytes
    expected = 64 * 96 * bits // 8 + 3 * 64 * bits // 8 + 3 * 64 * 2 + 96 * 4
    assert audit_coverage(written(tmp_path / "out", bits=bits), [MATRIX], bits, 32) == expected


def test_what_was_left_out_is_named(tmp_path):
    folder = written(tmp_path / "out")
    other = Matrix("model.layers.0.self_attn.k_proj", (32, 96))
    fused = ["model.layers.0.mlp.experts.gate_up_proj"]
    left = r"layers\.0\.mlp\.experts\.gate_up_proj \(fused experts\), model\.layers\.0\.self_attn\.k_proj$"
    with pytest.raises(InputError, match=rf"2 of 3 matrices .* not quantized: model\.{left}"):
        audit_coverage(folder, [MATRIX, other], 4, 32, fused)
    with pytest.raises(InputError, match=r"1 matrices are quantized that were not asked for: .*q_proj"):
        audit_coverage(folder, [], 4, 32)


def test_another_width_or_group_size_is_named(tmp_path):
    folder = written(tmp_path / "out")
    with pytest.raises(InputError, match=r"q_proj\.qweight \(I32 \[12, 64\], expected I32 \[9, 64\]\)"):
        audit_coverage(folder, [MATRIX], 3, 32)
    with pytest.raises(InputError, match=r"q_proj\.scales \(F16 \[3, 64\], expected F16 \[6, 64\]\)"):
        audit_coverage(folder, [MATRIX], 4, 16)


@pytest.mark.parametrize(("stored", "told"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_that_the_configuration_reads_otherwise(stored, told, tmp_path):
    folder = written(tmp_path / "out", stored=stored, told=told)
    with pytest.raises(InputError, match=rf"format {stored}, but config\.json says {told}"):
        audit_coverage(folder, [MATRIX], 4, 32)


def test_every_configuration_file_counts(tmp_path):
    folder = written(tmp_path / "out")
    write_json(folder / "quantize_config.json", {"format": "gptq", "checkpoint_format": "gptq_v2"})
    assert declared_formats(folder) == {"config.json": "gptq", "quantize_config.json": "gptq_v2"}
    with pytest.raises(InputError, match=r"quantize_config\.json says gptq_v2"):
        audit_coverage(folder, [MATRIX], 4, 32)


def test_scales_that_are_not_finite(tmp_path):
    folder = written(tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MATRIX.name}.scales"][1, 2] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"q_proj\.scales holds NaN or infinity"):
        audit_coverage(folder, [MATRIX], 4, 32)


# --- without the extra ----------------------------------------------------------------------------


def test_without_the_extra_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gptq_library, "find_spec", lambda name: None if name in ("gptqmodel", "defuser") else name
    )
    with pytest.raises(
        InputError, match=r"needs gptqmodel, defuser: install the extra \[gptq\].*make setup-gptq"
    ):
        run(tmp_path, tmp_path / "out", [[1, 2, 3]], Settings())
    with pytest.raises(InputError, match="make setup-gptq"):
        optimum_gptq.load(tmp_path)


def test_calibration_from_token_ids_and_from_text(tmp_path):
    pd.DataFrame({"id": ["a", "b", "c"], "ids": [[1, 2, 3, 4, 5], [6], [7, 8, 9]]}).to_parquet(
        tmp_path / "ids.parquet"
    )
    # of 7 tokens at most in sequences of 4 at most: 4 of a, b is too short to predict from, then 3 are left
    assert read_sequences(tmp_path / "ids.parquet", list, 7, 4) == [[1, 2, 3, 4], [7, 8, 9]]
    assert read_sequences(tmp_path / "ids.parquet", list, 4, 4) == [[1, 2, 3, 4]]
    (tmp_path / "text.txt").write_text("two words\n\n\n\none\n\nthree more words\n")
    assert read_sequences(
        tmp_path / "text.txt", lambda text: [len(word) for word in text.split()], 99, 99
    ) == [
        [3, 5],
        [5, 4, 5],
    ]
    with pytest.raises(InputError, match="no such calibration file"):
        read_sequences(tmp_path / "none.txt", list, 9, 9)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(InputError, match="no calibration sequence"):
        read_sequences(tmp_path / "empty.txt", list, 9, 9)
