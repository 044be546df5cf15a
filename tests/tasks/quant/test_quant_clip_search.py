import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.quant.clip_search import quantize_clip_search, search_range
from tasks.quant.grid import Grid, QuantizedMatrix, encode, min_max
from tasks.quant.hqq import quantize_hqq
from tasks.quant.rtn import quantize_rtn


def loss(weights: torch.Tensor, quantized: QuantizedMatrix) -> float:
    """Sum of squares before a weight is rounded to 16 bits."""
    codes, scale = quantized.codes.double(), quantized.scale.double()
    zero_point = (
        torch.full_like(scale, quantized.grid.middle)
        if quantized.zero_point is None
        else quantized.zero_point.double()
    )
    grouped = codes.view(*scale.shape, -1)
    back = (grouped - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)
    return float((back.view(weights.shape) - weights.double()).square().sum())


def test_an_outlier_is_cut_off_by_hand() -> None:
    # Symmetric, 2 bits, values (−2, −1, 0, 1) · s. Min-max: s = 4 / 1.5 = 2.667: 1.2 -> 0, 4 -> s, and the
    # error 14 · 1.44 + 1.333² = 21.94. With s = 1.4: 14 · 0.2² + 2.6² = 7.32, and that is the best scale: for
    # codes ±1 on all 15, s = (14 · 1.2 + 4) / 15 = 1.387, error 14 · 0.187² + 2.613² = 7.317.
    weights = torch.tensor([[[1.2, -1.2] * 7 + [4.0]]])
    found = quantize_clip_search(weights, Grid(2, 0, symmetric=True))
    assert found.codes.tolist() == [[[3, 1] * 7 + [3]]]
    assert float(found.scale) == pytest.approx(20.8 / 15, rel=1e-3)
    assert loss(weights, found) == pytest.approx(7.317, abs=1e-3)


def test_least_squares_by_hand() -> None:
    # Min-max: scale 3.3 / 3 = 1.1, codes 0 1 2 3. The line through (code, weight) has slope
    # (−1.5 · −1 − 0.5 · 0.1 + 0.5 · 0.9 + 1.5 · 2.3) / 5 = 1.07 and, through the means (1.5, 0.575), offset −1.03:
    # zero point 1.03 / 1.07 = 0.9626. Errors 0.03, 0.06, −0.21, 0.12: squares 0.063.
    weights = torch.tensor([[[-1.0, 0.1, 0.9, 2.3]]])
    found = quantize_clip_search(weights, Grid(2, 4, symmetric=False))
    assert found.codes.tolist() == [[[0, 1, 2, 3]]]
    assert float(found.scale) == pytest.approx(1.07, rel=1e-3)
    assert found.zero_point is not None and float(found.zero_point) == pytest.approx(0.9626, rel=1e-3)
    assert loss(weights, found) == pytest.approx(0.063, abs=1e-3)


def test_importance_decides_by_hand() -> None:
    # With the outlier 1000 times as important as each of the others, it is kept: 4 ≈ s or −4 ≈ −2 s.
    weights = torch.tensor([[[1.2, -1.2] * 7 + [4.0]]])
    importance = torch.ones(15)
    importance[-1] = 1000
    scale, _ = search_range(weights[0], Grid(2, 0, symmetric=True), torch.float16, importance)
    assert float(scale) == pytest.approx(4.0, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    shift=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_never_worse_than_rtn(
    seed: int, bits: int, symmetric: bool, spread: float, shift: float, dtype: torch.dtype
) -> None:
    """Whatever the tails (`spread` widens them) and wherever the mean."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, 6, 64, generator=generator)
    tails = torch.exp(spread * torch.randn(2, 6, 64, generator=generator))
    weights = (normal * tails + shift).clamp(-1e4, 1e4).to(dtype)
    grid = Grid(bits, 32, symmetric)
    found = quantize_clip_search(weights, grid)
    assert int(found.codes.max()) <= grid.top
    assert torch.isfinite(found.scale).all() and (found.scale > 0).all()
    assert (found.zero_point is None) == symmetric
    assert loss(weights, found) <= loss(weights, quantize_rtn(weights, grid)) * (1 + 1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4]), symmetric=st.booleans())
def test_importance_lowers_the_weighted_error(seed: int, bits: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(16, 3, 32, generator=generator)
    importance = torch.exp(2 * torch.randn(3, 32, generator=generator))
    grid = Grid(bits, 32, symmetric)

    def weighted(scale: torch.Tensor, zero_point: torch.Tensor) -> float:
        back = (encode(groups, scale, zero_point, grid) - zero_point) * scale
        return float(((back - groups).square() * importance).sum())

    found = weighted(*search_range(groups, grid, torch.float16, importance))
    scale, zero_point = min_max(groups, grid)
    assert found <= weighted(scale.half().float(), zero_point.round()) * (1 + 1e-5)
    assert found < weighted(*search_range(groups, grid, torch.float16))


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.6), (3, 0.86)])
def test_far_below_hqq_at_two_and_three_bits(bits: int, bound: float) -> None:
    """Measured on normal weights, groups of 64: 0.57 and 0.84 of hqq's error at 2 and 3 bits."""
    weights = torch.randn(2, 128, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    grid = Grid(bits, 64, symmetric=False)
    found = loss(weights, quantize_clip_search(weights, grid))
    assert found < bound * loss(weights, quantize_hqq(weights, grid))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5, 6e-8])
def test_constant_groups(value: float, symmetric: bool) -> None:
    weights = torch.full((1, 1, 16), value)
    found = quantize_clip_search(weights, Grid(2, 8, symmetric))
    assert torch.isfinite(found.dequantize()).all()
    assert (found.dequantize() - weights).abs().max() <= max(abs(value) * 2e-3, 2.0**-23)


def test_an_overflowing_scale_is_an_error() -> None:
    # ± 3e5 at 2 bits: scale 2e5 > 65504
    with pytest.raises(InputError, match="16 bits"):
        quantize_clip_search(torch.tensor([[[3e5, -3e5] * 4]]), Grid(2, 8, symmetric=True), "up_proj")


def test_a_zero_point_far_outside_is_not_taken() -> None:
    """Weights 1000 ± 1: a line through them alone would need a zero point that float16 rounds by whole codes.
    The grid from 0 to 1001 remains at least as good as rtn's."""
    weights = 1000 + torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0))
    grid = Grid(4, 64, symmetric=False)
    found = quantize_clip_search(weights, grid)
    assert torch.isfinite(found.dequantize()).all()
    assert loss(weights, found) <= loss(weights, quantize_rtn(weights, grid)) * (1 + 1e-5)
