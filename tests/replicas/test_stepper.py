"""An optimizer of the user's own loop: what its steps do, and what it goes on from."""

import pytest
import torch
from torch import nn

from loops import Replacing
from shoal.core.vector import Flat
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.stepper import Stepper


class Adapting(torch.optim.Optimizer):
    """SGD that doubles its own factor and counts its steps, both among the options of its groups."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "decay": 0.5, "factor": 1.0, "k": 0})

    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["factor"] *= 2.0
            group["best"] = (0.0, group["factor"])
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] * group["factor"] / group["k"])


def made(lr=0.1):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.ones(1, 2)
    optimizer = Adapting(model.parameters(), lr)
    return model, optimizer, Stepper(optimizer, Flat(model))


def test_what_an_optimizer_keeps_in_its_groups_is_in_its_state():
    _, _, stepper = made()
    for _ in range(3):
        stepper.take()
    model, optimizer, again = made(lr=0.25)
    optimizer.param_groups[0]["decay"] = 0.75  # the script's: no step moves it
    again.load(stepper.state())
    assert optimizer.param_groups[0] | {"params": []} == {
        "params": [],
        "lr": 0.25,
        "decay": 0.75,
        "factor": 8.0,
        "k": 3,
        "best": (0.0, 8.0),
    }
    model.weight.grad = torch.ones(1, 2)
    again.take()
    assert model.weight.tolist() == [[-0.25 * 16 / 4] * 2]
    assert [name for _, name, _ in again.state()["moved"]] == ["best", "factor", "k"]


def test_what_a_scheduler_moves_is_not_the_optimizer_s():
    _, optimizer, stepper = made()
    stepper.take()
    optimizer.param_groups[0]["decay"] = 0.1
    stepper.take()
    assert "decay" not in [name for _, name, _ in stepper.state()["moved"]]


def test_an_optimizer_that_replaces_tensors_moves_the_vector():
    model = nn.Linear(2, 1, bias=False)
    replica = AttachedReplica(model, Replacing(model.parameters(), lr=1.0))
    begun = replica.x.clone()
    for _ in range(2):
        replica.descend(torch.tensor([1.0, 2.0]))
    assert torch.allclose(replica.x, begun - torch.tensor([2.0, 4.0]))
    assert torch.equal(model.weight.flatten(), replica.x)


@pytest.mark.parametrize("others_need_it", [True, False])
def test_a_loop_that_keeps_its_gradients_does_not_write_to_averages_that_others_may_need(others_need_it):
    model = nn.Linear(2, 1, bias=False)
    replica = AttachedReplica(model, torch.optim.SGD(model.parameters(), lr=1.0))
    replica.others_need_averages = others_need_it
    for _ in range(2):
        average = torch.tensor([1.0, 2.0])
        replica.descend(average)
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 2)).sum().backward()
    replica.descend(average := torch.tensor([1.0, 2.0]))
    model.zero_grad(set_to_none=False)
    assert average.tolist() == ([1.0, 2.0] if others_need_it else [0.0, 0.0])


@pytest.mark.parametrize("at_server", [True, False])
def test_a_state_that_is_loaded_after_attach_is_refused_where_a_server_steps(at_server):
    model = nn.Linear(1, 1, bias=False)
    replica = AttachedReplica(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    replica.tells_servers = at_server
    replica.load_state_dict(replica.state_dict())  # as after a checkpoint
    assert replica.changed is None
    optimizer.load_state_dict(optimizer.state_dict())
    if not at_server:
        assert replica.changed is None
        return
    with pytest.raises(ValueError, match="the optimizer's state was loaded after attach"):
        _ = replica.changed
