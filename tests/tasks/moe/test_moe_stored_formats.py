from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tasks.moe.headers import StoredTensor, read_header
from tasks.moe.stored_formats import FLOATING, UNKNOWN, Files, gptq_zero_codes, group_parts, storage
from tests import stored_checkpoints as made

WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def stored(
    tmp_path: Path, parts: made.Parts, shape: tuple[int, ...] | None = (64, 128), declared: int | None = None
):
    tensors = {f"m.experts.0.up{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "one.safetensors")
    groups = group_parts(read_header(tmp_path / "one.safetensors"))
    assert list(groups) == ["m.experts.0.up"]
    return storage(groups["m.experts.0.up"], shape, declared, Files(tmp_path))


# Store, format, bits, group size, bytes of scales and zero points in an expected matrix of 64 x 128.
FORMATS = {
    **{
        f"pack-quantized {bits}": (made.compressed("pack-quantized", bits), "pack-quantized", bits, 32, 64 * 4 * 2)
        for bits in (2, 3, 4, 8)
    },
    "packed by rows": (made.compressed("pack-quantized", 4, 0), "pack-quantized", 4, 0, 64 * 2),
    "packed asymmetric": (  # its zero points are packed along the rows: 64 / 8 words x 4 groups
        made.compressed("pack-quantized", 4, symmetric=False), "pack-quantized", 4, 32, 64 * 4 * 2 + 8 * 4 * 4,
    ),
    "int-quantized": (made.compressed("int-quantized", 8, 0), "int-quantized", 8, 0, 64 * 2),
    "naive-quantized": (made.compressed("naive-quantized", 8), "int-quantized", 8, 32, 64 * 4 * 2),
    "float-quantized": (made.compressed("float-quantized", 8, 0, kind="float"), "fp8", 8, 0, 64 * 2),
    "blocks of fp8": (made.block_fp8, "fp8", 8, None, 4),
    **{
        f"gptq {bits}": (made.gptq(bits, 32, 1), "gptq", bits, 32, 4 * 64 * (2 + bits / 8))
        for bits in (2, 3, 4, 8)
    },
    "awq": (made.awq, "awq", 4, 32, 4 * 64 * 2 + 4 * 8 * 4),
    "hqq": (made.hqq, "hqq", 4, 32, 2 * 256 * 2),
    "quanto 4": (made.quanto, "quanto", 4, 32, 2 * 256 * 2),
    "quanto 8": (made.quanto_int8, "quanto", 8, 0, 64 * 2),
    "nf4": (made.nf4, "bitsandbytes", 4, 64, 128 * 4),
    "bitsandbytes 8": (made.int8_bitsandbytes, "bitsandbytes", 8, 0, 64 * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_from_its_tensors(tmp_path: Path, name: str) -> None:
    store, form, bits, group, side = FORMATS[name]
    found = stored(tmp_path, store(WEIGHT))
    assert (found.format, found.bits, found.group_size, found.values, found.fault) == (
        form,
        bits,
        group,
        64 * 128,
        "",
    )
    assert found.quantized
    assert found.expected_bytes == 64 * 128 * bits / 8 + side
    assert found.stored_bytes >= found.expected_bytes


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "quanto 4"])
def test_a_format_is_told_without_the_model(tmp_path: Path, name: str) -> None:
    store, form, bits, group, _ = FORMATS[name]
    found = stored(tmp_path, store(WEIGHT), None)
    assert (found.format, found.bits, found.values) == (form, bits, 64 * 128)
    assert found.group_size in (group, None, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floating_point_is_not_quantized(tmp_path: Path, dtype: torch.dtype) -> None:
    for part in (".weight", ""):
        found = stored(tmp_path, {part: WEIGHT.to(dtype)})
        assert (found.format, found.bits, found.quantized) == (FLOATING, 8 * dtype.itemsize, False)
        assert found.stored_bytes == found.expected_bytes


def test_four_bits_in_bytes_take_twice_what_they_need(tmp_path: Path) -> None:
    found = stored(tmp_path, made.compressed("int-quantized", 4)(WEIGHT), declared=4)
    assert (found.format, found.bits) == ("int-quantized", 4)
    # 8192 codes in 8192 bytes where 4096 would do; 256 scales of 2 bytes
    assert (found.stored_bytes, found.expected_bytes) == (8192 + 512, 4096 + 512)


@pytest.mark.parametrize(
    "parts",
    [
        made.mlx(WEIGHT),
        {".weight": torch.zeros(64, 128, dtype=torch.int8)},  # codes without scales
        {".weight": torch.zeros(64, 16, dtype=torch.int32)},
        {".qweight": torch.zeros(16, 64, dtype=torch.int64)},
        {".weight_packed": torch.zeros(64, 15, dtype=torch.int32)},  # no width packs 128 codes into 15 words
        {".weight_scale": torch.ones(64, 1)},  # scales without codes
    ],
)
def test_what_fits_no_format_is_unknown(tmp_path: Path, parts: made.Parts) -> None:
    found = stored(tmp_path, parts)
    assert (found.format, found.bits, found.quantized) == (UNKNOWN, None, False)
    assert found.fault.startswith("not recognised: ")


def test_short_rows_that_several_widths_fit_need_a_declaration(tmp_path: Path) -> None:
    parts = made.compressed("pack-quantized", 3, 0)(WEIGHT[:, :8])  # 24, and 32 bits: one word either way
    assert stored(tmp_path, parts, (64, 8)).format == UNKNOWN
    assert stored(tmp_path, parts, (64, 8), declared=3).bits == 3


def test_a_part_that_is_absent_and_another_shape(tmp_path: Path) -> None:
    parts = made.compressed("pack-quantized", 4)(WEIGHT)
    assert "640 values, the model has 8192" in stored(tmp_path, made.nf4(WEIGHT[:5])).fault
    del parts[".weight_scale"]
    assert stored(tmp_path, parts).fault == "'weight_scale' is absent"
    assert stored(tmp_path, {".weight": WEIGHT.to(torch.float8_e4m3fn)}).fault == "'weight_scale' is absent"


def test_a_stack_of_mxfp4_blocks_and_of_fp8(tmp_path: Path) -> None:
    stack = torch.zeros(4, 128, 64)
    found = stored(tmp_path, made.mxfp4(stack), (4, 128, 64))
    assert (found.format, found.bits, found.group_size, found.values) == ("mxfp4", 4, 32, stack.numel())
    parts = {"": stack.to(torch.float8_e4m3fn), "_scale_inv": torch.ones(4, 1, 1)}
    assert (stored(tmp_path, parts, (4, 128, 64)).format, stored(tmp_path, parts, (4, 128, 64)).bits) == (
        "fp8",
        8,
    )


def test_words_that_modules_use_too_count_only_beside_codes() -> None:
    plain = StoredTensor("f", "F32", (2,), 0, 8)
    names = ("block.scales", "block.input_scale", "norm.scale", "mlp.experts_scale", "a.weight")
    assert set(group_parts(dict.fromkeys(names, plain))) == {"block.scales", "block.input_scale", "norm.scale",
                                                             "mlp.experts_scale", "a"}  # fmt: skip
    assert group_parts(dict.fromkeys(("a.qweight", "a.scales", "a.bias"), plain)).keys() == {"a", "a.bias"}


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [
        (torch.bfloat16, np.arange(2**16, dtype=np.uint16)),
        (torch.float16, np.arange(2**16, dtype=np.uint16)),
        (torch.float8_e4m3fn, np.arange(256, dtype=np.uint8)),
        (torch.float8_e5m2, np.arange(256, dtype=np.uint8)),
        (torch.float8_e8m0fnu, np.arange(256, dtype=np.uint8)),
        (torch.float32, np.float32([0, np.nan, np.inf, -np.inf, 1e38])),
        (torch.float64, np.float64([0, np.nan, np.inf, -np.inf, 1e300])),
        (torch.int32, np.int32([-1, 0, 7])),
    ],
)
def test_every_value_that_is_not_finite_is_counted(
    tmp_path: Path, dtype: torch.dtype, codes: np.ndarray
) -> None:
    tensor = torch.from_numpy(codes.copy()).view(dtype)
    save_file({"x": tensor}, tmp_path / "one.safetensors")
    header = read_header(tmp_path / "one.safetensors")["x"]
    expected = 0 if dtype == torch.int32 else int((~torch.isfinite(tensor.float())).sum())
    if dtype == torch.float64:
        expected = 3
    assert Files(tmp_path).not_finite(header) == expected
    assert dtype == torch.int32 or expected > 0
    pieces = list(Files(tmp_path).pieces(header, 16))
    assert np.concatenate(pieces).tobytes() == codes.tobytes()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_codes_of_gptq(tmp_path: Path, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 64), generator=torch.Generator().manual_seed(bits))
    save_file({"qzeros": made.bit_stream(codes, bits)}, tmp_path / "one.safetensors")
    found = gptq_zero_codes(read_header(tmp_path / "one.safetensors"), bits, Files(tmp_path))
    assert found.tolist() == codes.tolist()
    if bits == 4:  # 0x77777777, what every tool's v1 file holds
        assert made.bit_stream(torch.full((1, 8), 7), 4).tolist() == [[0x77777777]]
