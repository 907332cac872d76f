"""A codec of a user's own that is added up on the way, in whole runs: by hand, on every kind of sum."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shoal
from own_codec import Steps
from shoal.core.task import Data, Task
from shoal.testing import blobs

# Gradients are the inputs: (126, 3, -60) and (42, 3, -2). The largest is 126, of 63 steps: a step is 2. 1.5
# is rounded to 2, so the average is (84, 4, -31) and both lack -1 in the middle. With the next gradients the
# middle is 2 and 2, one step each: the average is (84, 2, -31), and both steps together are twice the mean.
FIRST, BOTH = [-84.0, -4.0, 31.0], [-168.0, -6.0, 62.0]


def data():
    x = torch.tensor([[126.0, 3.0, -60.0], [42.0, 3.0, -2.0]])
    return Data(x, torch.zeros(2, 1), x, torch.zeros(2, 1))


def model():
    linear = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def output(y, _):
    return y.mean()


TASK = Task("inputs", model, data, loss=output, lr=1.0, batch=1)


def weights(epochs, task=TASK, **options):
    result = shoal.run(task, "sync", workers=2, epochs=epochs, codec=Steps(), **options)
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()]), result


@pytest.mark.parametrize("collective", ["auto", "butterfly"])
def test_by_hand_in_virtual_time(collective):
    assert weights(1, transport="sim", collective=collective)[0].tolist() == FIRST
    assert weights(2, transport="sim", collective=collective)[0].tolist() == BOTH


@pytest.mark.slow
def test_by_hand_on_real_processes():
    assert weights(2, transport="processes")[0].tolist() == BOTH


@pytest.mark.slow
def test_by_hand_over_the_all_reduce_of_gloo():
    got, result = weights(2, transport="gloo", collective="native")
    assert got.tolist() == BOTH
    assert result.nodes[0]["coded_bytes"] == 0  # nobody knows what its bytes cost


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path):
    task = replace(blobs(), batch=16)
    weights(1, task, transport="sim", checkpoint=tmp_path)
    resumed, _ = weights(3, task, transport="sim", checkpoint=tmp_path)
    assert torch.equal(resumed, weights(3, task, transport="sim")[0])


@pytest.mark.parametrize("strategy", ["asgd", "diloco", "streaming_diloco"])
def test_servers_and_averages_for_later_encode_it(strategy):
    options = {"workers": 2, "epochs": 3, "transport": "sim"}
    plain = shoal.run(blobs(), strategy, **options)
    got = shoal.run(blobs(), strategy, codec=Steps(), **options)
    assert got.test_accuracy > plain.test_accuracy - 4
    assert got.nodes[0]["coded_bytes"] < 0.6 * got.nodes[0]["dense_bytes"]
