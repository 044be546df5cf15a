"""What the quantizer benchmark quantizes: stacks of expert matrices with the inputs that reach them.

synthetic   a layer with the statistics that make quantizing hard, at a part of Qwen3-30B-A3B's size: heavy-tailed
            weights with rows and input channels of unlike size, hidden states that are correlated, heavy-tailed and
            clustered, and a router that follows the clusters, so that some experts see few tokens
embedded    layers of the project's own reference (artifacts/reference) on its packaged texts

Calibration and held-out tokens are different tokens; each expert's inputs are those that its router sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

REFERENCE = Path("artifacts/reference")
TEXT_TOKENS = 384  # of one packaged text


@dataclass(frozen=True)
class Shape:
    """Sizes of a synthetic layer."""

    experts: int
    top_k: int
    hidden: int
    width: int  # of an expert
    calibration_tokens: int
    held_out_tokens: int


QUALITY = Shape(6, 2, 1024, 384, 8192, 4096)  # Qwen3-30B-A3B's ratio of width to hidden, halved
SPEED = Shape(4, 1, 2048, 768, 4096, 1024)  # its own matrices, four experts of them
QUICK = Shape(4, 2, 128, 64, 1024, 512)


@dataclass(frozen=True)
class Problem:
    """A stack of matrices that read the same inputs; gate and up are one, their rows after each other."""

    data: str  # problems of one data set are averaged
    matrix: str
    parts: tuple[int, ...]  # rows of each matrix in the stack
    weights: torch.Tensor  # [E, out, in] bfloat16
    tokens: torch.Tensor  # [E] int64, calibration tokens that reached each expert
    own: torch.Tensor  # [E, in, in] float32, sum of x x^T over these
    everyone: torch.Tensor  # [E, in, in] float32, the same had every calibration token reached every expert
    calibration_tokens: int
    held_out: list[torch.Tensor]  # [E] of [n, in] float32, inputs of held-out tokens

    @property
    def name(self) -> str:
        return f"{self.data} {self.matrix}"


def second_moment(inputs: torch.Tensor) -> torch.Tensor:
    """[in, in] float32 sum of x x^T over inputs [n, in]."""
    return inputs.T @ inputs


def layer_problems(
    data: str,
    prefix: str,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    calibration: tuple[torch.Tensor, torch.Tensor],
    held_out: tuple[torch.Tensor, torch.Tensor],
) -> list[Problem]:
    """The two problems of a layer with SiLU-gated experts [E, out, in]; `prefix` tells layers of one data set apart.

    calibration, held_out: hidden states [T, H] float32 and the experts they are sent to [T, k].
    """
    experts = len(gate)
    hidden, index = calibration

    def inner(expert: int, states: torch.Tensor) -> torch.Tensor:
        return functional.silu(states @ gate[expert].float().T) * (states @ up[expert].float().T)

    mine = [(index == expert).any(dim=1) for expert in range(experts)]
    theirs = [held_out[0][(held_out[1] == expert).any(dim=1)] for expert in range(experts)]
    tokens = torch.stack([chosen.sum() for chosen in mine])
    shared = second_moment(hidden).expand(experts, -1, -1)
    own_inner, every_inner = [], []
    for expert in range(experts):
        values = inner(expert, hidden)
        every_inner.append(second_moment(values))
        own_inner.append(second_moment(values[mine[expert]]))
    return [
        Problem(
            data,
            f"{prefix}gate_up",
            (gate.shape[1], up.shape[1]),
            torch.cat([gate, up], dim=1).to(torch.bfloat16),
            tokens,
            torch.stack([second_moment(hidden[chosen]) for chosen in mine]),
            shared,
            len(hidden),
            theirs,
        ),
        Problem(
            data,
            f"{prefix}down",
            (down.shape[1],),
            down.to(torch.bfloat16).contiguous(),
            tokens,
            torch.stack(own_inner),
            torch.stack(every_inner),
            len(hidden),
            [inner(expert, states) for expert, states in enumerate(theirs)],
        ),
    ]


def heavy_tailed(shape: tuple[int, ...], freedom: int, generator: torch.Generator) -> torch.Tensor:
    """Student-t values of unit variance."""
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((*shape, freedom), generator=generator).square().sum(-1) / freedom
    return normal / chi.sqrt() * ((freedom - 2) / freedom) ** 0.5


def synthetic_weights(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """[E, out, in] bfloat16: Student-t values of eight degrees of freedom, rows of unlike size (factor 1 + |n|/2),
    one input channel in fifty twice as large."""
    experts, rows, width = shape
    rows_scale = 1 + 0.5 * torch.randn(experts, rows, 1, generator=generator).abs()
    channels = 1 + (torch.rand(experts, 1, width, generator=generator) < 0.02).float()
    values = torch.stack([heavy_tailed((rows, width), 8, generator) for _ in range(experts)])
    return (0.02 * values * rows_scale * channels).to(torch.bfloat16)


def synthetic_inputs(
    shape: Shape, generator: torch.Generator
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Calibration and held-out (hidden states [T, H], experts [T, k]) of a synthetic layer.

    A hidden state is a centre of its cluster plus noise whose spectrum falls off, normalised to unit mean square and
    multiplied by log-normal channel gains. The router prefers a token's cluster and, from expert to expert, less:
    the first expert sees half of the tokens, the last one in some hundred.
    """
    count = shape.calibration_tokens + shape.held_out_tokens
    hidden = shape.hidden
    frequency = torch.arange(1, shape.experts + 1).float().pow(-2)
    cluster = torch.multinomial(frequency, count, replacement=True, generator=generator)
    centres = torch.randn(shape.experts, hidden, generator=generator)
    common = torch.randn(hidden, generator=generator)
    spectrum = torch.arange(1, hidden + 1).float().pow(-0.4)
    mixing = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    noise = heavy_tailed((count, hidden), 6, generator) * (spectrum / spectrum.square().mean().sqrt())
    states = 0.5 * common + 0.7 * centres[cluster] + noise @ mixing
    states = states / states.square().mean(dim=1, keepdim=True).sqrt()
    states = states * torch.exp(0.7 * torch.randn(hidden, generator=generator))
    favour = torch.linspace(0, -1.5, shape.experts)
    noise = 0.5 * torch.randn(count, shape.experts, generator=generator)
    preference = functional.one_hot(cluster, shape.experts) + favour + noise
    index = preference.topk(shape.top_k, dim=1).indices
    split = shape.calibration_tokens
    return (states[:split], index[:split]), (states[split:], index[split:])


def synthetic(data: str, shape: Shape, seed: int = 0) -> list[Problem]:
    """The problems of a seeded synthetic layer."""
    generator = torch.Generator().manual_seed(seed)
    up_shape = (shape.experts, shape.width, shape.hidden)
    gate, up = synthetic_weights(up_shape, generator), synthetic_weights(up_shape, generator)
    down = synthetic_weights((shape.experts, shape.hidden, shape.width), generator)
    return layer_problems(data, "", gate, up, down, *synthetic_inputs(shape, generator))


def embedded(
    folder: Path, layers: Iterable[int], calibration_tokens: int, held_out_tokens: int
) -> list[Problem]:
    """The problems of some MoE layers (by their place among these) of a reference with SiLU-gated experts.

    Calibration texts of the packaged corpus calibrate, its benchmark texts are held out.
    """
    from tasks.moe.checkpoint import load_model, load_tokenizer
    from tasks.moe.registry import moe_layers
    from tasks.sources import packaged

    model, tokenizer = load_model(folder), load_tokenizer(folder)
    found = [moe_layers(model)[place] for place in layers]
    decoder: Any = model.base_model
    decoder.layers = decoder.layers[: max(layer.layer for layer in found) + 1]  # run no further

    def keep(states: list[torch.Tensor]) -> Callable[[Any, Any], None]:
        return lambda module, inputs: states.append(inputs[0][0].clone())

    def hidden(role: str, wanted: int) -> list[torch.Tensor]:
        """What each layer's experts and router read, [T, H]."""
        seen: list[list[torch.Tensor]] = [[] for _ in found]
        hooks = [
            model.get_submodule(layer.name).register_forward_pre_hook(keep(states))
            for layer, states in zip(found, seen, strict=True)
        ]
        with torch.inference_mode():
            for ids in _token_ids(packaged.texts(role), tokenizer, wanted):
                decoder(input_ids=torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return [torch.cat(states).clone() for states in seen]

    calibration = hidden("calibration", calibration_tokens)
    held_out = hidden("benchmark", held_out_tokens)
    problems = []
    for layer, fitted, unseen in zip(found, calibration, held_out, strict=True):
        rows, top_k = layer.router_rows().float(), layer.top_k
        matrices = {name: matrix.detach().clone() for name, matrix in layer.matrices().items()}
        problems += layer_problems(
            "embedded",
            f"layer {layer.layer} ",
            matrices["gate_proj"],
            matrices["up_proj"],
            matrices["down_proj"],
            (fitted, (fitted @ rows.T).topk(top_k, dim=1).indices),
            (unseen, (unseen @ rows.T).topk(top_k, dim=1).indices),
        )
    return problems


def _token_ids(texts: Iterable[tuple[str, str]], tokenizer: Any, wanted: int) -> Iterator[list[int]]:
    for _, text in texts:
        if wanted <= 0:
            return
        ids = tokenizer(text)["input_ids"][: min(TEXT_TOKENS, wanted)]
        if len(ids) > 1:
            wanted -= len(ids)
            yield ids
