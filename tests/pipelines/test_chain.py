"""Where a model can be cut: one tensor passes, and the layers compute what the model computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.pipelines.chain import trace


class Photo(nn.Module):
    """As most are written: modules and functions in forward(), a residual path, ReLU in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + self.relu(self.second(x))
        return self.last(torch.flatten(x, 1))


class Other(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self._forward = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x):
        return self._forward(self, x)


def test_nested_sequentials_are_cut_inside():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)))
    assert trace(model, torch.ones(1, 2)).names == ["0", "1.0", "1.1"]


def test_a_residual_path_is_not_cut_and_an_operation_in_place_stays_with_its_input():
    chain = trace(Photo(), torch.randn(2, 1, 8, 8))
    assert chain.names == ["first", "relu", "second…relu", "flatten", "last"]


def test_stages_have_the_models_own_parameters_under_their_names():
    model = Photo()
    stage = trace(model, torch.randn(2, 1, 8, 8)).module(2, 5)
    assert [name for name, _ in stage.named_parameters()] == [
        *("second.weight", "second.bias"),
        *("last.weight", "last.bias"),
    ]
    assert stage.get_parameter("last.weight") is model.last.weight


def test_a_parameter_that_forward_reads_itself_goes_with_its_use():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.a, self.b = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x) + self.shift) + self.shift

    chain = trace(Shifted(), torch.randn(2, 4))
    assert chain.names == ["a", "add", "b", "add_1"]
    held = [[name for name, _ in chain.module(i, i + 1).named_parameters()] for i in range(4)]
    assert held == [["a.weight", "a.bias"], ["shift"], ["b.weight", "b.bias"], ["shift"]]


def test_dropout_in_a_chain_is_the_models_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    assert trace(model, torch.randn(64, 4)).names == ["0", "1", "2"]


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_reads_the_mode_itself_is_refused(training):
    model = Other(lambda self, x: self.b(F.dropout(self.a(x), 0.5, self.training))).train(training)
    model.b.train(not training)
    with pytest.raises(
        ValueError, match=r"forward\(\) of Other reads self.training itself; make that a module"
    ):
        trace(model, torch.randn(2, 4))
    assert model.training is model.a.training is training and model.b.training is not training


def test_a_constant_in_forward_is_the_same_in_both_modes():
    model = Other(lambda self, x: self.b(self.a(x) + torch.ones(4)))
    for _ in range(2):
        chain = trace(model, torch.randn(2, 4))
    assert chain.names == ["a", "add", "b"]


def test_a_cut_passes_a_tensor_and_not_a_tuple():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.last(out)

    assert trace(Recurrent(), torch.randn(2, 3, 4)).names == ["lstm", "last"]


def test_tracing_leaves_running_statistics_and_the_input_alone():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4))
    x = -torch.ones(2, 4)
    trace(model, x)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(x, -torch.ones(2, 4))


def test_an_example_of_another_width_is_refused_and_changes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"Sequential cannot compute a batch of shape 2x6: .* or --input"):
        trace(model, torch.randn(2, 6))
    assert model[0].num_batches_tracked == 0


def branching(self, x):
    return self.a(x) if x.sum() > 0 else self.b(x)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (branching, r"forward\(\) of Other cannot be traced \(.*control flow\)"),
        (lambda self, x: (self.a(x), self.b(x)), "has 1 inputs and returns a tuple"),
    ],
)
def test_a_model_that_is_no_chain_is_refused_in_one_sentence(forward, why):
    with pytest.raises(ValueError, match=why) as refused:
        trace(Other(forward), torch.randn(2, 4))
    assert "\n" not in str(refused.value)


def test_a_model_that_computes_something_else_each_time_is_refused():
    calls = []

    def counting(self, x):
        calls.append(1)
        return self.b(self.a(x) * float(len(calls)))

    with pytest.raises(ValueError, match="computes something else when its layers run one after another"):
        trace(Other(counting), torch.randn(2, 4))  # traced in call 1
