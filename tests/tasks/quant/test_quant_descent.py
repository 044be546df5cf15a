import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.quant.descent import Columns, sweep
from tasks.quant.grid import Grid, encode, min_max


def loss(errors: torch.Tensor, hessian: torch.Tensor) -> float:
    """Sum over rows of e H e^T for errors [in, out]."""
    return float((errors.double() * (hessian.double() @ errors.double())).sum())


def on_grid(codes: list[float], errors: list[float], zero_point: float) -> Columns:
    """One expert with one output and one group of scale 1."""
    one = torch.ones(1, 1, 1)
    return Columns(
        torch.tensor(codes).view(-1, 1, 1), torch.tensor(errors).view(-1, 1, 1), one, one * zero_point, 1
    )


def rounded(columns: torch.Tensor, grid: Grid, size: int) -> Columns:
    """[in, out] weights of two experts, the second's twice the first's, rounded to nearest on min-max grids."""
    width, rows = columns.shape
    state = Columns.empty(width, width // size, 2, rows, 2, grid)
    for expert in range(2):
        groups = columns.T.reshape(rows, width // size, size) * (1 + expert)
        scale, zero_point = (value.half().float() for value in min_max(groups, grid))
        codes = encode(groups, scale, zero_point, grid)
        state.codes[:, expert] = codes.reshape(rows, width).T
        state.errors[:, expert] = (groups - (codes - zero_point) * scale).reshape(rows, width).T
        state.scale[:, expert], state.zero_point[:, expert] = scale.squeeze(-1).T, zero_point.squeeze(-1).T
    return state


def test_scale_and_zero_point_by_hand() -> None:
    # Weights (−0.6, 0.3) as codes 0 and 1 at scale 1, zero point 1: (−1, 0), e = (0.4, 0.3). Two parameters fit
    # two weights: scale 0.3 + 0.6 = 0.9, zero point 0.6 / 0.9 = 0.667.
    hessian = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
    state = on_grid([0.0, 1.0], [0.4, 0.3], zero_point=1.0)
    sweep(state, [hessian], Grid(2, 2, symmetric=False), torch.float16)
    assert state.codes.flatten().tolist() == [0.0, 1.0]
    assert float(state.scale) == pytest.approx(0.9, rel=1e-3)
    assert float(state.zero_point) == pytest.approx(2 / 3, rel=1e-3)
    assert state.errors.abs().max() < 1e-3


def test_codes_and_scale_by_hand() -> None:
    # The same on the symmetric grid of values −2 −1 0 1 (zero point 2): the scale cannot help where all codes
    # are 0. Column 0: ŵ_0 + F_0 / H_00 = 0 + 2.2 / 4 = 0.55 -> 1: e_0 = −0.6, F_1 = 1.4 − 2 = −0.6.
    # Column 1: 0 − 0.6 / 2 = −0.3 -> 0. Loss 4 · 0.36 − 4 · 0.18 + 2 · 0.09 = 0.9, from 1.3.
    hessian = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
    grid = Grid(2, 2, symmetric=True)
    start = on_grid([2.0, 2.0], [0.4, 0.3], zero_point=2.0)
    sweep(start, [hessian], grid, torch.float16)
    assert start.codes.flatten().tolist() == [3.0, 2.0]
    assert start.errors.flatten().tolist() == pytest.approx([-0.6, 0.3])
    assert loss(start.errors[:, 0], hessian) == pytest.approx(0.9)
    # The next sweep fits the scale for codes (1, 0): s = 1 + c^T F / c^T H c, F_0 = 4 · −0.6 + 2 · 0.3 = −1.8:
    # 1 − 1.8 / 4 = 0.55, e = (−0.15, 0.3), loss 0.09 − 0.18 + 0.18 = 0.09.
    sweep(start, [hessian], grid, torch.float16)
    assert float(start.scale) == pytest.approx(0.55, rel=1e-3)
    assert loss(start.errors[:, 0], hessian) == pytest.approx(0.09, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    shape=st.sampled_from([(8, 8), (48, 16), (96, 48), (80, 80), (43, 43)]),  # inputs, group size
)
def test_no_sweep_raises_the_loss(seed: int, bits: int, symmetric: bool, shape: tuple[int, int]) -> None:
    width, size = shape
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2 * width, width, generator=generator) @ torch.randn(
        width, width, generator=generator
    )
    hessian = inputs.T @ inputs / len(inputs) + 0.01 * torch.eye(width)
    columns = torch.randn(width, 12, generator=generator)
    grid = Grid(bits, size, symmetric)
    state = rounded(columns, grid, size)
    hessians = [hessian, hessian.flip(0, 1)]
    before = [loss(state.errors[:, expert], hessians[expert]) for expert in range(2)]
    for _ in range(3):
        sweep(state, hessians, grid, torch.float16)
        after = [loss(state.errors[:, expert], hessians[expert]) for expert in range(2)]
        assert all(new <= old * (1 + 1e-4) for new, old in zip(after, before, strict=True))
        before = after
    assert state.codes.min() >= 0 and state.codes.max() <= grid.top
    assert (state.scale > 0).all() and torch.equal(state.scale, state.scale.half().float())
    if symmetric:
        assert (state.zero_point == grid.middle).all()
    # the errors carried along are those of the grid
    scale, zero_point = (value.repeat_interleave(size, dim=0) for value in (state.scale, state.zero_point))
    weights = torch.stack([columns, 2 * columns], dim=1)
    assert torch.allclose(state.errors, weights - (state.codes - zero_point) * scale, atol=4e-5)


def test_groups_without_spread() -> None:
    """Zero weights, equal codes and dead channels leave everything finite."""
    columns = torch.zeros(8, 3)
    columns[:, 1] = 0.5
    hessian = torch.eye(8) * 1e-12
    hessian[0, 0] = 1
    state = rounded(columns, Grid(2, 4, symmetric=False), 4)
    sweep(state, [hessian, hessian], Grid(2, 4, symmetric=False), torch.float16)
    assert all(
        torch.isfinite(value).all() for value in (state.codes, state.errors, state.scale, state.zero_point)
    )
    assert state.errors.abs().max() < 1e-3
