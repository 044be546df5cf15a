import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from tasks import measure_experts
from tasks.build_variants import check_name, run
from tasks.contracts import ExpertStatistics, InputError, ReplicationPlan
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import physical_experts, physical_load
from tasks.moe.tensors import CheckpointTensors
from tasks.params import MeasureExperts, Variant, check_params
from tests.seeded_models import VOCABULARY, seeded_checkpoint
from tests.tiny_run import small_params

LENGTHS = [12, 3, 25, 40, 18]
VARIANT = Variant(
    replicas=1, replica_bits=8, least_important_bits=4, group_size=32, dispatch="round_robin", seed=0
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A bfloat16 reference with its calibration tokens and expert statistics."""
    folder = tmp_path_factory.mktemp("variants")
    model = load_model(seeded_checkpoint(folder / "float32", "qwen2_moe"), dtype=torch.bfloat16)
    model.save_pretrained(folder / "reference")
    random = np.random.default_rng(0)
    (folder / "requests").mkdir()
    ids = [random.integers(2, VOCABULARY, size=length) for length in LENGTHS]
    frame = pd.DataFrame({"id": [str(row) for row in range(len(ids))], "ids": ids})
    frame.to_parquet(folder / "requests" / "calibration.parquet")
    measure_experts.run(
        folder / "reference", folder / "requests", folder / "experts", folder / "experts_metrics.json",
        MeasureExperts(capacity_quantile=0.95, lis_batch_size=2), 80,
    )  # fmt: skip
    return folder


def build(inputs, out, variant=VARIANT, experts="experts", batch_tokens=80):
    run(
        "rq",
        variant,
        inputs / "reference",
        inputs / "requests",
        inputs / experts,
        out / "rq",
        out / "rq.json",
        batch_tokens,
    )
    return json.loads((out / "rq.json").read_text())


@pytest.fixture(scope="module")
def built(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    return out, build(inputs, out)


def test_bytes_are_counted_from_what_is_stored_and_stay_within_those_of_before(inputs, built):
    out, metrics = built
    plan = ReplicationPlan.load_from(out / "rq" / "plan.json")
    manifest = json.loads((out / "rq" / "manifest.json").read_text())
    with safe_open(out / "rq" / "physical.safetensors", "pt") as source:
        names = list(source.keys())
        packed = sum(source.get_tensor(name).nbytes for name in names)
    checkpoint = CheckpointTensors(inputs / "reference")
    before = sum(checkpoint.get(name).nbytes for name in checkpoint.files)
    # originals that are quantized leave; an expert is 3 matrices of 64 x 32 weights in bfloat16
    leave = sum(bits > 0 for own in plan.layers for bits in own.bits[:8]) * 3 * 64 * 32 * 2
    assert metrics["size_bytes_before"] == before
    assert metrics["size_bytes"] == before - leave + packed <= before
    assert manifest["packed_bytes"] == packed
    # 8 bits: 64 * 32 codes, 64 groups of 4 bytes, a shape of 16 bytes, each of 3 matrices; 4 bits: half the
    # codes
    replica, quantized = 3 * (2048 + 256 + 16), 3 * (1024 + 256 + 16)
    assert packed == 2 * replica + manifest["quantized_originals"] * quantized
    # the replica costs 6960, a quantized original saves 12288 - 3888 = 8400: one pays
    assert metrics["quantized_originals"] == [1, 1]
    assert metrics["stored_bits"] == pytest.approx(
        8 * manifest["expert_bytes"] / (2 * 8 * 3 * 64 * 32), rel=1e-5
    )
    # no floating copy of an expert, and every packed one is in the plan
    assert {name.rsplit(".", 1)[1] for name in names} == {
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
    }  # fmt: skip
    assert len(names) == (2 + 2) * 3 * 4


def test_the_plan_replicates_the_heaviest_and_quantizes_the_least_important(inputs, built):
    plan = ReplicationPlan.load_from(built[0] / "rq" / "plan.json")
    statistics = ExpertStatistics.load_from(inputs / "experts" / "experts.safetensors")
    for own, load, importance in zip(plan.layers, statistics.load, statistics.importance, strict=True):
        heavy = int(load.argmax())
        assert own.physical_to_logical == [*range(8), heavy]
        light = min((expert for expert in range(8) if expert != heavy), key=lambda expert: importance[expert])
        assert own.bits == [4 if expert == light else 0 for expert in range(8)] + [8]


def test_loading_the_folder_gives_the_weights_the_counts_and_the_loss_of_the_step(inputs, built):
    out, metrics = built
    model = load_model(out / "rq", reference=inputs / "reference")
    plain = load_model(inputs / "reference")
    plan = ReplicationPlan.load_from(out / "rq" / "plan.json")
    for own, physical, layer in zip(plan.layers, physical_experts(model), moe_layers(plain), strict=True):
        for name, views in physical.matrices().items():
            for expert, (logical, bits) in enumerate(zip(own.physical_to_logical, own.bits, strict=True)):
                original = layer.matrices()[name][logical]
                if bits == 0:
                    assert torch.equal(views[expert], original)
                else:  # half a step of a group's range, and the 16-bit rounding of the step
                    step = (original.amax() - original.amin()) / (2**bits - 1)
                    assert 0 < (views[expert] - original).abs().max() <= 1.1 * step
    sequences = [ids.tolist() for ids in pd.read_parquet(inputs / "requests" / "calibration.parquet")["ids"]]
    list(prefill(model, sequences, 80, "again"))
    assert np.stack(physical_load(model)).tolist() == metrics["load_after"]


def test_lis_is_that_of_the_counted_tokens(built):
    _, metrics = built
    for layer in range(2):
        before, after = metrics["load_before"][layer], metrics["load_after"][layer]
        assert sum(before) == sum(after) == sum(LENGTHS) * 2
        assert metrics["lis_before"][layer] == pytest.approx(8 * max(before) / sum(before), rel=1e-5)
        assert metrics["lis_logical"][layer] == pytest.approx(8 * max(after) / sum(after), rel=1e-5)
        assert metrics["lis_physical"][layer] == pytest.approx(9 * max(after) / sum(after), rel=1e-5)
        heavy, second = sorted(before, reverse=True)[:2]
        assert metrics["lis_even_split"][layer] == pytest.approx(
            8 * max(heavy / 2, second) / sum(before), rel=1e-5
        )
    assert metrics["lis_mean"] == pytest.approx(np.mean(metrics["lis_logical"]), rel=1e-5)
    assert metrics["nll"] != metrics["nll_reference"]
    assert abs(metrics["nll"] - metrics["nll_reference"]) < 0.5


def test_the_same_build_gives_the_same_bytes_and_batching_the_same_counts(inputs, built, tmp_path):
    out, metrics = built
    again = build(inputs, tmp_path)
    assert again == metrics
    for name in ("plan.json", "physical.safetensors", "manifest.json"):
        assert (tmp_path / "rq" / name).read_bytes() == (out / "rq" / name).read_bytes()
    alone = build(inputs, tmp_path / "alone", batch_tokens=1)
    assert alone["load_after"] == metrics["load_after"]
    assert alone["nll"] == pytest.approx(metrics["nll"], rel=1e-4)


def test_the_replica_computes_with_its_stored_bits(inputs, built, tmp_path):
    """One packed word of a replica changed: its tokens, and with them the hidden states, change."""
    import shutil

    from safetensors.torch import load_file, save_file

    changed = shutil.copytree(built[0] / "rq", tmp_path / "rq")
    tensors = load_file(changed / "physical.safetensors")
    key = "model.layers.1.mlp.experts.8.down_proj.weight_packed"
    tensors[key][0, 0] ^= 1 << 30
    save_file(tensors, changed / "physical.safetensors")
    ids = [list(range(2, 60))]
    one, other = (
        next(iter(prefill(load_model(folder, reference=inputs / "reference"), ids, 80, "bit"))).hidden
        for folder in (built[0] / "rq", changed)
    )
    assert not torch.equal(one, other)


def test_a_packed_tensor_too_many_or_too_few_is_an_error(inputs, built, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(built[0] / "rq", tmp_path / "rq")
    tensors = load_file(folder / "physical.safetensors")
    key = min(key for key in tensors if key.endswith("scale"))
    save_file({**tensors, "stray": tensors[key].clone()}, folder / "physical.safetensors")
    with pytest.raises(InputError, match="1 tensors that the plan does not name, first stray"):
        load_model(folder, reference=inputs / "reference")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != key}, folder / "physical.safetensors"
    )
    with pytest.raises(InputError, match=key):
        load_model(folder, reference=inputs / "reference")


def test_a_variant_of_another_model_is_refused(built, tmp_path):
    other = seeded_checkpoint(tmp_path / "other", "qwen2_moe", num_experts=4)
    with pytest.raises(InputError, match="the plan was made for another model"):
        load_model(built[0] / "rq", reference=other)


def test_statistics_of_another_model_are_refused(inputs, tmp_path):
    statistics = ExpertStatistics.load_from(inputs / "experts" / "experts.safetensors")
    other = ExpertStatistics(
        **{
            **{name: getattr(statistics, name) for name in statistics.__dataclass_fields__},
            "layers": np.array([0, 1]),
        }
    )
    (inputs / "other").mkdir()
    other.save(inputs / "other" / "experts.safetensors")
    with pytest.raises(InputError, match=r"MoE layers \[0, 1\] .* expected layers \[1, 2\]"):
        build(inputs, tmp_path, experts="other")


def test_inputs_of_an_earlier_step_that_are_absent_are_named(inputs, tmp_path):
    with pytest.raises(InputError, match="run measure_experts first"):
        build(inputs, tmp_path, experts="nowhere")
    with pytest.raises(InputError, match="run prepare_requests first"):
        run("rq", VARIANT, inputs / "reference", tmp_path, inputs / "experts", tmp_path, tmp_path / "m", 80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 48}, r"group_size 48 does not divide the input width 64 .* 8, 16, 32, 64"),
        ({"replicas": 9}, "9 replicas for 8 experts"),
        ({"replicas": 7, "least_important_bits": 8}, "nothing fits"),
    ],
)
def test_a_variant_that_cannot_be_built_is_an_error_before_anything_is_written(
    inputs, tmp_path, change, message
):
    with pytest.raises(InputError, match=message):
        build(inputs, tmp_path, VARIANT.model_copy(update=change))
    assert list(tmp_path.iterdir()) == []


def test_names_of_variants():
    params = small_params()
    rq = params["build_variants"]["variants"]["rq"]
    params["build_variants"]["variants"] = {"rq": rq, "replicate_only": copy.deepcopy(rq), "reference": rq}
    checked = check_params(params)
    assert check_name("rq", checked) == Variant(**rq)
    with pytest.raises(InputError, match="no variant is called 'replicate'; did you mean 'replicate_only'"):
        check_name("replicate", checked)
    for name in ("reference", "W3"):
        with pytest.raises(InputError, match=f"'{name}' is the name of another model"):
            check_name(name, checked)
