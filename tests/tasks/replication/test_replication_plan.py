import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tasks.contracts import ExpertStatistics, InputError, ReplicationPlan
from tasks.params import Variant
from tasks.replication.plan import ExpertBytes, plan_layer, plan_variant


def variant(replicas: int = 1) -> Variant:
    return Variant(
        replicas=replicas,
        replica_bits=8,
        least_important_bits=4,
        group_size=64,
        dispatch="round_robin",
        seed=0,
    )


LOAD = np.array([5, 20, 3, 7])
IMPORTANCE = np.array([0.4, 0.1, 0.2, 0.3])


def test_a_hand_worked_layer():
    # the heaviest is expert 1, though it is the least important: it gets the replica and stays as it is.
    # The replica costs 60, a quantized expert saves 100 - 45 = 55: two are needed, the least important: 2, 3.
    # Bytes: 4 * 100 = 400 before, 2 * 100 + 60 + 2 * 45 = 350 after.
    size = ExpertBytes(original=100, replica=60, quantized=45)
    plan = plan_layer(7, LOAD, IMPORTANCE, size, variant())
    assert (plan.layer, plan.physical_to_logical, plan.bits) == (7, [0, 1, 2, 3, 1], [0, 0, 4, 4, 8])
    assert size.of_layer(4, replicas=1, quantized=2) == 350
    # one saving of exactly 60 pays: 100 - 40
    assert plan_layer(7, LOAD, IMPORTANCE, ExpertBytes(100, 60, 40), variant()).bits == [0, 0, 4, 0, 8]


def test_ties_go_to_the_lower_index():
    plan = plan_layer(0, np.ones(4), np.ones(4), ExpertBytes(100, 50, 50), variant())
    assert plan.physical_to_logical == [0, 1, 2, 3, 0]
    assert plan.bits == [0, 4, 0, 0, 8]


def test_without_replicas_nothing_is_quantized():
    plan = plan_layer(0, LOAD, IMPORTANCE, ExpertBytes(100, 50, 50), variant(replicas=0))
    assert (plan.physical_to_logical, plan.bits) == ([0, 1, 2, 3], [0, 0, 0, 0])


def test_more_replicas_than_experts_is_an_error():
    with pytest.raises(InputError, match=r"layer 3: 5 replicas for 4 experts"):
        plan_layer(3, LOAD, IMPORTANCE, ExpertBytes(100, 50, 50), variant(replicas=5))


@pytest.mark.parametrize(("quantized", "replicas"), [(99, 1), (100, 1), (130, 1), (50, 3)])
def test_replicas_that_cannot_be_paid_for_are_an_error(quantized, replicas):
    with pytest.raises(InputError, match="nothing fits"):
        plan_layer(0, LOAD, IMPORTANCE, ExpertBytes(100, 50, quantized), variant(replicas))


@given(st.data())
def test_plans_keep_their_promises(data):
    experts = data.draw(st.integers(1, 12))
    load = data.draw(arrays(np.int64, experts, elements=st.integers(0, 6)))
    importance = data.draw(arrays(np.float64, experts, elements=st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    size = ExpertBytes(
        data.draw(st.integers(2, 99)), data.draw(st.integers(1, 99)), data.draw(st.integers(1, 99))
    )
    replicas = data.draw(st.integers(0, experts))
    try:
        plan = plan_layer(0, load, importance, size, variant(replicas))
    except InputError:
        saving = size.original - size.quantized
        assert (experts - replicas) * saving < replicas * size.replica  # even all the others would not pay
        assume(False)
    originals, copies = plan.bits[:experts], plan.bits[experts:]
    heavy = plan.physical_to_logical[experts:]
    quantized = [expert for expert, bits in enumerate(originals) if bits]
    assert plan.physical_to_logical[:experts] == list(range(experts))  # each logical expert has its original
    assert len(heavy) == len(set(heavy)) == replicas and copies == [8] * replicas
    assert not set(heavy) & set(quantized)  # heavy hitters' originals are untouched
    rest = sorted(set(range(experts)) - set(heavy))
    assert all(load[h] >= load[e] for h in heavy for e in rest)
    assert all(importance[q] <= importance[e] for q in quantized for e in set(rest) - set(quantized))
    before = experts * size.original
    assert size.of_layer(experts, replicas, len(quantized)) <= before
    if quantized:  # and one fewer would not have been enough
        assert size.of_layer(experts, replicas, len(quantized) - 1) > before


def test_a_plan_survives_its_file(tmp_path):
    statistics = ExpertStatistics(
        layers=np.array([1, 3]), load=np.stack([LOAD, LOAD[::-1]]), importance=np.stack([IMPORTANCE] * 2),
        importance_rms=np.stack([IMPORTANCE] * 2),
    )  # fmt: skip
    plan = plan_variant(statistics, [ExpertBytes(100, 60, 45)] * 2, variant(), "abc")
    plan.save(tmp_path / "plan.json")
    assert ReplicationPlan.load_from(tmp_path / "plan.json") == plan
    assert [layer.layer for layer in plan.layers] == [1, 3]
    assert [layer.physical_to_logical[4:] for layer in plan.layers] == [[1], [2]]
