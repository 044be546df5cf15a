import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.quant.pack import pack, packed_words, unpack


def test_three_bits_by_hand() -> None:
    # Code i of a row fills bits 3i..3i+2. Codes 7, 1, 5, 0..., with code 10 = 5 (101) at bits 30, 31 and 32:
    # word 0 = 7 + 1·8 + 5·64 + 1·2^30 (bit 0 of 5 at 30, bit 1 is 0) = 335 + 2^30; word 1 = bit 2 of 5 = 1
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, :3] = torch.tensor([7, 1, 5])
    codes[0, 10] = 5
    assert pack(codes, 3).tolist() == [[335 + 2**30, 1, 0]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 576, 40])
def test_the_words_are_the_librarys(bits: int, width: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (3, 16, width), generator=generator, dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (3, 16, packed_words(width, bits))
    for expert in range(3):
        signed = (codes[expert].to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        assert torch.equal(words[expert], pack_to_int32(signed, bits))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 100))
def test_unpack_undoes_pack(seed: int, bits: int, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, rows, width), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, width), codes)


def test_three_bits_are_dense() -> None:
    assert packed_words(32, 3) == 3 and packed_words(576, 3) == 54 and packed_words(33, 3) == 4
