import pytest
import torch

from tasks.contracts import InputError
from tasks.quant.hessian import Hessians


@pytest.fixture
def hessians() -> Hessians:
    """Two experts with two inputs: two tokens (1, 0) and (1, 2), and none."""
    first = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    return Hessians(torch.tensor([2, 0]), torch.stack([first.T @ first, torch.zeros(2, 2)]))


def test_shrinkage_by_hand(hessians: Hessians) -> None:
    # own mean: ((1, 0)(1, 0)^T + (1, 2)(1, 2)^T) / 2 = [[1, 1], [1, 2]]; it is the pool too, of 2 tokens
    assert hessians.pooled().tolist() == [[1.0, 1.0], [1.0, 2.0]]
    # a = 2 / (2 + 0.5 · 2) = 2/3, and 0 without tokens
    assert hessians.own_share(0.5).tolist() == pytest.approx([2 / 3, 0.0])


def test_between_own_and_pool_by_hand() -> None:
    # expert 0: 1 token, total diag(3, 0); expert 1: 3 tokens, total diag(0, 9); pool diag(3, 9) / 4
    total = torch.stack([torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 9.0]))])
    hessians = Hessians(torch.tensor([1, 3]), total)
    # shrinkage 0.5 with 2 inputs is worth 1 token: a = 1/2 and 3/4
    # expert 0: 1/2 · diag(3, 0) + 1/2 · diag(0.75, 2.25); expert 1: 3/4 · diag(0, 3) + 1/4 · diag(0.75, 2.25)
    found = hessians.shrunk(slice(0, 2), 0.5).diagonal(dim1=1, dim2=2)
    assert found.tolist() == [[1.875, 1.125], [0.1875, 2.8125]]


@pytest.mark.parametrize("shrinkage", [0.0, 0.25, 4.0])
def test_an_expert_without_tokens_uses_the_pool(hessians: Hessians, shrinkage: float) -> None:
    assert torch.equal(hessians.shrunk(slice(1, 2), shrinkage)[0], hessians.pooled())


def test_no_shrinkage_keeps_an_experts_own() -> None:
    total = torch.stack([torch.eye(2) * 6, torch.ones(2, 2)])
    found = Hessians(torch.tensor([3, 1]), total).shrunk(slice(0, 2), 0.0)
    assert torch.equal(found[0], torch.eye(2) * 2) and torch.equal(found[1], torch.ones(2, 2))


def test_a_part_keeps_the_layers_pool() -> None:
    inputs = torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(0))
    whole = Hessians(torch.tensor([20, 20, 20]), inputs.transpose(1, 2) @ inputs)
    part = whole.part(slice(1, 3))
    assert torch.equal(part.pooled(), whole.pooled())
    assert torch.equal(part.shrunk(slice(0, 2), 0.25), whole.shrunk(slice(1, 3), 0.25))
    assert torch.equal(part.part(slice(1, 2)).shrunk(slice(0, 1), 0.25), whole.shrunk(slice(2, 3), 0.25))


def test_no_token_at_all() -> None:
    with pytest.raises(InputError, match="no calibration token reached any expert"):
        Hessians(torch.tensor([0, 0]), torch.zeros(2, 3, 3)).pooled()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite(value: float) -> None:
    with pytest.raises(InputError, match="calibration inputs hold NaN or infinite"):
        Hessians(torch.tensor([1]), torch.full((1, 2, 2), value)).pooled()


@pytest.mark.parametrize("shape", [(2, 3, 3), (1, 3, 4)])
def test_shapes_that_do_not_fit(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=r"expected \[E, in, in\] and \[E\]"):
        Hessians(torch.tensor([1]), torch.zeros(shape))
