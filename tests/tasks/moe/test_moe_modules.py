"""Experts that are modules: the same weights as fused, ModuleList and ModuleDict give the same everything."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from tasks.contracts import InputError, LayerPlan, ReplicationPlan
from tasks.moe.activations import measure_expert_inputs
from tasks.moe.checkpoint import load_model
from tasks.moe.experts import run_experts
from tasks.moe.modules import ModuleExperts
from tasks.moe.prefill import prefill
from tasks.moe.registry import moe_layers
from tasks.moe.replicas import install_physical_experts, model_hash, physical_load
from tests.seeded_models import VOCABULARY, seeded_checkpoint

GATED = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias), nn.Linear(hidden, width, bias)
        self.down_proj = nn.Linear(width, hidden, bias)
        self.act_fn = ACT2FN["silu"]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class Loop(nn.Module):
    """The plain loop over experts that older classes have in their blocks."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        own = self.values() if isinstance(self, nn.ModuleDict) else self
        for number, expert in enumerate(own):
            token, pick = torch.where(index == number)
            output.index_add_(0, token, expert(hidden[token]) * weight[token, pick, None])
        return output


class ListExperts(Loop, nn.ModuleList):
    def __init__(self, experts: list[nn.Module]) -> None:
        nn.ModuleList.__init__(self, experts)


class DictExperts(Loop, nn.ModuleDict):
    def __init__(self, experts: list[nn.Module]) -> None:
        nn.ModuleDict.__init__(self, {f"expert_{number}": own for number, own in enumerate(experts)})


CONTAINERS = {"list": ListExperts, "dict": DictExperts}


def unfused(model, container):
    """A copy of a model whose experts are modules with the same weights."""
    made = copy.deepcopy(model)
    for layer in moe_layers(model):
        views, own = layer.matrices(), []
        for number in range(layer.num_experts):
            expert = Expert(views["up_proj"].shape[2], views["up_proj"].shape[1])
            with torch.no_grad():
                for name, view in views.items():
                    getattr(expert, name).weight.copy_(view[number])
            own.append(expert)
        made.get_submodule(layer.name).experts = container(own)
    return made.eval()


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_moe"))


@pytest.fixture(params=list(CONTAINERS))
def modules(request, fused):
    return unfused(fused, CONTAINERS[request.param])


@pytest.fixture(scope="module")
def sequences():
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, size=length).tolist() for length in (9, 30, 2, 17)]


def run(model, sequences):
    batches = list(prefill(model, sequences, 80, "test", record=True))
    hidden = torch.cat([batch.hidden[batch.mask] for batch in batches])
    routing = [
        torch.cat([getattr(layer, name)[batch.mask].double().flatten()])
        for batch in batches
        for layer in batch.routing
        for name in ("index", "weight", "gate_prob", "routed")
    ]
    return hidden, torch.cat(routing)


def test_routing_and_outputs_are_those_of_the_fused_model(fused, modules, sequences):
    (hidden, routing), (expected, expected_routing) = run(modules, sequences), run(fused, sequences)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(routing, expected_routing, rtol=0, atol=1e-5)
    assert model_hash(modules) == model_hash(fused)
    for ours, theirs in zip(moe_layers(modules), moe_layers(fused), strict=True):
        assert (ours.layer, ours.name, ours.num_experts) == (theirs.layer, theirs.name, theirs.num_experts)
        assert ours.keys("down_proj") == theirs.keys("down_proj")
        for name, view in theirs.matrices().items():
            assert torch.equal(ours.matrices()[name], view)


def test_statistics_are_those_of_the_fused_model(fused, modules, sequences):
    found = []
    for model in (fused, modules):
        with measure_expert_inputs(model) as inputs:
            list(prefill(model, sequences, 80, "measured"))
        found.append(inputs)
    for theirs, ours in zip(*found, strict=True):
        assert ours.load.tolist() == theirs.load.tolist()
        for name, squares in theirs.squares().items():
            np.testing.assert_allclose(ours.squares()[name], squares, rtol=1e-4)
    assert all("forward" not in vars(layer.experts.module) for layer in moe_layers(modules))


def test_replicas_of_modules(fused, modules, sequences):
    layers = [LayerPlan(layer.layer, [*range(8), 3, 5], [0] * 10) for layer in moe_layers(modules)]
    plan = ReplicationPlan(model_hash(modules), 32, "round_robin", 0, layers)
    install_physical_experts(modules, plan, {})
    torch.testing.assert_close(run(modules, sequences)[0], run(fused, sequences)[0], rtol=0, atol=1e-4)
    assert all(load[8:].min() > 0 for load in physical_load(modules))
    for layer in moe_layers(modules):  # the logical experts are stored once
        physical = layer.experts.module.physical.matrices()
        for name, view in layer.matrices().items():
            assert view.data_ptr() == physical[name].data_ptr()


def test_matrices_are_the_modules_own_memory_also_in_a_copy(modules, sequences):
    first = moe_layers(modules)[0].matrices()
    again = moe_layers(modules)[0].matrices()
    assert all(view.data_ptr() == again[name].data_ptr() for name, view in first.items())  # moved once
    duplicate = copy.deepcopy(modules)
    before = run(modules, sequences)[0]
    moe_layers(duplicate)[0].matrices()["down_proj"].zero_()
    assert torch.equal(run(modules, sequences)[0], before)
    assert not torch.allclose(run(duplicate, sequences)[0], before)
    experts = moe_layers(duplicate)[0].experts
    own = list(experts.module.values() if isinstance(experts.module, nn.ModuleDict) else experts.module)
    assert all(not expert.down_proj.weight.any() for expert in own)
    assert {id(parameter) for parameter in experts.parameters()} == {
        id(getattr(expert, name).weight) for expert in own for name in GATED
    }


def test_saved_weights_survive_the_move(fused, tmp_path: Path):
    """A state dict names each expert's slice; loading into it writes to the stack."""
    model = unfused(fused, ListExperts)
    views = moe_layers(model)[0].matrices()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(not view.any() for view in views.values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_one_expert_after_the_other_equals_the_modules_forward(top_k: int, bias: bool):
    torch.manual_seed(0)
    module = ListExperts([Expert(10, 4, bias) for _ in range(5)])
    experts = ModuleExperts(module, "experts", GATED, "act_fn")
    hidden, weight = torch.randn(12, 10), torch.rand(12, top_k)
    index = torch.rand(12, 5).argsort(1)[:, :top_k]
    index[index == 2] = 5  # nobody's, for expert 2 gets no tokens
    replicas = None
    with torch.inference_mode():
        expected = module(hidden, index, weight)
        torch.testing.assert_close(run_experts(experts, hidden, index, weight), expected)
    with torch.no_grad():
        replicas = experts.copies([*range(5), 0])
        for parameter in module[0].parameters():
            parameter.zero_()  # the replica's weights and biases are its own
        moved = torch.where(index == 0, 5, torch.where(index == 5, 6, index))
        torch.testing.assert_close(run_experts(replicas, hidden, moved, weight), expected)


def refused(module: nn.Module) -> str:
    with pytest.raises(InputError) as caught:
        ModuleExperts(module, "model.layers.1.mlp.experts", GATED, "act_fn")
    assert str(caught.value).startswith("model.layers.1.mlp.experts")
    return str(caught.value)


def test_layouts_that_are_not_understood():
    def experts() -> list[nn.Module]:
        return [Expert(6, 4) for _ in range(3)]

    assert "(ModuleList): the container has no forward" in refused(nn.ModuleList(experts()))
    own = experts()
    own[1].scale = nn.Parameter(torch.ones(4))
    assert "experts[1] (Expert): parameter 'scale' belongs to no matrix" in refused(ListExperts(own))
    own = experts()
    del own[2].up_proj
    assert "experts[2] (Expert): has no Linear 'up_proj'" in refused(ListExperts(own))
    own = experts()
    del own[0].act_fn
    assert "no activation function 'act_fn'" in refused(ListExperts(own))
    assert "'gate_proj' has the shapes [(4, 6), (5, 6)]" in refused(ListExperts([*experts(), Expert(6, 5)]))
    module = DictExperts([])
    for name in ("expert_1", "expert_0"):
        module[name] = Expert(6, 4)
    assert "expert 0 is called 'expert_1'" in refused(module)
