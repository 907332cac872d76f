"""A local step on the gradients as they lie is, bit for bit, a step along the gradient as one vector."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import shoal
from loops import STEPS, Loop, trained_plainly
from shoal.core.replica import StepsAlone
from shoal.core.transport import offers
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.module import ModuleReplica, build_model, build_replica
from shoal.testing import blobs
from shoal.testing.problems import VectorReplica

MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def passes(loss: float | None) -> None:
    """Any loss will do."""


def replica_of(task: shoal.Task) -> ModuleReplica:
    return build_replica(task, build_model(task, 0), task.data(), shoal.Local(), 0, 1, 0)


def sparse_blobs() -> shoal.Task:
    """Bags of words, whose embedding has sparse gradients."""
    x = torch.arange(240).view(40, 6) % 11
    data = shoal.Data(x, x.sum(dim=1) % 3, x, x.sum(dim=1) % 3)
    model = partial(nn.Sequential, nn.EmbeddingBag(11, 3, sparse=True))
    return shoal.Task("bags", model, lambda: data, batch=4, lr=0.1, optimizer=torch.optim.Adam)


@pytest.mark.parametrize(
    "task", [blobs(), replace(blobs(), optimizer=MOMENTUM), sparse_blobs()], ids=["sgd", "momentum", "sparse"]
)
def test_a_task_s_step_is_its_gradient_and_descend(task):
    one, other = replica_of(task), replica_of(task)
    for _ in range(7):
        losses: list[float | None] = []
        count = drive(one.step(losses.append))
        gradient = drive(other.gradient())
        other.descend(gradient.vector)
        assert (count, losses) == (gradient.count, [gradient.loss])
        assert torch.equal(one.x, other.x)


def test_where_no_sample_is_left_a_step_is_along_zeros():
    task = replace(blobs(), optimizer=MOMENTUM)
    one, other = replica_of(task), replica_of(task)
    for replica in (one, other):
        drive(replica.step(passes))
        x, y = replica.batches.next()
        replica.batches.next = lambda x=x, y=y: (x[:0], y[:0])  # as where more workers share a last batch
    before = one.x.clone()
    assert drive(one.step(passes)) == 0
    other.descend(drive(other.gradient()).vector)
    assert torch.equal(one.x, other.x)
    assert not torch.equal(one.x, before)  # by its momentum


def test_no_vector_is_made_of_the_gradient():
    replica = replica_of(blobs())
    drive(replica.step(passes))
    assert replica._g is None
    assert all(p.grad is None for p in replica.model.parameters())  # nor kept


@pytest.mark.parametrize("word", ["momentum", "adamw"])
def test_an_attached_loop_with_a_scaler_trains_as_without_shoal(word):
    loop = Loop(word)
    with shoal.attach(loop.model, loop.optimizer) as run:
        for t in range(STEPS):
            loop.run_step(t)
            loop.schedule.step()
        assert run._replica._g is None
    trained = nn.utils.parameters_to_vector(loop.model.parameters())
    assert torch.equal(trained, trained_plainly(word))


def test_only_replicas_that_have_a_step_of_their_own_take_it():
    assert offers(ModuleReplica, StepsAlone) and offers(AttachedReplica, StepsAlone)
    assert not offers(VectorReplica, StepsAlone)


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were():
    loop = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    run = shoal.attach(loop, optimizer)

    def closure(factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = factor * loop(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(lambda: closure(1.0))
    before = loop.weight.detach().clone()
    with pytest.raises(shoal.Diverged, match="the loss became nan"):
        optimizer.step(lambda: closure(float("nan")))
    assert torch.equal(loop.weight, before)
    run.abandon()
