"""Every stage's core on a tiny seeded checkpoint of every model family, with what must hold whatever the layout."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

from tasks import (
    build_variants,
    calibrate_fwp,
    decompose_damage,
    measure_experts,
    quantize_instances,
    score_requests,
)
from tasks.contracts import (
    ExpertStatistics,
    Fragility,
    LayerPlan,
    PrefillRouting,
    ReplicationPlan,
    TokenScores,
    read_json,
    write_json,
)
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import head_logits, prefill
from tasks.moe.registry import FAMILIES, moe_layers
from tasks.moe.replicas import install_physical_experts, model_hash, physical_load
from tasks.moe.stored_experts import stored_layers
from tasks.moe.tensors import CheckpointTensors, auto_class
from tasks.params import MeasureExperts, Variant, load_params
from tasks.risk.decomposition import TERMS
from tasks.risk.scoring import read_requests, score
from tests.seeded_models import VOCABULARY, seeded_checkpoint

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")
# Blocks, experts in each, picks per token and matrices per expert of each family's seeded checkpoint.
SHAPES = {
    "qwen3_moe": (3, 8, 2, 3),
    "qwen2_moe": (2, 8, 2, 3),
    "olmoe": (3, 8, 2, 3),
    "mixtral": (3, 8, 2, 3),
    "deepseek_v2": (2, 8, 2, 3),
    "deepseek_v3": (2, 8, 2, 3),
    "gpt_oss": (3, 8, 2, 3),
    "granitemoe": (3, 8, 2, 3),
    "switch_transformers": (3, 8, 1, 2),
    "llama_moe": (3, 8, 2, 3),
    "deepseek": (2, 8, 2, 3),
}
# Whose quantized experts plain transformers loads.
EXPORTED = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "switch_transformers")
BATCH_TOKENS = 128
CALIBRATION = [30, 24, 2, 11]  # tokens of each sequence
VARIANT = Variant(
    replicas=1, replica_bits=8, least_important_bits=4, group_size=32, dispatch="round_robin", seed=0
)


def quantizing(**changes: Any) -> Any:
    return PARAMS.quantize_instances.model_copy(update={"method": "rtn", "group_size": 32, **changes})


class Workshop:
    """One family's checkpoint and what the stages make of it, each when it is first asked for."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.family = folder, family
        self.blocks, self.experts, self.top_k, self.matrices = SHAPES[family]
        self.reference = seeded_checkpoint(folder / "reference", family)
        self.requests = folder / "requests"
        self.requests.mkdir()
        random = np.random.default_rng(0)

        def ids(length: int) -> list[int]:
            return random.integers(2, VOCABULARY, size=length).tolist()

        self.calibration = [ids(length) for length in CALIBRATION]
        names = [f"c{row}" for row in range(len(CALIBRATION))]
        pd.DataFrame({"id": names, "ids": self.calibration}).to_parquet(self.requests / "calibration.parquet")
        rows = [
            (f"r{row}", "ab"[row % 2], ("fit", "holdout")[row // 2 % 2], ids(6 + row), ids(3 + row % 4))
            for row in range(16)
        ]
        columns = ["id", "class", "split", "prompt_ids", "response_ids"]
        self.requests_file = self.requests / "requests.parquet"
        pd.DataFrame(rows, columns=columns).to_parquet(self.requests_file)

    @cached_property
    def model(self) -> Any:
        return load_model(self.reference)

    @cached_property
    def instance(self) -> tuple[Path, dict[str, Any]]:
        """W3, asymmetric."""
        folder = self.folder / "W3"
        return folder, quantize_instances.run(self.reference, folder, 3, quantizing())

    @cached_property
    def measured(self) -> tuple[ExpertStatistics, dict[str, Any]]:
        out, metrics = self.folder / "experts", self.folder / "experts.json"
        params = MeasureExperts(capacity_quantile=0.95, lis_batch_size=2)
        measure_experts.run(self.reference, self.requests, out, metrics, params, BATCH_TOKENS)
        return ExpertStatistics.load_from(out / "experts.safetensors"), read_json(metrics)

    @cached_property
    def scores(self) -> Path:
        """The scores of the reference and of W3."""
        folder = self.folder / "scores"
        for name, model in (("reference", self.reference), ("W3", self.instance[0])):
            metrics = self.folder / f"{name}.json"
            score_requests.run(name, model, self.requests_file, folder, metrics, "float32", BATCH_TOKENS)
        return folder

    @cached_property
    def decomposed(self) -> tuple[Path, dict[str, Any]]:
        """The damage of W3, decomposed."""
        _ = self.instance
        out = self.folder / "decomposition"
        params = PARAMS.decompose_damage.model_copy(
            update={"holdout_requests": 4, "swap_tokens": 30, "super_experts": 1, "pairs": 2}
        )
        return out, decompose_damage.run(
            self.reference, self.folder, self.requests, ["W3"], params, "kl", "response", BATCH_TOKENS,
            out, self.folder / "decomposition.json",
        )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small are slower on two threads, far slower where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def shop(request, tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp(request.param), request.param)


def test_the_table_of_families_is_complete():
    assert sorted(SHAPES) == sorted(FAMILIES)


def test_layers_are_found_and_their_matrices_are_the_checkpoint(shop):
    layers = moe_layers(shop.model)
    stored = stored_layers(shop.model, CheckpointTensors(shop.reference))
    assert len(layers) == len(stored) == shop.blocks
    numbers = [layer.layer for layer in layers]
    assert numbers == sorted(set(numbers))
    for layer, own in zip(layers, stored, strict=True):
        assert (layer.num_experts, layer.top_k) == (shop.experts, shop.top_k)
        assert layer.router_rows().shape == (shop.experts, 64)
        views = layer.matrices()
        assert [matrix.name for matrix in own.matrices] == list(views)
        assert len(views) == shop.matrices
        for matrix in own.matrices:
            assert torch.equal(matrix.read(shop.reference, slice(0, shop.experts)), views[matrix.name])


def test_quantize_every_matrix_and_load_what_was_written(shop):
    folder, manifest = shop.instance
    assert manifest["blocks"] == shop.blocks * shop.experts
    assert manifest["matrices"] == shop.blocks * shop.experts * shop.matrices
    views = [view for layer in moe_layers(shop.model) for view in layer.matrices().values()]
    assert manifest["expert_parameters"] == sum(view.numel() for view in views)
    assert 0 < manifest["relative_error"] < 0.3  # round-to-nearest at 3 bits, normal weights: about 0.2
    instance = load_model(folder)  # every key exactly once, or InputError
    for before, after in zip(moe_layers(shop.model), moe_layers(instance), strict=True):
        for name, view in after.matrices().items():
            rows = view.reshape(-1, 32)
            assert max(len(row.unique()) for row in rows) <= 8  # 3 bits in groups of 32 (in = 32 or 64)
            error = (view - before.matrices()[name]).norm() / view.norm()
            assert 0.02 < error < 0.3
    routers = [layer.router_rows() for model in (shop.model, instance) for layer in moe_layers(model)]
    for before, after in zip(routers[: shop.blocks], routers[shop.blocks :], strict=True):
        assert torch.equal(before, after)


def test_gptq_calibrates_on_the_tokens_that_measuring_counts(shop):
    gptq = PARAMS.quantize_instances.gptq.model_copy(
        update={"inputs": "reference", "max_fallback_share": 0.9}
    )
    params = quantizing(method="gptq", gptq=gptq)
    folder = shop.folder / "gptq"
    manifest = quantize_instances.run(shop.reference, folder, 3, params, requests=shop.requests)
    load = shop.measured[0].load
    assert manifest["expert_tokens"] == load.tolist()
    assert manifest["fallbacks"] == (load == 0).sum()
    assert manifest["blocks"] == shop.blocks * shop.experts
    assert 0 < manifest["relative_error"] < 0.4
    load_model(folder)


def test_measure_counts_every_pick_or_says_that_it_was_dropped(shop):
    statistics, metrics = shop.measured
    load = statistics.load
    assert load.shape == (shop.blocks, shop.experts)
    if shop.family == "switch_transformers":
        # The encoder's two layers read the first half of each sequence, 15 + 12 + 1 + 5 tokens; the decoder's
        # layer the start token and the rest but the last: 15 + 12 + 1 + 6.
        assert (load.sum(axis=1) + metrics["dropped"]).tolist() == [33, 33, 34]
        assert sum(metrics["dropped"]) > 0
    else:
        assert (load.sum(axis=1) == sum(CALIBRATION) * shop.top_k).all()
        assert "dropped" not in metrics
    assert np.isfinite(statistics.importance).all()
    assert ((statistics.importance > 0) == (load > 0)).all()  # an expert without tokens has no inputs
    assert min(metrics["lis"]) >= 1 and metrics["nll_reference"] > 0


def test_a_variant_whose_replicas_are_copies_is_its_source(shop):
    model = load_model(shop.reference)
    before = hidden_states(model, shop.calibration)
    experts = list(range(shop.experts))
    layers = [
        LayerPlan(layer.layer, [*experts, 0, 3, 3], [0] * (shop.experts + 3)) for layer in moe_layers(model)
    ]
    plan = ReplicationPlan(model_hash(model), 32, "round_robin", 0, layers)
    install_physical_experts(model, plan, {})
    after = hidden_states(model, shop.calibration)
    # An expert's tokens are split over its copies: the same products, in matrices of other heights.
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for load, own in zip(physical_load(model), shop.measured[0].load, strict=True):
        logical = np.bincount([*experts, 0, 3, 3], weights=load)
        assert (logical == own).all()
        assert load[shop.experts :].sum() > 0


def test_build_a_variant_that_counts_what_its_copies_computed(shop):
    _ = shop.measured
    out, metrics = shop.folder / "rq", shop.folder / "rq.json"
    build_variants.run(
        "rq",
        VARIANT,
        shop.reference,
        shop.requests,
        shop.folder / "experts",
        out,
        metrics,
        BATCH_TOKENS,
    )
    found = read_json(metrics)
    assert found["size_bytes"] <= found["size_bytes_before"]
    assert min(found["lis_physical"]) >= 1 and np.isfinite(found["nll"])
    if shop.family != "switch_transformers":  # there other routes may drop other tokens
        picks = np.sum(found["load_before"], axis=1)
        assert (np.sum(found["load_after"], axis=1) == picks).all()
    again = load_model(out, reference=shop.reference)
    hidden_states(again, shop.calibration)
    assert [load.tolist() for load in physical_load(again)] == found["load_after"]


def test_score_what_is_predicted_and_nothing_else(shop):
    reference, instance = (TokenScores.load_from(shop.scores / name) for name in ("reference", "W3"))
    requests = read_requests(shop.requests_file, VOCABULARY)
    for row, prompt in enumerate(reference.prompt_length.tolist()):
        length, start = int(np.diff(reference.offset)[row]), int(reference.offset[row])
        parts = {part: reference.scored(row, part) for part in ("prompt", "response")}
        assert parts["response"] == slice(start + prompt - 1, start + length)
        # Position 0 predicts too little to count; of Switch the encoder reads half of the prompt unpredicted.
        unpredicted = prompt // 2 - 1 if shop.family == "switch_transformers" else 1
        assert parts["prompt"] == slice(start + max(unpredicted, 1), start + prompt - 1)
        for part in parts.values():
            assert np.isfinite(reference.nll[part]).all() and np.isfinite(instance.nll[part]).all()
            assert (instance.kl[part] >= 0).all()
    everything = [instance.scored(row, part) for row in range(16) for part in ("prompt", "response")]
    assert max(instance.kl[part].max() for part in everything) > 1e-6  # 3 bits do some damage
    _, _, own = score(shop.model, requests, "reference", BATCH_TOKENS)
    with_itself, _, _ = score(shop.model, requests, "reference", BATCH_TOKENS, own)
    assert max(with_itself.kl[part].max() for part in everything) == 0
    assert all(np.array_equal(with_itself.nll[part], reference.nll[part]) for part in everything)


def test_a_loss_is_what_the_plain_model_says(shop):
    """Request r9 alone through the model's own forward."""
    reference = TokenScores.load_from(shop.scores / "reference")
    requests = read_requests(shop.requests_file, VOCABULARY)
    ids, prompt = torch.tensor([requests.sequences[9]]), int(requests.prompt_length[9])
    model = auto_class(shop.model.config).from_pretrained(shop.reference).eval()
    with torch.no_grad():
        if shop.family == "switch_transformers":
            split = prompt // 2
            start = torch.tensor([[model.config.decoder_start_token_id]])
            decoder_ids = torch.cat([start, ids[:, split:-1]], dim=1)
            logits = model(input_ids=ids[:, :split], decoder_input_ids=decoder_ids).logits[0]
        else:
            split, logits = 1, model(input_ids=ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, split:], reduction="none").numpy()
    part = reference.scored(9, "response")
    np.testing.assert_allclose(reference.nll[part], losses[prompt - split :], rtol=1e-3, atol=1e-4)


def test_fwp_from_the_prefill_and_its_calibration(shop):
    _ = shop.measured
    routing = PrefillRouting.load_from(shop.scores / "W3")
    assert routing.index.shape[1:] == (shop.blocks, shop.top_k)
    assert (routing.visited is None) == (shop.family != "switch_transformers")
    assert (routing.gate_prob[1:] <= 1).all() and (routing.gate_prob >= 0).all()
    params = PARAMS.calibrate_fwp.model_copy(
        update={"scorer": "W3", "bootstrap": 10, "splits": 2, "folds": 2, "min_tokens": 3}
    )
    metrics = calibrate_fwp.run(
        shop.requests_file,
        shop.scores,
        shop.folder / "experts" / "experts.safetensors",
        shop.decomposed[0],
        ["W3"],
        params,
        shop.folder / "fwp",
        shop.folder / "fwp.json",
    )
    predictions = pd.read_parquet(shop.folder / "fwp" / "predictions.parquet")
    for column in ("log_ppl", "log_fwp_gate_prob", "log_fwp_router_row_norm", "routing_frequency", "kl_W3"):
        assert np.isfinite(predictions[column]).all()
    assert not np.array_equal(predictions["log_fwp_gate_prob"], predictions["log_ppl"])
    for strength in metrics["strengths"].values():
        assert strength["std_weight"] > 1e-3
    if shop.family == "switch_transformers":
        assert metrics["absent_signals"] == ["separable", "measured"]
    else:
        assert metrics["absent_signals"] == [] and "measured_W3" in metrics["strengths"]
        assert np.isfinite(predictions["separable_W3"]).all() and predictions["separable_W3"].std() > 0


def test_damage_is_decomposed_or_the_metrics_say_why_not(shop):
    out, metrics = shop.decomposed
    arrays = Fragility.load_from(out).arrays
    if shop.family == "switch_transformers":
        assert metrics["supported"] is False and list(arrays) == ["router_row_norm"]
        return
    terms = pd.read_parquet(out / "terms.parquet")
    assert len(terms) == 6 and (terms["total"] > 0).all()  # 2 fit and 4 holdout requests
    assert np.allclose(terms[list(TERMS)].sum(axis=1), terms["total"])
    untouched = (
        shop.measured[0].load == 0
    ).sum()  # its tokens, but for the last of each sequence, which predicts nothing
    assert (arrays["output_error_W3"] > 0).sum() <= shop.blocks * shop.experts - untouched
    assert (arrays["taylor_kl_W3"] >= 0).all() and (arrays["taylor_kl_W3"] > 0).any()


def test_an_exported_instance_is_the_same_in_plain_transformers(shop):
    folder = shop.folder / "exported"
    reference = in_bfloat16(shop.reference, shop.folder / "bfloat16")
    manifest = quantize_instances.run(reference, folder, 4, quantizing(symmetric=True))
    assert manifest["exportable"] is (shop.family in EXPORTED)
    ours = load_model(folder, dtype=torch.bfloat16)
    if shop.family not in EXPORTED:  # plain transformers has no loader: nothing there may look as if it had
        assert manifest["export"] == f"not for export: {FAMILIES[shop.family].not_exportable}"
        assert not (folder / "model.safetensors.index.json").exists()
        assert "quantization_config" not in read_json(folder / "config.json")
        return
    plain, info = auto_class(ours.config).from_pretrained(
        folder,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        dtype=torch.bfloat16,
        experts_implementation="expertpool_loop",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    pairs = zip(hidden_states(ours, shop.calibration), hidden_states(plain, shop.calibration), strict=True)
    for one, other in pairs:
        assert (head_logits(ours, one) - head_logits(plain, other)).abs().max() == 0


def in_bfloat16(reference: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose tensors are bfloat16, as published ones are."""
    shutil.copytree(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "dtype": "bfloat16"}, digits=17)
    return folder


def hidden_states(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The final hidden states [n, H] that predict a token, of each sequence."""
    found = {}
    for batch in prefill(model, sequences, BATCH_TOKENS, "test"):
        for at, row in enumerate(batch.rows):
            found[row] = batch.hidden[at, :-1][batch.predicted[at, 1:]]
    return [found[row] for row in range(len(sequences))]
