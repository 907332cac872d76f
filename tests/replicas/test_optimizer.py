"""What is asked of a user's optimizer before it is trusted with a server's slice, or with zeros."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal.replicas.module import build_model
from shoal.replicas.optimizer import Schedule, steps_on_zeros
from shoal.testing import blobs

MAKERS = [
    (partial(torch.optim.SGD, lr=0.1), False),
    (partial(torch.optim.SGD, lr=0.0), False),
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9), True),
    (partial(torch.optim.SGD, lr=0.0, weight_decay=1e-4), True),
    (torch.optim.Adagrad, False),
    (partial(torch.optim.Adagrad, lr_decay=1e-3), True),
    (torch.optim.Adam, True),
    (torch.optim.RMSprop, True),
    (torch.optim.Adadelta, True),
]


@pytest.mark.parametrize(("make", "steps"), MAKERS)
def test_whether_zeros_are_another_step_than_no_gradient(make, steps):
    p = nn.Parameter(torch.randn(3, 2))
    assert steps_on_zeros(make([p])) is steps
    mixed = torch.optim.SGD(
        [{"params": [p]}, {"params": [nn.Parameter(torch.ones(1))], "momentum": 0.5}], lr=1.0
    )
    assert steps_on_zeros(mixed)


class TwoHeads(nn.Module):
    """A model of which half is never used."""

    def __init__(self):
        super().__init__()
        self.head, self.other = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("strategy", ["single", "sync", "asgd"])
def test_a_parameter_that_a_task_never_uses_stays_or_is_refused(strategy):
    task = replace(blobs(), model=TwoHeads)
    result = shoal.run(task, strategy, transport="sim", compute="1ms")
    begun = build_model(task, seed=0)
    assert torch.equal(result.model.other.weight, begun.other.weight)
    assert not torch.equal(result.model.head.weight, begun.head.weight)
    with pytest.raises(ValueError, match=r"does not depend on parameter 'other\.weight', and Adam would"):
        shoal.run(replace(task, optimizer=torch.optim.Adam), strategy, transport="sim", compute="1ms")


def test_a_step_hook_that_is_registered_later_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = Schedule(optimizer)
    assert schedule.changed() is None
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="at the server, where step hooks"):
        schedule.changed()
