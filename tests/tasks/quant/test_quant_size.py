import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tasks.contracts import GIB
from tasks.moe.registry import moe_layers
from tasks.quant.formats import packed_entries
from tasks.quant.grid import Grid
from tasks.quant.size import ideal_bytes, stored_bytes


@pytest.fixture(scope="module")
def qwen3_30b() -> tuple[list[tuple[int, int, int]], int]:
    """Qwen3-30B-A3B's published configuration: stacks of expert matrices, and parameters outside them."""
    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stacks = [tuple(view.shape) for layer in moe_layers(model) for view in layer.matrices().values()]
    experts = sum(torch.Size(stack).numel() for stack in stacks)
    return stacks, sum(parameter.numel() for parameter in model.parameters()) - experts


def test_golden_parameter_counts(qwen3_30b) -> None:
    stacks, rest = qwen3_30b
    assert sum(torch.Size(stack).numel() for stack in stacks) == 28_991_029_248
    assert rest == 1_541_093_376
    assert len(stacks) == 48 * 3 and {stack[0] for stack in stacks} == {128}


def test_golden_sizes(qwen3_30b) -> None:
    """method.md section 1: experts at bits + 0.5 (groups of 64, scale and zero point), the rest in BF16."""
    stacks, rest = qwen3_30b
    gib = {
        bits: (sum(ideal_bytes(stack, Grid(bits, 64, False)) for stack in stacks) + 2 * rest) / GIB
        for bits in (2, 3, 4)
    }
    assert {bits: round(size, 2) for bits, size in gib.items()} == {2: 11.31, 3: 14.68, 4: 18.06}
    assert round(sum(gib.values()), 2) == 44.05
    assert round(3 * gib[4], 2) == 54.17
    assert round(2 * (28_991_029_248 + rest) / GIB, 2) == 56.87


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "width"), [(2, 64), (3, 576), (3, 40), (4, 64), (8, 64)])
def test_stored_bytes_are_those_of_the_tensors(bits: int, width: int, symmetric: bool) -> None:
    grid = Grid(bits, 8, symmetric)
    entries = packed_entries(["a", "b"], (6, width), grid)
    tensors = sum(
        dtype.itemsize * torch.Size(shape).numel()
        for name, (dtype, shape) in entries.items()
        if not name.endswith("weight_shape")
    )
    assert stored_bytes((2, 6, width), grid) == tensors
    if width % 32 == 0:  # then nothing is padded
        assert stored_bytes((2, 6, width), grid) == ideal_bytes((2, 6, width), grid)
