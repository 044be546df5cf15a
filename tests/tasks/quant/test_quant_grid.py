import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.quant.grid import Grid, min_max, quantize_groups, scale_dtype
from tasks.quant.rtn import quantize_rtn


def test_asymmetric_grid_by_hand() -> None:
    # min −1, max 2, 2 bits: scale (2 − −1)/3 = 1, zero point 1; codes round(w + 1): 0, 1, 1.5 -> 2 (even), 3
    weights = torch.tensor([[[-1.0, 0.0, 0.5, 2.0]]])
    result = quantize_rtn(weights, Grid(2, 4, symmetric=False))
    assert result.codes.tolist() == [[[0, 1, 2, 3]]]
    assert result.scale.tolist() == [[[1.0]]]
    assert result.zero_point is not None and result.zero_point.tolist() == [[[1.0]]]
    assert result.dequantize().tolist() == [[[-1.0, 0.0, 1.0, 2.0]]]  # (code − 1) · 1


def test_symmetric_grid_by_hand() -> None:
    # largest magnitude 3, 2 bits: scale 3 / 1.5 = 2, codes round(w / 2) + 2 in 0..3, weights (code − 2) · 2
    weights = torch.tensor([[[-3.0, 0.9, 1.2, 3.0]]])
    result = quantize_rtn(weights, Grid(2, 4, symmetric=True))
    assert result.zero_point is None
    assert result.codes.tolist() == [
        [[0, 2, 3, 3]]
    ]  # −1.5 -> −2 (even), 0.45 -> 0, 0.6 -> 1, 1.5 -> 2, cut to 1
    assert result.dequantize().tolist() == [[[-4.0, 0.0, 2.0, 2.0]]]


def test_one_group_per_row() -> None:
    result = quantize_rtn(torch.randn(2, 3, 10), Grid(4, 0, symmetric=False))
    assert result.scale.shape == (2, 3, 1)


def test_group_size_that_does_not_divide() -> None:
    with pytest.raises(InputError) as caught:
        quantize_rtn(torch.randn(1, 2, 48), Grid(4, 64, symmetric=True), "layers.1.experts.0.down_proj")
    message = str(caught.value)
    assert "layers.1.experts.0.down_proj" in message and "48" in message and "64" in message
    assert "8, 12, 16, 24, 48" in message  # the divisors of 48 from 8 up


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    weights = torch.randn(1, 2, 8)
    weights[0, 1, 3] = value
    with pytest.raises(InputError, match=r"up_proj holds NaN or infinite"):
        quantize_rtn(weights, Grid(4, 8, symmetric=False), "up_proj")


def test_weights_beyond_16_bits() -> None:
    with pytest.raises(InputError, match="16 bits"):
        quantize_rtn(torch.full((1, 1, 8), 1e7), Grid(2, 8, symmetric=True))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_constant_groups(value: float, symmetric: bool) -> None:
    weights = torch.full((1, 1, 8), value)
    back = quantize_rtn(weights, Grid(4, 8, symmetric)).dequantize()
    # half a step of 0.5 / 7.5, and float16's rounding
    assert (back - weights).abs().max() <= abs(value) / 15 + 1e-3 * abs(value)


def test_scales_keep_the_weights_16_bit_type() -> None:
    assert scale_dtype(torch.bfloat16) == torch.bfloat16
    assert scale_dtype(torch.float32) == scale_dtype(torch.float16) == torch.float16
    result = quantize_rtn(torch.randn(1, 4, 8).bfloat16(), Grid(4, 8, symmetric=True))
    assert result.scale.dtype == torch.bfloat16
    back = result.dequantize()
    assert torch.equal(back, back.bfloat16().float())  # dequantized weights are values of that type


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_half_a_step(seed: int, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    weights = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    grid = Grid(bits, 16, symmetric)
    result = quantize_rtn(weights, grid)
    error = (result.dequantize() - weights.float()).abs().view(2, 4, 2, 16)
    step = result.scale.float().unsqueeze(-1)
    # An asymmetric zero point is rounded to a code, so an end of the range may lie half a step outside; the
    # symmetric grid cuts half a step off. 16-bit rounding of scale and weight adds up to 2^-8 of the range.
    largest = weights.float().abs().view(2, 4, 2, 16).amax(-1, keepdim=True)
    assert (error <= 0.5 * step + (grid.top * step + largest) * 2.0**-8).all()


def test_codes_are_chosen_with_the_stored_scale() -> None:
    """With a scale that 16 bits move, codes must be nearest on the moved grid, not on the fitted one."""
    weights = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
    result = quantize_groups(weights, Grid(8, 64, symmetric=False), min_max)
    assert result.zero_point is not None
    steps = weights / result.scale.float() + result.zero_point.float()
    inside = (steps > 0) & (steps < 255)
    assert ((result.codes.float() - steps).abs()[inside] <= 0.5 + 1e-4).all()
