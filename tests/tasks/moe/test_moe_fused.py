"""The fused experts path against a plain computation written by hand, in every combination of layout flags."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.contracts import InputError
from tasks.moe.experts import run_experts
from tasks.moe.fused import FLAGS, FusedExperts, check_layout, experts_forward

EXPERTS, HIDDEN, WIDTH = 6, 10, 4


class Module(nn.Module):
    """Stands in for a transformers experts module of any layout; `plain_*` are its weights in plain form."""

    def __init__(
        self,
        has_gate: bool = True,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        has_bias: bool = False,
        has_post_expert_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate, self.has_bias, self.has_post_expert_norm = has_gate, has_bias, has_post_expert_norm
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self._is_expert_parallel = False
        self.act_fn = nn.SiLU()
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(EXPERTS, *shape, generator=generator, dtype=torch.float64)

        self.plain = {
            "up_proj": (random(WIDTH, HIDDEN), random(WIDTH)),
            "down_proj": (random(HIDDEN, WIDTH), random(HIDDEN)),
        }
        if has_gate:
            self.plain["gate_proj"] = (random(WIDTH, HIDDEN), random(WIDTH))
            both = zip(self.plain["gate_proj"], self.plain["up_proj"], strict=True)
            if is_concatenated:
                first = [torch.cat(pair, dim=1) for pair in both]
            else:  # gate 0, up 0, gate 1, up 1, ...
                first = [torch.stack(pair, dim=2).flatten(1, 2) for pair in both]
            stored = {"gate_up_proj": first, "down_proj": self.plain["down_proj"]}
        else:
            stored = self.plain
        for name, (weight, bias) in stored.items():
            own = weight.transpose(1, 2).contiguous() if is_transposed else weight.clone()
            setattr(self, name, nn.Parameter(own))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(bias.clone()))
        if has_post_expert_norm:
            self.post_expert_norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)

    def _apply_gate(self, fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.chunk(2, -1) if self.is_concatenated else (fused[..., 0::2], fused[..., 1::2])
        return self.act_fn(gate) * up

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return experts_forward(self, hidden, index, weight)


def one_token(module: Module, expert: int, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What down_proj reads, and the expert's output, from the plain weights."""

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = module.plain[name]
        return weight[expert] @ inputs + (bias[expert] if module.has_bias else 0.0)

    up = linear("up_proj", token)
    inner = functional.silu(linear("gate_proj", token)) * up if module.has_gate else functional.silu(up)
    output = linear("down_proj", inner)
    if module.has_post_expert_norm:
        output = (output - output.mean()) / (output.var(unbiased=False) + 1e-5).sqrt()
    return inner, output


def plain(module: Module, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token and one pick at a time."""
    output = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for pick in range(index.shape[1]):
            _, own = one_token(module, int(index[token, pick]), hidden[token])
            output[token] += weight[token, pick] * own
    return output


def routed(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return hidden, index, torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)


LAYOUTS = [dict(zip(FLAGS, values, strict=True)) for values in product([True, False], repeat=len(FLAGS))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda own: "".join("01"[value] for value in own.values()))
def test_every_layout_equals_the_plain_computation(layout: dict[str, bool]) -> None:
    module = Module(**layout)
    check_layout(module, "experts")
    experts = FusedExperts(module)
    assert set(experts.matrices()) == set(module.plain)
    for name, view in experts.matrices().items():
        assert torch.equal(view, module.plain[name][0])
    replicas = FusedExperts(Module(**layout)).copies([*range(EXPERTS), 3, 3])
    with torch.inference_mode():
        for top_k in (1, 3, EXPERTS):
            hidden, index, weight = routed(7, top_k)
            expected = plain(module, hidden, index, weight)
            torch.testing.assert_close(module(hidden, index, weight), expected)
            moved = torch.where(index == 3, EXPERTS + 1, index)  # to a replica
            torch.testing.assert_close(run_experts(replicas, hidden, moved, weight), expected)
        for expert in range(EXPERTS):
            for token in hidden[:2]:
                inner, output = one_token(module, expert, token)
                torch.testing.assert_close(experts.inner(expert, token[None])[0], inner)
                torch.testing.assert_close(experts.output(expert, inner[None])[0], output)


@pytest.mark.parametrize(
    "layout", LAYOUTS[::5], ids=lambda own: "".join("01"[value] for value in own.values())
)
def test_matrices_write_through(layout: dict[str, bool]) -> None:
    module = Module(**layout)
    experts = FusedExperts(module)
    for view in experts.matrices().values():
        view[2] *= 3
    for weight, _ in module.plain.values():
        weight[2] *= 3
    hidden, index, weight = routed(5, 2)
    with torch.inference_mode():
        torch.testing.assert_close(module(hidden, index, weight), plain(module, hidden, index, weight))


def test_experts_without_tokens_and_one_with_all() -> None:
    module = Module()
    hidden, _, _ = routed(5, 1)
    index, weight = torch.full((5, 1), 3), torch.ones(5, 1, dtype=torch.float64)
    with torch.inference_mode():
        output = module(hidden, index, weight)
        torch.testing.assert_close(output, plain(module, hidden, index, weight))
        for name, view in FusedExperts(module).matrices().items():
            for expert in (0, 1, 2, 4, 5):
                view[expert] = float("nan")  # never read
            assert view.isnan().any(), name
        assert torch.equal(module(hidden, index, weight), output)


def test_picks_without_an_expert_add_nothing() -> None:
    """Number E is no expert: tokens 0 and 2 lose their second pick, token 1 both."""
    module = Module(has_bias=True)
    hidden, index, weight = routed(4, 2)
    dropped = torch.tensor([[0, 1], [1, 1], [0, 1], [0, 0]], dtype=torch.bool)
    with torch.inference_mode():
        output = module(hidden, index.masked_fill(dropped, EXPERTS), weight)
        expected = plain(module, hidden, index, weight * ~dropped)
    torch.testing.assert_close(output, expected)
    assert torch.equal(output[1], torch.zeros(HIDDEN, dtype=torch.float64))


def test_no_tokens() -> None:
    hidden, weight = torch.zeros(0, HIDDEN).double(), torch.zeros(0, 2).double()
    assert Module()(hidden, torch.zeros(0, 2, dtype=torch.int64), weight).shape == (0, HIDDEN)


def test_runs_are_bit_for_bit_equal() -> None:
    module = Module()
    hidden, index, weight = routed(64, 2)
    with torch.inference_mode():
        first = module(hidden, index, weight)
        assert all(torch.equal(module(hidden, index, weight), first) for _ in range(5))


def test_observed_inputs_are_those_of_the_matrices() -> None:
    module = Module(has_bias=True, is_transposed=True, is_concatenated=False)
    hidden, index, weight = routed(9, 2)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def observe(expert: int, rows: torch.Tensor, inner: torch.Tensor) -> None:
        seen[expert] = (rows, inner)

    with torch.inference_mode():
        run_experts(FusedExperts(module), hidden, index, weight, observe)
    assert sorted(seen) == sorted(set(index.flatten().tolist()))
    for expert, (rows, inner) in seen.items():
        own = hidden[(index == expert).any(dim=1)]
        assert torch.equal(rows, own)
        torch.testing.assert_close(inner, torch.stack([one_token(module, expert, row)[0] for row in own]))


def test_installed_functions_run_in_place_of_the_forward_until_taken_back() -> None:
    module = Module()
    experts = FusedExperts(module)
    hidden, index, weight = routed(3, 2)
    with torch.inference_mode():
        before = module(hidden, index, weight)
        experts.install(lambda hidden, index, weight: hidden * weight[:, :1] + index[:, :1])
        expected = hidden * weight[:, :1] + index[:, :1]
        assert torch.equal(module(hidden, index, weight), expected)
        assert torch.equal(module(hidden, top_k_index=index, top_k_weights=weight), expected)
        with pytest.raises(RuntimeError, match="take it back first"):
            FusedExperts(module).install(lambda hidden, index, weight: hidden)
        experts.install(None)
        assert torch.equal(module(hidden, index, weight), before)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("has_bias", None, "layout flag 'has_bias' is absent"),
        ("is_concatenated", "halves", "layout flag 'is_concatenated' is halves"),
        (
            "has_bias",
            True,
            "layout flag 'has_bias' is True, but the module lacks the parameter 'down_proj_bias'",
        ),
        (
            "has_gate",
            False,
            "layout flag 'has_gate' is False, but the module has the parameter 'gate_up_proj'",
        ),
        ("has_post_expert_norm", True, "'has_post_expert_norm' is True, but the module lacks"),
        ("is_blocked", True, "layout flag 'is_blocked' is True: this experts layout is not understood"),
        ("has_scale", False, "layout flag 'has_scale' is False: this experts layout is not understood"),
        ("_is_expert_parallel", True, "layout flag '_is_expert_parallel' is True"),
    ],
)
def test_a_layout_that_is_not_understood(flag: str, value: Any, message: str) -> None:
    module = Module()
    setattr(module, flag, value)
    with pytest.raises(InputError) as caught:
        check_layout(module, "model.layers.1.mlp.experts")
    assert str(caught.value).startswith("model.layers.1.mlp.experts (Module): ") and message in str(
        caught.value
    )


def test_a_parameter_that_no_flag_explains() -> None:
    module = Module()
    module.input_scale = nn.Parameter(torch.ones(EXPERTS))
    with pytest.raises(InputError, match="has the parameter 'input_scale'"):
        check_layout(module, "experts")
