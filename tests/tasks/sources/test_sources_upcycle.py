from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.params import SmolLM2MoE
from tasks.sources import upcycle as under_test
from tasks.sources.upcycle import assign_balanced, balanced_clusters, check_shape, split_neurons, upcycle
from tasks.sources.upcycled_smollm2 import equal_batches, mean_nll
from tests.seeded_models import seeded_tokenizer


def shape(**changes: object) -> SmolLM2MoE:
    values: dict[str, object] = {
        "upcycling_tokens": 1024,
        "check_tokens": 64,
        "moe_layers": "odd",
        "shared_neurons": 32,
        "experts": 8,
        "top_k": 2,
        "router_temperature": 0.01,
        "ridge": 0.01,
        "seed": 0,
    }
    return SmolLM2MoE(**{**values, **changes})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=352,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 352, (24, 48), generator=generator)
    ids[:, 0] = 0
    return [ids[:12], ids[12:, :40]]


def output(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids).logits


def test_a_saved_checkpoint_computes_what_the_fit_saw(
    dense: LlamaForCausalLM, batches: list[torch.Tensor], tmp_path: Path
) -> None:
    model, fits = upcycle(dense, batches, shape())
    before = output(model, batches[0])
    picks: list[list[torch.Tensor]] = [[], []]

    def record(place: int, model: torch.nn.Module) -> list:
        return [
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out: picks[place].append(out[2]))
            for layer in model.model.layers[1::2]
        ]

    hooks = record(0, model)
    output(model, batches[0])
    for hook in hooks:
        hook.remove()
    model.bfloat16().save_pretrained(tmp_path)
    seeded_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    record(1, loaded)
    after = output(loaded, batches[0])
    assert loaded.config.router_temperature == 0.01
    assert [fit.layer for fit in fits] == [1, 3]
    assert all(torch.equal(a, b) for a, b in zip(picks[0], picks[1], strict=True)) and picks[0]
    assert torch.allclose(before, after, atol=1e-5)
    assert before.std() > 0.1


def test_the_refit_brings_each_layer_nearer_to_the_dense_one(
    dense: LlamaForCausalLM, batches: list[torch.Tensor]
) -> None:
    _, fits = upcycle(dense, batches, shape())
    assert all(fit.error < 0.9 * fit.error_split for fit in fits)
    assert all(1 <= fit.lis <= 8 / 2 and 0 < fit.router_recall <= 1 for fit in fits)


def test_the_router_beats_chance(dense: LlamaForCausalLM, batches: list[torch.Tensor]) -> None:
    _, fits = upcycle(dense, batches, shape(moe_layers="all"))
    assert len(fits) == 4
    assert sum(fit.router_recall for fit in fits) / 4 > 2 / 8 + 0.1  # k / E by chance


@pytest.mark.parametrize("shared", [0, 32])
def test_with_every_expert_picked_nothing_is_lost(
    dense: LlamaForCausalLM, batches: list[torch.Tensor], shared: int
) -> None:
    # k = E at a vanishing temperature: every weight is 1/k; down projections times k make a plain sum.
    model, fits = upcycle(
        dense, batches, shape(moe_layers="all", shared_neurons=shared, top_k=8, router_temperature=1e-6)
    )
    difference = output(model, batches[0]) - output(dense, batches[0])
    assert all(fit.error_split < 0.01 and fit.lis == pytest.approx(1) for fit in fits)  # bfloat16's rounding
    assert difference.norm() < 0.05 * output(dense, batches[0]).norm()


def test_without_shared_neurons_the_shared_expert_is_silent(
    dense: LlamaForCausalLM, batches: list[torch.Tensor]
) -> None:
    model, _ = upcycle(dense, batches, shape(shared_neurons=0))
    block = model.model.layers[1].mlp
    assert not any(parameter.any() for parameter in block.shared_expert.parameters())  # pyright: ignore


def test_routing_weights_are_nearly_uniform_and_keep_their_order(
    dense: LlamaForCausalLM, batches: list[torch.Tensor]
) -> None:
    model, _ = upcycle(dense, batches, shape())
    router = model.model.layers[1].mlp.gate
    logits, weights, picks = router(torch.randn(50, 48, generator=torch.Generator().manual_seed(1)))  # pyright: ignore
    assert (weights - 0.5).abs().max() < 0.02
    assert torch.equal(picks, (logits / 0.01).topk(2).indices)  # as the unflattened logits order them


def test_equal_seeds_give_equal_models(dense: LlamaForCausalLM, batches: list[torch.Tensor]) -> None:
    first, again, other = (upcycle(dense, batches, shape(seed=seed))[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def greedy(score: torch.Tensor) -> list[int]:
    """The plain twin of `assign_balanced`: pairs in falling order of score, while both sides are free."""
    points, clusters = score.shape
    room = [points // clusters] * clusters
    labels = [-1] * points
    for pair in torch.sort(score.flatten(), descending=True, stable=True).indices.tolist():
        point, cluster = divmod(pair, clusters)
        if labels[point] < 0 and room[cluster]:
            labels[point] = cluster
            room[cluster] -= 1
    return labels


def test_balanced_assignment_by_hand() -> None:
    # Falling: (0,a) .9, (1,a) .8 -> a is full; (2,a) .7 refused, (3,a) .6 refused -> 2 and 3 take b.
    score = torch.tensor([[0.9, 0.1], [0.8, 0.5], [0.7, 0.2], [0.6, 0.3]])
    assert assign_balanced(score).tolist() == [0, 0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    clusters=st.integers(2, 6),
    size=st.integers(1, 7),
    levels=st.integers(2, 1000),
    seed=st.integers(0, 10**6),
)
def test_balanced_assignment_is_the_greedy_one(clusters: int, size: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(
        levels, (clusters * size, clusters), generator=generator
    ).float()  # few levels: many ties
    labels = assign_balanced(score)
    assert labels.tolist() == greedy(score)
    assert torch.bincount(labels, minlength=clusters).tolist() == [size] * clusters


def test_clusters_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(40) % 4
    points = functional.one_hot(truth, 4).float() + 0.1 * torch.randn(40, 4, generator=generator)
    labels = balanced_clusters(points, 4, seed=0)
    assert all(len(set(labels[truth == group].tolist())) == 1 for group in range(4))


def test_often_active_neurons_are_shared_and_the_rest_is_split_once() -> None:
    contribution = torch.rand(200, 16, generator=torch.Generator().manual_seed(0))
    contribution[:, [3, 7]] += 1  # in the top quarter (4 of 16) of every token
    partition = split_neurons(contribution, shape(shared_neurons=2, experts=7), seed=0)
    assert partition.shared.tolist() == [3, 7]
    everything = torch.cat([partition.shared, partition.experts.flatten()])
    assert sorted(everything.tolist()) == list(range(16)) and partition.experts.shape == (7, 2)


def test_shapes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    assert check_shape(shape(shared_neurons=512, experts=16, top_k=4), 1536, 30) == 64
    with pytest.raises(
        InputError, match=r"fitting experts: \[2, 3, 4, .*fitting shared_neurons for 7 experts"
    ):
        check_shape(shape(shared_neurons=576, experts=7), 1536, 30)
    with pytest.raises(InputError, match="do not split evenly"):
        check_shape(shape(shared_neurons=1536), 1536, 30)
    with pytest.raises(InputError, match="use 'all'"):
        check_shape(shape(), 96, 1)


def test_batches_hold_every_sequence_once_without_padding() -> None:
    sequences = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    batches = equal_batches(sequences)
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(sequences)


def test_mean_nll_leaves_out_the_prediction_from_position_0(dense: LlamaForCausalLM) -> None:
    sequences = [[0, 5, 9, 31], [0, 7]]
    logits = output(dense, torch.tensor([sequences[0]]))[0].log_softmax(-1)
    expected = -(logits[1, 9] + logits[2, 31]) / 2  # the second sequence has no other prediction
    assert mean_nll(dense, sequences) == pytest.approx(float(expected), rel=1e-5)


def test_ridge_is_least_squares_as_its_strength_vanishes() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, truth = torch.randn(50, 4, generator=generator), torch.randn(4, 3, generator=generator)
    assert torch.allclose(under_test._ridge(inputs, inputs @ truth, 1e-9), truth, atol=1e-4)
