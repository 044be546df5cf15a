"""Turn a dense Llama model into a Mixture of Experts without training: split each FFN, then refit what it
lost.

The way of LLaMA-MoE (arXiv 2406.16554), layer by layer, with the Mixture's own hidden states as inputs:
neurons that are active most often form the shared expert; the others are clustered by co-activation into
experts of equal size; a ridge regression predicts each expert's output norm (the router); a second one refits
the down projections to the dense layer's output under the routing that the finished layer really does.

Shapes: T tokens, H hidden, F FFN neurons, S shared neurons, E experts of M = (F - S) / E neurons, k picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from tasks.console import track
from tasks.contracts import InputError
from tasks.params import SmolLM2MoE

ACTIVE_SHARE = 1 / 4  # a neuron is active on a token when its contribution is among the token's top quarter
CLUSTERING_ROUNDS = 8
ROUTER_RIDGE = 1e-3  # of the mean squared input


@dataclass(frozen=True)
class LayerFit:
    """How well one upcycled layer follows its dense original on the upcycling tokens."""

    layer: int
    router_recall: float  # share of the k experts with the largest outputs that the router picks
    error_split: float  # |moe - dense| / |dense| of the FFN output before the down projections are refitted
    error: float  # the same after
    lis: float  # load imbalance of the layer: E max_j n_j / (T k)


@dataclass(frozen=True)
class Partition:
    """Which neurons of a dense FFN go where."""

    shared: torch.Tensor  # [S]
    experts: torch.Tensor  # [E, M]


def check_shape(params: SmolLM2MoE, width: int, layers: int) -> int:
    """The width M of an expert for an FFN of `width` neurons.

    Raises InputError, naming what would fit, when the neurons that are not shared cannot be split evenly.
    """
    routed = width - params.shared_neurons
    if routed <= 0 or routed % params.experts:
        counts = [count for count in range(2, 65) if routed > 0 and routed % count == 0]
        shares = [
            width - params.experts * size for size in (32, 64, 96, 128) if params.experts * size <= width
        ]
        raise InputError(
            f"smollm2_moe: {width} neurons less {params.shared_neurons} shared ones do not split evenly over "
            f"{params.experts} experts; fitting experts: {counts or 'none'}; "
            f"fitting shared_neurons for {params.experts} experts: {sorted(shares)}"
        )
    if params.moe_layers == "odd" and layers < 2:
        raise InputError(f"moe_layers is 'odd', but the model has {layers} layer; use 'all'")
    return routed // params.experts


@torch.no_grad()
def upcycle(
    dense: LlamaForCausalLM, batches: Sequence[torch.Tensor], params: SmolLM2MoE
) -> tuple[Qwen2MoeForCausalLM, list[LayerFit]]:
    """A Qwen2-MoE model made from `dense`, and how well each of its MoE layers fits.

    batches: token ids [B, S] without padding, the upcycling tokens. The weights are float32 tensors that hold
    bfloat16 values: each layer was fitted behind the rounded layers before it, so that a checkpoint in
    bfloat16 routes and computes as the fit saw it.
    """
    model = _empty_model(dense, params)
    rotary = model.model.rotary_emb
    states = [model.model.embed_tokens(ids) for ids in batches]  # [B, S, H] each
    positions = [torch.arange(ids.shape[1])[None] for ids in batches]
    angles = [rotary(state, position) for state, position in zip(states, positions, strict=True)]
    fits: list[LayerFit] = []
    pairs: list[Any] = list(zip(dense.model.layers, model.model.layers, strict=True))
    dense_layers = set(model.config.mlp_only_layers or [])
    for index, (original, layer) in enumerate(track(pairs, "upcycling layers", len(pairs))):
        for state, angle in zip(states, angles, strict=True):
            normed = layer.input_layernorm(state)
            state += layer.self_attn(normed, position_embeddings=angle, attention_mask=None)[0]
        inputs = torch.cat(
            [layer.post_attention_layernorm(state).flatten(0, 1) for state in states]
        )  # [T, H]
        if index in dense_layers:
            output = layer.mlp(inputs)
        else:
            fit, output = _fit_layer(index, original.mlp, layer.mlp, inputs, params)
            fits.append(fit)
        sizes = [state.shape[0] * state.shape[1] for state in states]
        for state, part in zip(states, output.split(sizes), strict=True):
            state += part.view(state.shape)
    return model, fits


def _empty_model(dense: LlamaForCausalLM, params: SmolLM2MoE) -> Qwen2MoeForCausalLM:
    """The Mixture with everything of `dense` but the FFNs of its MoE layers, rounded to bfloat16 values."""
    source = dense.config
    layers = source.num_hidden_layers
    width = check_shape(params, source.intermediate_size, layers)
    config = Qwen2MoeConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=max(
            params.shared_neurons, 1
        ),  # a width of 0 is not a module: 1, all zero
        num_hidden_layers=layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        hidden_act=source.hidden_act,
        num_experts=params.experts,
        num_experts_per_tok=params.top_k,
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=source.tie_word_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=source.rope_parameters,
        max_position_embeddings=source.max_position_embeddings,
        mlp_only_layers=list(range(0, layers, 2)) if params.moe_layers == "odd" else [],
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    config.router_temperature = params.router_temperature  # logits / temperature are the unflattened logits
    model = Qwen2MoeForCausalLM(config).eval()
    original = dense.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.zero_()
        if name in original:
            tensor.copy_(_rounded(original[name]))
    return model


def _fit_layer(
    index: int, original: Any, block: Any, inputs: torch.Tensor, params: SmolLM2MoE
) -> tuple[LayerFit, torch.Tensor]:
    """Fill one MoE block from the dense FFN `original`; its fit, and its output on `inputs` [T, H]."""
    inner = original.act_fn(original.gate_proj(inputs)) * original.up_proj(inputs)  # [T, F]
    target = original.down_proj(inner)  # [T, H]
    columns = original.down_proj.weight.norm(dim=0)  # [F]
    partition = split_neurons(inner.abs() * columns, params, seed=params.seed * 1000 + index)
    order = torch.cat([partition.shared, partition.experts.flatten()])
    shared, experts = len(partition.shared), params.experts

    gate, up = (_rounded(proj.weight[order]) for proj in (original.gate_proj, original.up_proj))
    gates, ups = (weight[shared:].unflatten(0, (experts, -1)) for weight in (gate, up))  # [E, M, H]
    block.experts.gate_up_proj.copy_(torch.cat([gates, ups], dim=1))
    if shared:
        block.shared_expert.gate_proj.weight.copy_(gate[:shared])
        block.shared_expert.up_proj.weight.copy_(up[:shared])
    inner = original.act_fn(inputs @ gate.T) * (inputs @ up.T)  # [T, F] in the new order
    down = original.down_proj.weight[:, order]  # [H, F]

    norms = _expert_norms(inner[:, shared:], down[:, shared:], experts)  # [T, E]
    block.gate.weight.copy_(_rounded(fit_router(inputs, norms) * params.router_temperature))
    _, weights, picks = block.gate(inputs)  # [T, k] each: the routing that the checkpoint will do
    gating = torch.zeros(len(inputs), experts).scatter(1, picks, weights)

    width = inner.shape[1] - shared
    inner[:, shared:] *= gating.repeat_interleave(width // experts, dim=1)
    down = down.clone()
    down[:, shared:] *= params.top_k  # weights are about 1/k each
    error_split = _relative_error(inner @ down.T, target)
    down += _ridge(inner, target - inner @ down.T, params.ridge).T
    block.experts.down_proj.copy_(_rounded(down[:, shared:].unflatten(1, (experts, -1)).transpose(0, 1)))
    if shared:  # the shared expert's gate is zero, which halves its output: so double it
        block.shared_expert.down_proj.weight.copy_(_rounded(2 * down[:, :shared]))

    output = block(inputs[None])[0]
    load = torch.bincount(picks.flatten(), minlength=experts)
    fit = LayerFit(
        layer=index,
        router_recall=_recall(norms.topk(params.top_k).indices, picks, experts),
        error_split=error_split,
        error=_relative_error(output, target),
        lis=float(experts * load.max() / load.sum()),
    )
    return fit, output


def split_neurons(contribution: torch.Tensor, params: SmolLM2MoE, seed: int) -> Partition:
    """Share out neurons by contribution [T, F] = |h_j| ||W_down[:, j]||."""
    neurons = contribution.shape[1]
    threshold = contribution.topk(int(neurons * ACTIVE_SHARE), dim=1).values[:, -1:]
    active = (contribution >= threshold).float()  # [T, F]
    often = torch.sort(active.sum(dim=0), descending=True, stable=True).indices
    shared = often[: params.shared_neurons].sort().values
    routed = often[params.shared_neurons :].sort().values
    labels = balanced_clusters(active[:, routed].T, params.experts, seed)
    experts = torch.stack([routed[labels == expert] for expert in range(params.experts)])
    return Partition(shared, experts)


def balanced_clusters(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Cosine k-means of points [N, D] with equal cluster sizes N / clusters; labels [N]."""
    points = functional.normalize(points - points.mean(dim=0), dim=1)
    centres = points[_spread_seeds(points, clusters, seed)]
    labels = torch.zeros(len(points), dtype=torch.int64)
    for _ in range(CLUSTERING_ROUNDS):
        likeness = points @ centres.T  # [N, clusters]
        # Against a point's own mean, so that a choosy point goes before one that fits anywhere.
        labels = assign_balanced(likeness - likeness.mean(dim=1, keepdim=True))
        members = functional.one_hot(labels, clusters).to(points.dtype)
        centres = functional.normalize(members.T @ points, dim=1)
    return labels


def assign_balanced(score: torch.Tensor) -> torch.Tensor:
    """Labels [N] for score [N, C], N / C points each: pairs are taken in falling order of score while both
    are free.

    Computed by deferred acceptance: every point applies to its best cluster that has not refused it, every
    cluster keeps its best N / C applicants. As both sides rank pairs by one score, the one stable result is
    the greedy one.
    """
    points, clusters = score.shape
    size = points // clusters
    open_score = score.clone()
    rank = torch.empty(points * clusters, dtype=torch.int64)  # strict ranks: ties go to the lower pair
    rank[torch.sort(score.flatten(), descending=True, stable=True).indices] = torch.arange(points * clusters)
    rank = rank.view(points, clusters)
    while True:
        labels = torch.where(open_score.isneginf(), points * clusters, rank).argmin(dim=1)
        own_rank = rank.gather(1, labels[:, None])[:, 0]
        order = torch.sort(labels * (points * clusters) + own_rank).indices  # by cluster, best first
        counts = torch.bincount(labels, minlength=clusters)
        starts = counts.cumsum(0) - counts
        place = torch.empty(points, dtype=torch.int64)
        place[order] = torch.arange(points) - starts[labels[order]]
        refused = place >= size
        if not refused.any():
            return labels
        open_score[refused, labels[refused]] = -torch.inf


def _spread_seeds(points: torch.Tensor, clusters: int, seed: int) -> list[int]:
    """Starting points chosen as in k-means++: far from those before, by squared cosine distance."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    nearest = points @ points[chosen[0]]
    while len(chosen) < clusters:
        weight = (1 - nearest).clamp(min=0).square() + 1e-9
        chosen.append(int(torch.multinomial(weight, 1, generator=generator)))
        nearest = torch.maximum(nearest, points @ points[chosen[-1]])
    return chosen


def fit_router(inputs: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Rows [E, H] whose logits on inputs [T, H] follow the experts' output norms [T, E], of standard
    deviation 1."""
    rows = _ridge(inputs, norms / norms.square().mean().sqrt(), ROUTER_RIDGE).T
    return rows / (inputs @ rows.T).std()


def _ridge(inputs: torch.Tensor, target: torch.Tensor, strength: float) -> torch.Tensor:
    """argmin over X of |inputs X - target|^2 + strength * mean(diag(inputs' inputs)) |X|^2."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(strength * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs.T @ target)


def _expert_norms(inner: torch.Tensor, down: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E] L2 norm of each expert's output: inner [T, E M], down [H, E M]."""
    parts = zip(inner.chunk(experts, dim=1), down.chunk(experts, dim=1), strict=True)
    return torch.stack([(part @ matrix.T).norm(dim=1) for part, matrix in parts], dim=1)


def _recall(wanted: torch.Tensor, picked: torch.Tensor, experts: int) -> float:
    wanted_mask, picked_mask = (functional.one_hot(picks, experts).sum(dim=1) for picks in (wanted, picked))
    return float((wanted_mask * picked_mask).sum() / wanted_mask.sum())


def _relative_error(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output - target).norm() / target.norm())


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 values, as float32."""
    return weight.bfloat16().float()
