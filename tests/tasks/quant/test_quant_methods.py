import pytest
import torch

from tasks.contracts import InputError
from tasks.quant.grid import CHUNK_VALUES, Grid
from tasks.quant.hqq import NORM, bounded_share
from tasks.quant.methods import METHODS, NEEDS_HESSIANS, quantize
from tasks.quant.size import relative_error_parts


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    """[4, 96, 128], rows of different spread, with some outliers."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(4, 96, 128, generator=generator) * 0.03
    spread = (1 + 0.3 * torch.randn(4, 96, 1, generator=generator)).abs()
    outliers = torch.rand(4, 96, 128, generator=generator) > 0.995
    return base * spread * (1 + 4 * outliers)


def errors(weights: torch.Tensor, back: torch.Tensor) -> tuple[float, float]:
    """Sum of squares and of the p-th powers of the errors."""
    difference = (back - weights).abs().double()
    return float(difference.square().sum()), float(difference.pow(NORM).sum())


def papers_hqq(weights: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The paper's algorithm: β 10 in units of the weights, κ 1.01, 20 steps, one early stop for all."""
    flat, top = weights.reshape(-1, group), 2**bits - 1
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    inverse = (top / (high - low)).clamp(max=2e4)
    zero = -low * inverse
    beta, best = 10.0, float("inf")
    for _ in range(20):
        codes = (flat * inverse + zero).round().clamp(0, top)
        difference = flat - (codes - zero) / inverse
        slack = difference.sign() * (difference.abs() - difference.abs().pow(NORM - 1) / beta).relu()
        error = float(difference.abs().mean())
        if error >= best:
            break
        best, beta = error, beta * 1.01
        zero = (codes - (flat - slack) * inverse).mean(1, keepdim=True)
    codes = (flat * inverse + zero).round().clamp(0, top)
    return ((codes - zero) / inverse).view(weights.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hqq_beats_rtn_in_both_norms(weights: torch.Tensor, bits: int, symmetric: bool) -> None:
    grid = Grid(bits, 64, symmetric)
    square, power = errors(weights, quantize("hqq", weights, grid).dequantize())
    rtn_square, rtn_power = errors(weights, quantize("rtn", weights, grid).dequantize())
    assert power < 0.97 * rtn_power
    assert square < rtn_square


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hqq_is_no_worse_than_the_papers_algorithm(weights: torch.Tensor, bits: int) -> None:
    square, power = errors(weights, quantize("hqq", weights, Grid(bits, 64, symmetric=False)).dequantize())
    paper_square, paper_power = errors(weights, papers_hqq(weights, bits, 64))
    assert power < paper_power
    assert square < 1.01 * paper_square


@pytest.mark.parametrize("beta", [4.0, 8.3])
def test_bounded_share_from_the_bits_of_a_float(beta: float) -> None:
    """min(1, |r|^(p−2) / β) within 5 %, both signs, and 1 at an error of 0."""
    size = torch.logspace(-6, 1, 5000)
    error = torch.cat([size, -size, torch.zeros(1)]).view(-1, 1)
    found = bounded_share(error, beta, torch.empty_like(error))
    exact = error.abs().double().pow(NORM - 2).div(beta).clamp(max=1)
    assert ((found - exact).abs() <= 0.05 * exact).all()
    assert float(found[-1]) == 1


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NEEDS_HESSIANS))
def test_fewer_bits_lose_more(weights: torch.Tensor, method: str) -> None:
    losses = [
        errors(weights, quantize(method, weights, Grid(b, 64, False)).dequantize())[0] for b in (2, 3, 4, 8)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 3 * losses[1] > 9 * losses[2]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", sorted(METHODS.keys() - NEEDS_HESSIANS))
def test_scaling_the_weights_scales_the_result(weights: torch.Tensor, method: str, symmetric: bool) -> None:
    grid = Grid(3, 64, symmetric)
    plain, scaled = quantize(method, weights, grid), quantize(method, weights * 8, grid)
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scale * 8, scaled.scale)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NEEDS_HESSIANS))
def test_an_expert_does_not_depend_on_its_neighbours(method: str) -> None:
    """More weights than one chunk, and a chunk border inside an expert."""
    stack = torch.randn(3, 96, 768, generator=torch.Generator().manual_seed(2))
    assert stack.numel() > CHUNK_VALUES and CHUNK_VALUES % stack[0].numel()
    grid = Grid(3, 64, symmetric=False)
    together = quantize(method, stack, grid)
    for expert in range(3):
        alone = quantize(method, stack[expert : expert + 1], grid)
        assert torch.equal(together.codes[expert], alone.codes[0])
        assert together.zero_point is not None and alone.zero_point is not None
        assert torch.equal(together.zero_point[expert], alone.zero_point[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_hqq_of_a_dead_expert(symmetric: bool) -> None:
    result = quantize("hqq", torch.zeros(1, 2, 64), Grid(2, 64, symmetric))
    assert result.dequantize().abs().max() < 1e-6


def test_unknown_method() -> None:
    with pytest.raises(
        InputError, match=r"'awq' is not known: expected one of \['clip_search', 'gptq', 'hqq', 'rtn'\]"
    ):
        quantize("awq", torch.zeros(1, 2, 64), Grid(2, 64, symmetric=True))


def test_relative_error_parts(weights: torch.Tensor) -> None:
    result = quantize("rtn", weights, Grid(3, 64, symmetric=False))
    error, total = relative_error_parts(weights, result)
    assert error == pytest.approx(errors(weights, result.dequantize())[0])
    assert total == pytest.approx(float(weights.double().square().sum()))
