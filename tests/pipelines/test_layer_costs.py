"""What is measured of a layer: bytes by hand, and that measuring changes nothing."""

from functools import partial

import pytest
import torch
from torch import nn

from shoal.pipelines.chain import trace
from shoal.pipelines.layer_costs import LayerCost, measure_layers, stage_cost
from shoal.pipelines.proposal import HYBRID, propose
from shoal.sim import Network

SGD = partial(torch.optim.SGD, lr=0.1)


def measured(model, x, optimizer=SGD):
    return measure_layers(trace(model, x), x, optimizer)


def test_bytes_of_a_small_mlp_by_hand():
    linear, relu, last = measured(
        nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), torch.randn(8, 10)
    )
    assert (linear.parameters, linear.parameter_bytes) == (220, 880)
    assert linear.state_bytes == 2 * 880  # and the gradients; plain SGD keeps nothing
    assert (linear.input_bytes, linear.output_bytes) == (8 * 10 * 4, 8 * 20 * 4)
    assert (linear.activation_bytes, linear.saves_input, linear.saves_output) == (320, True, False)
    assert (relu.activation_bytes, relu.saves_input, relu.saves_output) == (640, False, True)
    assert (last.activation_bytes, last.saves_input) == (0, False)  # its input is what ReLU has saved
    assert min(linear.forward, linear.backward, relu.forward, relu.backward) > 0


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [(partial(SGD, momentum=0.9), 880), (torch.optim.Adam, 2 * 880 + 2 * 4)],  # Adam: two moments, two steps
)
def test_state_contains_what_the_optimizer_keeps(optimizer, kept):
    (linear,) = measured(nn.Sequential(nn.Linear(10, 20)), torch.randn(8, 10), optimizer)
    assert linear.state_bytes == 2 * 880 + kept


def test_frozen_parameters_have_no_gradient_in_memory():
    model = nn.Sequential(nn.Linear(10, 20))
    model.requires_grad_(False)
    (linear,) = measured(model, torch.randn(8, 10))
    assert linear.state_bytes == 880


def test_fully_connected_layers_inside_a_layer_are_found_with_their_samples():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(6, 12)

        def forward(self, x):
            return self.wide(x).mean()

    (_, head) = measured(nn.Sequential(nn.Identity(), Head()), torch.randn(4, 5, 6))
    (shape,) = head.linears
    assert (shape.name, shape.inputs, shape.outputs, shape.samples) == ("1.wide", 6, 12, 4 * 5)
    assert (shape.parameter_bytes, shape.element_bytes) == (4 * (6 * 12 + 12), 4)


def test_a_shared_weight_is_told_where_it_comes_again():
    shared = nn.Linear(4, 4)
    costs = measured(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 4))
    assert [cost.repeated_bytes for cost in costs] == [0, 0, 80]


def test_measuring_leaves_the_model_and_the_random_state_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measured(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stage_keeps_what_it_received_and_what_it_sent():
    keeps = LayerCost("a", 1.0, 2.0, 10, 20, activation_bytes=5, state_bytes=100)
    both = LayerCost("b", 3.0, 4.0, 20, 30, activation_bytes=50, saves_input=True, saves_output=True)
    stage = stage_cost([keeps, keeps], is_first=False, is_last=False)
    assert (stage.forward, stage.backward, stage.output_bytes, stage.state_bytes) == (2.0, 4.0, 20, 200)
    assert stage.activation_bytes == 5 + 5 + 10 + 20
    assert stage_cost([both], is_first=False, is_last=False).activation_bytes == 50  # contained already
    assert stage_cost([keeps], is_first=True, is_last=True).activation_bytes == 5
    assert stage_cost([keeps], is_first=True, is_last=True).output_bytes == 0


class Tied(nn.Module):
    """An embedding whose weights are those of the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5000, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))


def thrice():
    one = nn.Linear(512, 512)
    return nn.Sequential(one, nn.ReLU(), one, nn.ReLU(), one, nn.Linear(512, 1024))


@pytest.mark.parametrize(
    ("model", "example", "split"),
    [(thrice(), torch.ones(8, 512), ["5"]), (Tied(), torch.zeros(8, 4, dtype=torch.long), [])],
)
def test_a_weight_that_is_used_twice_is_not_split_and_counts_once(model, example, split):
    found = propose(model, example, 2, 2, Network(bandwidth=1e6), torch.optim.SGD, None, 1)
    assert [one.shape.name for one in found.linears if one.pays] == split
    nbytes = sum(p.nbytes for p in model.parameters())
    assert found.data_parallel.sent == nbytes  # 2 (P - 1) / P
    assert found.data_parallel.memory < 3 * nbytes  # with gradients, and some activations
    for candidate in found.candidates:
        assert candidate.sent >= 0 and candidate.memory > 0
        if candidate.name == HYBRID:
            assert candidate.memory < found.data_parallel.memory
