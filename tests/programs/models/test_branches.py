"""Branches: wherever they are computed, what is learnt is what one shared module learns."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import branch_training
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from scripts import run_loop
from shoal.cli import app
from shoal.core.replica import Parameters
from shoal.core.vector import Flat
from shoal.programs.models.branches import BranchModel, LastState, pair, propagate
from shoal.sim import Simulation
from shoal.vocabulary.strategy import Strategy

EXAMPLE = Path(__file__).parents[3] / "examples" / "branches.py"
ELSEWHERE = ("cpu", "cpu:0")  # to torch another device than "cpu", so that weights are copied to it


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def tweets():
    """Two texts of 140 characters, one-hot, in a batch of 3."""
    dice = torch.Generator().manual_seed(0)
    return tuple(F.one_hot(torch.randint(256, (2, 3, 140), generator=dice), 256).float())


def test_the_pair_has_its_82561_parameters_and_takes_140_x_256():
    model = pair()
    lstm = 4 * 64 * (256 + 64) + 2 * 4 * 64  # four gates, each with two biases
    assert sum(p.numel() for p in model.parameters()) == lstm + (2 * 64 + 1) == 82_561
    assert model(torch.zeros(5, 140, 256), torch.zeros(5, 140, 256)).shape == (5, 1)


class Scale(nn.Module):
    """x -> weight * x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ELSEWHERE, ("cpu:0", "cpu:0")])
def test_the_gradient_is_the_sum_over_both_paths(devices):
    head = nn.Linear(2, 1)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[5.0, 7.0]]))
        head.bias.zero_()
    model = BranchModel(Scale(), head, devices)
    out = model(torch.tensor([[2.0]]), torch.tensor([[10.0]]))
    out.sum().backward()
    assert out.item() == 5 * 3 * 2 + 7 * 3 * 10
    assert model.encoder.weight.grad.item() == 5 * 2 + 7 * 10  # one path each
    assert head.weight.grad.tolist() == [[3 * 2, 3 * 10]]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ELSEWHERE])
def test_it_is_the_plain_shared_module(tweets, devices):
    torch.manual_seed(0)
    model = pair(devices)
    lstm, layer = copy.deepcopy(model.encoder.lstm), copy.deepcopy(model.head)
    plain = layer(torch.cat([lstm(x)[1][0][-1] for x in tweets], dim=1))
    plain.square().sum().backward()
    out = model(*tweets)
    out.square().sum().backward()
    assert torch.equal(out, plain)
    expected = gradients(nn.ModuleList([lstm, layer]))
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradients(model), expected, rtol=1e-6, atol=1e-7)  # another order of sums


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_a_branch_on_a_gpu_computes_what_the_processor_does(tweets, home):
    """In float64, so that another order of sums is all that may differ."""
    torch.manual_seed(0)
    model = pair().double()
    tweets = [x.double() for x in tweets]
    mixed = pair(("cpu", "cuda:0")).double().to(home)
    mixed.load_state_dict(model.state_dict())
    out, there = model(*tweets), mixed(*tweets)
    out.square().sum().backward()
    there.square().sum().backward()
    assert [mixed.encode(k, x).device.type for k, x in enumerate(tweets)] == ["cpu", "cuda"]
    assert there.device == mixed.home == torch.device(home)  # merged where the weights are
    assert all(p.grad.device == mixed.home for p in mixed.parameters())
    assert gradients(model).abs().max() > 1e-3
    torch.testing.assert_close(there.cpu(), out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(mixed).cpu(), gradients(model), rtol=1e-9, atol=1e-12)


def test_a_branch_elsewhere_computes_with_a_copy_made_for_the_step(tweets):
    torch.manual_seed(0)
    model = pair(ELSEWHERE)
    before = model(*tweets)
    with torch.no_grad():
        model.encoder.lstm.weight_ih_l0.add_(0.1)
    here, there = model.encode(0, tweets[0]), model.encode(1, tweets[0])
    assert torch.equal(here, there)  # the copy is that of the new weights
    assert not torch.equal(model(*tweets), before)


def test_a_branch_computes_where_its_device_is(tweets):
    model = pair(("cpu", "meta"))  # a device without memory: weights of the CPU would be refused there
    codes = [model.encode(k, x) for k, x in enumerate(tweets)]
    assert [code.device.type for code in codes] == ["cpu", "meta"]
    assert model.encode(0, tweets[0]).equal(codes[0])  # the weights at home are in use again


def test_one_input_for_each_branch():
    with pytest.raises(ValueError, match="3 inputs for 2 branches; pass one for each"):
        pair()(*(torch.zeros(1, 1, 256),) * 3)
    with pytest.raises(ValueError, match="devices is empty"):
        pair(())


# ---------------------------------------------------------------------------- a worker for each branch


class Weights(Parameters):
    """A worker's model as its node sees it; plain descent."""

    def __init__(self, model, lr):
        self.flat = Flat(model)
        super().__init__(self.flat.x)
        self.lr = lr

    def descend(self, g):
        self.x.sub_(g, alpha=self.lr)


@dataclass(frozen=True)
class Branching(Strategy):
    """Synchronous descent whose gradients come from branches at several workers."""

    models: tuple
    inputs: tuple
    y: torch.Tensor
    losses: list

    async def worker(self, w):
        async for _ in w.steps():
            model = self.models[w.rank]
            model.zero_grad()
            own = [x if k % w.size == w.rank else None for k, x in enumerate(self.inputs)]
            loss = await propagate(w, model, own, self.y, F.mse_loss)
            self.losses.extend([] if loss is None else [loss])
            w.descend(await w.mean(w.engine.replica.flat.gradient(torch.empty_like(w.x))))


def descend_on(workers, model, inputs, y, steps):
    """What the workers hold after so many steps in virtual time, and the losses along the way."""
    strategy = Branching(tuple(copy.deepcopy(model) for _ in range(workers)), inputs, y, [])
    replicas = [Weights(own, lr=0.1) for own in strategy.models]
    done = Simulation(strategy, lambda rank: replicas[rank], workers=workers, steps=steps).run()
    return [node.x for node in done.nodes], strategy.losses


@pytest.mark.parametrize("branches", [2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_learn_what_one_process_learns(workers, branches):
    torch.manual_seed(0)
    inputs = tuple(torch.randn(4, 5, 6) for _ in range(branches))
    y = torch.randn(4, 1)
    model = BranchModel(LastState(6, 3), nn.Linear(3 * branches, 1), ("cpu",) * branches)
    got, losses = descend_on(workers, model, inputs, y, steps=5)
    expected = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(*inputs), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-6)
    for x in got:
        torch.testing.assert_close(
            x, nn.utils.parameters_to_vector(model.parameters()).detach(), rtol=0, atol=1e-6
        )
    assert all(torch.equal(x, got[0]) for x in got)


def test_more_workers_than_branches_are_refused():
    model = BranchModel(LastState(6, 3), nn.Linear(6, 1))
    with pytest.raises(
        ValueError, match="3 workers for 2 branches; start at most one worker for each branch"
    ):
        descend_on(3, model, (torch.zeros(1, 2, 6),) * 2, torch.zeros(1, 1), steps=1)


@pytest.fixture(scope="module")
def alone():
    """Losses and weights of the same training in one process, by a plain loop."""
    model, optimizer = branch_training.start()
    losses, weights = [], []
    for inputs, y in branch_training.batches():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(branch_training.flat(model))
    return torch.tensor(losses), torch.stack(weights)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_two_worker_processes_follow_the_trajectory_of_one(tmp_path, alone):
    done = CliRunner().invoke(app, ["run", "--quiet", "-n", "2", branch_training.__file__, str(tmp_path)])
    assert done.exit_code == 0, done.output
    losses, weights = alone
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert (weights[0] - weights[-1]).abs().max() > 1e-2  # it moves
    torch.testing.assert_close(first["weights"], weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(first["losses"], losses, rtol=0, atol=1e-6)
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_the_example_trains_on_two_workers():
    first, second = run_loop("--steps", "20", "--batch", "4", script=EXAMPLE, strategy=None)
    assert "step 20: loss" in first and "right about" in first
    assert not second  # worker 0 merges, and tells
