"""The fused experts path against a plain loop over tokens and picks, in every layout that is understood."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.moe.fused import check_layout, expert_matrices, experts_forward

EXPERTS, HIDDEN, WIDTH = 6, 10, 4


class Experts(nn.Module):
    """Stands in for a transformers experts module of any layout."""

    def __init__(self, gate: bool, transposed: bool, concatenated: bool) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate, self.is_transposed, self.is_concatenated = gate, transposed, concatenated
        self.has_bias = self.has_post_expert_norm = False
        self.act_fn = nn.SiLU()
        generator = torch.Generator().manual_seed(0)

        def parameter(rows: int, columns: int) -> nn.Parameter:
            weight = torch.randn(EXPERTS, rows, columns, generator=generator, dtype=torch.float64)
            return nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight)

        if gate:
            self.gate_up_proj = parameter(2 * WIDTH, HIDDEN)
        else:
            self.up_proj = parameter(WIDTH, HIDDEN)
        self.down_proj = parameter(HIDDEN, WIDTH)

    def _apply_gate(self, fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.chunk(2, -1) if self.is_concatenated else (fused[..., 0::2], fused[..., 1::2])
        return self.act_fn(gate) * up


def plain(experts: Experts, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token and one pick at a time, from the [E, out, in] views."""
    matrices = expert_matrices(experts)
    output = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for pick in range(index.shape[1]):
            expert = int(index[token, pick])
            inner = matrices["up_proj"][expert] @ hidden[token]
            if "gate_proj" in matrices:
                inner = functional.silu(matrices["gate_proj"][expert] @ hidden[token]) * inner
            else:
                inner = functional.silu(inner)
            output[token] += weight[token, pick] * (matrices["down_proj"][expert] @ inner)
    return output


LAYOUTS = [
    (gate, turned, joined) for gate in (True, False) for turned in (True, False) for joined in (True, False)
]


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_equals_a_plain_loop(layout: tuple[bool, bool, bool], top_k: int) -> None:
    experts = Experts(*layout)
    check_layout(experts, "experts")
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(17, HIDDEN, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(17)])
    weight = torch.rand(17, top_k, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        output = experts_forward(experts, hidden, index, weight)
        torch.testing.assert_close(output, plain(experts, hidden, index, weight))


def test_experts_without_tokens_and_one_with_all() -> None:
    experts = Experts(True, False, True)
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64)
    index, weight = torch.full((5, 1), 3), torch.ones(5, 1, dtype=torch.float64)
    with torch.inference_mode():
        output = experts_forward(experts, hidden, index, weight)
        torch.testing.assert_close(output, plain(experts, hidden, index, weight))
        for name, view in expert_matrices(experts).items():
            for expert in (0, 1, 2, 4, 5):
                view[expert] = float("nan")  # never read
            assert view.isnan().any(), name
        assert torch.equal(experts_forward(experts, hidden, index, weight), output)


def test_no_tokens() -> None:
    experts = Experts(True, False, True)
    hidden, weight = torch.zeros(0, HIDDEN).double(), torch.zeros(0, 2).double()
    index = torch.zeros(0, 2, dtype=torch.int64)
    assert experts_forward(experts, hidden, index, weight).shape == (0, HIDDEN)


def test_runs_are_bit_for_bit_equal() -> None:
    experts = Experts(True, False, True)
    hidden = torch.randn(64, HIDDEN, dtype=torch.float64)
    index = torch.randint(0, EXPERTS, (64, 2))
    weight = torch.rand(64, 2, dtype=torch.float64)
    with torch.inference_mode():
        first = experts_forward(experts, hidden, index, weight)
        assert all(torch.equal(experts_forward(experts, hidden, index, weight), first) for _ in range(5))
