from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.quant.clip_search import quantize_clip_search
from tasks.quant.descent import Columns
from tasks.quant.gptq import Gptq, factor_damped, feed_back, quantize_gptq
from tasks.quant.grid import Grid, QuantizedMatrix
from tasks.quant.hessian import Hessians
from tasks.quant.methods import quantize

PLAIN = Gptq(sweeps=0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def calibrated(counts: list[int], width: int, seed: int = 0) -> tuple[Hessians, list[torch.Tensor]]:
    """Hessians of correlated inputs of unequal sizes, and other inputs of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5 + 0.3 * torch.eye(width)
    mix *= torch.exp(0.7 * torch.randn(width, generator=generator))
    seen = [torch.randn(count, width, generator=generator) @ mix for count in counts]
    held_out = [torch.randn(512, width, generator=generator) @ mix for _ in counts]
    return Hessians(torch.tensor(counts), torch.stack([inputs.T @ inputs for inputs in seen])), held_out


def stack(experts: int, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(experts, rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def output_error(weights: torch.Tensor, found: QuantizedMatrix, inputs: list[torch.Tensor]) -> float:
    """Relative squared error of the outputs."""
    back = found.dequantize()
    pairs = [(x @ (w - b).T, x @ w.T) for w, b, x in zip(weights.float(), back, inputs, strict=True)]
    return float(sum(e.square().sum() for e, _ in pairs) / sum(y.square().sum() for _, y in pairs))


def test_feedback_by_hand() -> None:
    # H = U D U^T in order of quantization 0 1 2 3: the block of columns 0 and 1 is [[4, 2], [2, 2]], with
    # U_01 = 1 and D = (2, 2); columns 2 and 3 stand alone. Values −1 0 1 2 (scale 1, zero point 1).
    # Row 0: 0.4 -> 0, e = 0.4; 0.3 + 1 · 0.4 = 0.7 -> 1 (rounded alone: 0), e = −0.7; 1.2 -> 1; −0.6 -> −1.
    #   Output error of columns 0 and 1: 4 · 0.16 + 4 · 0.4 · −0.7 + 2 · 0.49 = 0.5 = 2 · 0.4² + 2 · (0.7 − 1)²;
    #   rounded alone, e = (0.4, 0.3): 0.64 + 0.48 + 0.18 = 1.3.
    # Row 1: 1.6 -> 2, e = −0.4; −0.9 − 0.4 = −1.3 -> −1, e = 0.1; 0.2 -> 0; 1.4 -> 1.
    hessian = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5]))
    hessian[0, 1] = hessian[1, 0] = 2.0
    order = torch.tensor([3, 2, 1, 0])
    factor, damping = factor_damped(hessian, order, 0.0, "matrix")
    assert damping == 0
    assert (factor / factor.diagonal())[3, 2] == 1.0  # U_01, last column first
    assert factor.diagonal().square().tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0])
    weights = torch.tensor([[0.4, 0.3, 1.2, -0.6], [1.6, -0.9, 0.2, 1.4]])
    grid = Grid(2, 4, symmetric=False)
    piece = Columns.empty(4, 1, 1, 2, 1, grid)
    piece.zero_point.fill_(1)
    piece.errors[:, 0] = weights.T
    feed_back(piece, order, [factor], grid)
    assert piece.codes[:, 0].T.tolist() == [[1, 2, 2, 0], [3, 0, 1, 2]]
    assert piece.errors[:, 0, 0].tolist() == pytest.approx([0.4, -0.7, 0.2, 0.4])
    assert piece.errors[:, 0, 1].tolist() == pytest.approx([-0.4, 0.1, 0.2, 0.4])


def test_feedback_counts_how_weights_round_to_16_bits() -> None:
    # 65 steps of 0.0157470703125, a bfloat16, are 1.0235595703125; bfloat16 holds 1.0234375, 1.2e-4 less. That is the
    # error of column 1, which goes first; 1.2e-4 / 1 of it reach column 0, too little for another code than the middle.
    grid, scale = Grid(8, 2, symmetric=True), 0.0157470703125
    piece = Columns.empty(2, 1, 1, 1, 1, grid)
    piece.scale.fill_(scale)
    piece.errors[:, 0, 0] = torch.tensor([0.0, 65 * scale])
    hessian = torch.tensor([[1.0, 1.0], [1.0, 1.01]])
    order = torch.tensor([0, 1])  # from the last
    factor, _ = factor_damped(hessian, order, 0.0, "matrix")
    feed_back(piece, order, [factor], grid, torch.bfloat16)
    assert piece.codes[:, 0, 0].tolist() == [128, 193]
    assert piece.errors[1, 0, 0].item() == 65 * scale - 1.0234375


def test_eight_bits_pay_less_for_16_bit_weights() -> None:
    """A bfloat16 weight lies up to an eighth of a step and more off a fine grid: fed back, that costs less."""
    weights = stack(2, 64, 128).to(torch.bfloat16)
    hessians, held_out = calibrated([2000, 2000], 128)
    found = quantize_gptq(weights, Grid(8, 64, False), "matrix", hessians, Gptq())
    codes = found.codes.float().view(*found.scale.shape, -1)
    assert found.zero_point is not None
    zeros, scales = found.zero_point.float().unsqueeze(-1), found.scale.float().unsqueeze(-1)
    exact = ((codes - zeros) * scales).view(weights.shape)  # errors that the feedback did not aim at
    unrounded = sum(
        (x @ (w - e).T).square().sum() for x, w, e in zip(held_out, weights.float(), exact, strict=True)
    )
    energy = sum((x @ w.T).square().sum() for x, w in zip(held_out, weights.float(), strict=True))
    assert output_error(weights, found, held_out) < float(unrounded / energy)


def test_blocks_equal_one_column_at_a_time() -> None:
    """150 columns cross a border of blocks and many of inner blocks."""
    hessians, _ = calibrated([400], 150)
    hessian = hessians.shrunk(slice(0, 1), 0.0)[0]
    weights, grid = stack(1, 3, 150)[0], Grid(3, 15, symmetric=False)
    order = torch.argsort(hessian.diagonal())
    factor, _ = factor_damped(hessian, order, 0.01, "matrix")
    unit = (factor / factor.diagonal()).double()
    piece = Columns.empty(150, 10, 2, 3, 1, grid)  # a place for another expert stays empty
    piece.scale.fill_(0.015)
    piece.zero_point.fill_(3.5)
    piece.errors[:, 0] = weights.T
    feed_back(piece, order, [factor], grid)
    errors = torch.zeros(150, 3, dtype=torch.float64)
    for place in range(149, -1, -1):
        column = int(order[place])
        feedback = sum(unit[later, place] * errors[order[later]] for later in range(place + 1, 150))
        code = ((weights[:, column] + feedback) / 0.015 + 3.5).round().clamp(0, 7)
        errors[column] = weights[:, column] - (code - 3.5) * 0.015
    # a tie may fall either way in float32, and then feeds back
    assert (piece.errors[:, 0] - errors).abs().mean() < 1e-4


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_identity_hessian_rounds_to_nearest(bits: int, symmetric: bool) -> None:
    """Nothing to feed back: every weight goes to the nearest value of its searched grid, and on an asymmetric one
    that is what clip_search does."""
    weights, grid = stack(2, 16, 64), Grid(bits, 16, symmetric)
    hessians = Hessians(torch.tensor([5, 5]), torch.eye(64).expand(2, 64, 64) * 5)
    found = quantize_gptq(weights, grid, "m", hessians, PLAIN)
    scale = found.scale.float().unsqueeze(-1)
    zero_point = grid.middle if found.zero_point is None else found.zero_point.float().unsqueeze(-1)
    steps = weights.view(2, 16, 4, 16) / scale + zero_point
    # half a code, but for float32's rounding of differences
    codes = found.codes.float().view(2, 16, 4, 16)
    assert ((codes - steps.clamp(0, grid.top)).abs() <= 0.5 + 1e-3).all()
    if not symmetric:
        plain = quantize_clip_search(weights, grid)
        assert plain.zero_point is not None and found.zero_point is not None
        assert torch.equal(found.scale, plain.scale) and torch.equal(found.zero_point, plain.zero_point)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_held_out_error_falls_with_each_step(bits: int, symmetric: bool) -> None:
    weights, grid = stack(3, 96, 128), Grid(bits, 32, symmetric)
    hessians, held_out = calibrated([64, 256, 2000], 128)
    rounded = output_error(weights, quantize("clip_search", weights, grid), held_out)
    plain = output_error(weights, quantize_gptq(weights, grid, "m", hessians, PLAIN), held_out)
    swept = output_error(weights, quantize_gptq(weights, grid, "m", hessians, Gptq()), held_out)
    assert plain < 0.75 * rounded
    assert swept < 0.99 * plain


def test_shrinkage_helps_experts_with_few_tokens() -> None:
    weights, grid = stack(4, 64, 128), Grid(3, 32, symmetric=True)
    hessians, held_out = calibrated([8, 16, 24, 4000], 128)

    def error(shrinkage: float) -> float:
        few = slice(0, 3)
        found = quantize_gptq(weights[few], grid, "m", hessians.part(few), Gptq(shrinkage=shrinkage))
        return output_error(weights[few], found, held_out[few])

    assert error(0.25) < 0.7 * error(0.0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    width=st.sampled_from([10, 43, 64]),
    tokens=st.sampled_from([0, 1, 3, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_number_of_tokens_and_any_type(
    seed: int, bits: int, symmetric: bool, width: int, tokens: int, dtype: torch.dtype
) -> None:
    weights = stack(2, 5, width, seed).to(dtype)
    hessians, _ = calibrated([tokens, 50], width, seed)
    found = quantize("gptq", weights, Grid(bits, 0, symmetric), "m", hessians)
    assert found.codes.max() <= 2**bits - 1
    assert (found.scale > 0).all() and found.scale.dtype == (
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    )
    assert torch.isfinite(found.dequantize()).all()
    assert (found.zero_point is None) == symmetric
    assert found.damping is not None and (found.damping >= Gptq().damping - 1e-9).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_scaling_weights_or_inputs(symmetric: bool) -> None:
    """Powers of two only shift exponents, so codes stay to the bit."""
    weights, grid = stack(2, 24, 64), Grid(3, 16, symmetric)
    hessians, _ = calibrated([100, 300], 64)
    plain = quantize("gptq", weights, grid, "m", hessians)
    larger = quantize("gptq", weights * 8, grid, "m", hessians)
    assert torch.equal(larger.codes, plain.codes) and torch.equal(larger.scale, plain.scale * 8)
    louder = quantize("gptq", weights, grid, "m", Hessians(hessians.tokens, hessians.total * 16))
    assert torch.equal(louder.codes, plain.codes) and torch.equal(louder.scale, plain.scale)


def test_neither_parts_nor_threads_change_a_bit(threads: int) -> None:
    weights, grid = stack(5, 40, 96), Grid(3, 32, symmetric=False)
    hessians, _ = calibrated([200, 0, 1, 30, 500], 96)
    whole = quantize("gptq", weights, grid, "m", hessians)
    for part in (slice(0, 2), slice(2, 5), slice(4, 5)):
        alone = quantize("gptq", weights[part], grid, "m", hessians.part(part))
        assert torch.equal(alone.codes, whole.codes[part]) and torch.equal(alone.scale, whole.scale[part])
        assert whole.zero_point is not None and alone.zero_point is not None
        assert torch.equal(alone.zero_point, whole.zero_point[part])
    torch.set_num_threads(3 - threads)
    again = quantize("gptq", weights, grid, "m", hessians)
    assert torch.equal(again.codes, whole.codes) and torch.equal(again.scale, whole.scale)


@pytest.mark.parametrize("method", ["rtn", "clip_search", "hqq", "gptq"])
def test_weights_on_a_grid_stay(method: str) -> None:
    """Weights that lie on an asymmetric grid, both ends in use, are found again exactly."""
    codes = torch.randint(0, 8, (2, 12, 4, 16), generator=torch.Generator().manual_seed(0)).float()
    codes[..., 0], codes[..., 1] = 0, 7
    weights = ((codes - 3) * 2.0**-6).view(2, 12, 64)
    hessians, _ = calibrated([200, 200], 64)
    found = quantize(method, weights, Grid(3, 16, symmetric=False), "m", hessians)
    assert torch.equal(found.codes.float(), codes.view(2, 12, 64))
    assert torch.equal(found.dequantize(), weights)


def test_a_hessian_that_is_not_positive_definite_takes_more_damping() -> None:
    # eigenvalues of [[1, 3], [3, 1]]: 4 and −2. Damping times the mean diagonal 1 must pass 2: 0.005 -> 5
    total = torch.stack([torch.tensor([[1.0, 3.0], [3.0, 1.0]]), torch.eye(2)])
    hessians = Hessians(torch.tensor([1, 1]), total)
    found = quantize("gptq", stack(2, 4, 2), Grid(4, 0, symmetric=True), "m", hessians, Gptq(shrinkage=0.0))
    assert found.damping is not None and found.damping.tolist() == pytest.approx([5.0, 0.005])
    assert torch.isfinite(found.dequantize()).all()


def test_one_token_without_damping() -> None:
    """Rank 1: damping starts from nothing at 1e-4."""
    inputs = torch.tensor([[1.0, 2.0, 4.0]])
    hessians = Hessians(torch.tensor([1]), (inputs.T @ inputs).unsqueeze(0))
    found = quantize("gptq", stack(1, 4, 3), Grid(4, 0, symmetric=True), "m", hessians, Gptq(damping=0.0))
    assert found.damping is not None and 0 < float(found.damping) <= 1e-2
    assert torch.isfinite(found.dequantize()).all()


def test_dead_channels_round_to_nearest() -> None:
    """Inputs 32 to 63, a whole group, never fire."""
    weights, grid = stack(1, 16, 64), Grid(3, 32, symmetric=False)
    inputs = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    inputs[:, 32:] = 0
    hessians = Hessians(torch.tensor([300]), (inputs.T @ inputs).unsqueeze(0))
    found, plain = quantize("gptq", weights, grid, "m", hessians, PLAIN), quantize_clip_search(weights, grid)
    assert (found.codes[..., 32:] != plain.codes[..., 32:]).float().mean() < 0.01


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros(symmetric: bool) -> None:
    """Zero weights, and inputs that were all zero."""
    hessians = Hessians(torch.tensor([3, 0]), torch.zeros(2, 16, 16))
    weights = stack(2, 4, 16)
    weights[0] = 0
    weights[1, 0] = 0.25
    found = quantize("gptq", weights, Grid(4, 8, symmetric), "m", hessians)
    assert found.dequantize()[0].abs().max() < 1e-6
    assert (found.dequantize()[1] - weights[1]).abs().max() < 0.02


def test_what_does_not_fit_is_said() -> None:
    hessians, _ = calibrated([20], 48)
    with pytest.raises(InputError, match=r"group_size 64 does not divide .* use one of 8, 12, 16, 24, 48"):
        quantize("gptq", stack(1, 4, 48), Grid(3, 64, symmetric=True), "m", hessians)
    with pytest.raises(InputError, match=r"m of shape \[2, 4, 48\] got Hessians of shape \[1, 48, 48\]"):
        quantize("gptq", stack(2, 4, 48), Grid(3, 16, symmetric=True), "m", hessians)
    with pytest.raises(InputError, match="method 'gptq' needs the Hessians of a calibration pass"):
        quantize("gptq", stack(1, 4, 48), Grid(3, 16, symmetric=True), "m")
    with pytest.raises(InputError, match="5 bits are not known: use one of 2, 3, 4, 8"):
        quantize("gptq", stack(1, 4, 48), Grid(5, 16, symmetric=True), "m", hessians)


def test_the_width_of_llama_moe() -> None:
    """688 = 43 · 16 is divided by no 64, 32 does not either; 16 does."""
    hessians, _ = calibrated([40], 688)
    with pytest.raises(InputError, match=r"use one of 8, 16, 43, 86, 172, 344, 688, or 0"):
        quantize("gptq", stack(1, 2, 688), Grid(3, 32, symmetric=True), "m", hessians)
    found = quantize("gptq", stack(1, 2, 688), Grid(3, 16, symmetric=True), "m", hessians)
    assert found.scale.shape == (1, 2, 43)


def test_what_is_not_finite_is_an_error() -> None:
    hessians, _ = calibrated([20], 16)
    grid = Grid(3, 16, symmetric=True)
    weights = stack(1, 4, 16)
    weights[0, 1, 2] = float("nan")
    with pytest.raises(InputError, match="up_proj holds NaN or infinite weights"):
        quantize("gptq", weights, grid, "up_proj", hessians)
    with pytest.raises(InputError, match="16 bits"):
        quantize(
            "gptq", torch.full((1, 4, 16), 1e6) * torch.tensor([1.0, -1.0] * 8), grid, "up_proj", hessians
        )
    broken = Hessians(torch.tensor([20]), torch.full((1, 16, 16), float("nan")), pool=hessians.pooled())
    with pytest.raises(InputError, match="up_proj: the Hessian of expert 0 holds NaN"):
        quantize("gptq", stack(1, 4, 16), grid, "up_proj", broken)
