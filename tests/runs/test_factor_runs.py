"""Gradients as factors in whole runs: every step is as without them, and what travels is as computed."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from shoal.codecs.wire import HEADER
from shoal.core.seeds import stream
from shoal.core.task import Data, Task
from shoal.core.transport import HEADER_BYTES
from shoal.testing import blobs
from shoal.vocabulary.strategy import Sends, Strategy


def images():
    """Noise with ten labels, of the size of small images."""
    draw = stream(0, "images")
    x, y = torch.randn(230, 784, generator=draw), torch.arange(230) % 10
    x[torch.arange(230), y] += 3.0
    return Data(x[:200], y[:200], x[200:], y[200:])


def perceptron():
    return nn.Sequential(nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


TASK = Task("images", perceptron, images, lr=0.05, batch=7)


@dataclass(frozen=True)
class Watched(Strategy):
    """Sync, with all averages kept; `alter` may change a gradient before, and `passes` add up to one."""

    sends = Sends.MEAN_GRADIENTS
    alter: Any = None
    passes: int = 1
    seen: list[torch.Tensor] = field(default_factory=list)

    async def worker(self, w):
        async for _ in w.steps():
            if self.alter is None and self.passes == 1:
                g = await w.mean(w.grad())
            else:
                g = (await w.grad()).clone() if self.passes > 1 else await w.grad()
                for _ in range(self.passes - 1):
                    g.add_(await w.grad())
                g = await w.mean(g if self.alter is None else self.alter(g))
            if w.rank == 0:
                self.seen.append(g.clone())
            w.descend(g)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(784, 10))

    def forward(self, x):
        return x @ self.by


def test_a_model_without_fully_connected_layers_is_refused():
    with pytest.raises(ValueError, match=r"nn\.Linear.*take 'none'"):
        shoal.run(replace(TASK, model=Scales), "sync", workers=2, transport="sim", codec="factors")
    shoal.run(replace(TASK, model=Scales), "sync", workers=1, transport="sim", codec="factors")


def averages(codec, task=TASK, **options):
    strategy = Watched(**options)
    result = shoal.run(task, strategy, workers=3, transport="sim", codec=codec)
    return strategy.seen, result


def assert_near(got, exact):
    assert len(got) == len(exact) > 5
    for a, b in zip(got, exact, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.fixture(scope="module")
def plain():
    return averages("none")


@pytest.fixture(scope="module")
def factored():
    return averages("factors")


def test_every_step_is_that_of_the_average_itself(plain, factored):
    assert_near(factored[0], plain[0])
    assert factored[1].nodes[0]["coded_bytes"] < 0.3 * factored[1].nodes[0]["dense_bytes"]


def test_bytes_are_as_the_formula_has_them(factored):
    # 200 samples for 3 workers: 9 steps of 7 each, and one of 4, 4 and 3. Factors pay for 96 x 784 and
    # 96 x 96, as 3 x 7 x 880 < 2 x 75264 and 3 x 7 x 192 < 2 x 9216; for 10 x 96 only in the last step,
    # as 3 x 4 x 106 < 2 x 960
    sent = dense = coded = 0
    for k, sides, layers in [(7, 880 + 192, 96 * 880)] * 9 + [(4, 880 + 192 + 106, 96 * 880 + 960)]:
        rest = 96 * 784 + 96 + 96 * 96 + 96 + 960 + 10 - layers
        factors = 4 * k * sides
        sent += 2 * (HEADER_BYTES + 3 * 8)  # rows of three layers, to two others
        sent += 2 * (HEADER_BYTES + factors)
        sent += 4 * (HEADER_BYTES + HEADER.size) + 4 * (rest + rest // 3)  # two stripes, and twice its own
        dense += round(4 / 3 * 4 * (rest + layers))
        coded += 2 * (factors + 3 * 8) + round(4 / 3 * 4 * rest)
    worker = factored[1].nodes[0]
    assert worker["bytes_sent"] == sent
    assert (worker["dense_bytes"], worker["coded_bytes"]) == (dense, coded)


@pytest.mark.parametrize("change", mostly_soak(["in place", "slightly", "anew", "accumulated"], few=2))
def test_a_gradient_that_was_changed_is_averaged_as_it_is(change):
    def slightly(g):
        g[5] *= 1 + 1e-6
        return g

    options = {
        "in place": {"alter": lambda g: g.mul_(0.5)},
        "slightly": {"alter": slightly},
        "anew": {"alter": lambda g: 2 * g},
        "accumulated": {"passes": 2},
    }[change]
    got, result = averages("factors", **options)
    exact, _ = averages("none", **options)
    assert result.nodes[0]["coded_bytes"] == 0
    assert_near(got, exact)


class Tangled(nn.Module):
    """Layers that are shared, used twice, not used by all, tied to an embedding, and sequences."""

    def __init__(self):
        super().__init__()
        self.into, self.twice, self.tied = nn.Linear(28, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.other, self.rare, self.out = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 10)
        self.other.weight = self.twice.weight
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.into(x.view(-1, 28, 28)[:, ::14]).tanh()
        x = self.other(self.twice(self.twice(x).tanh()).tanh()).tanh()
        x = self.tied(x).tanh() + self.tied.weight[x.argmax(dim=2)]
        return self.out(x.mean(1) + (self.rare(x.mean(1)) if self.calls % 3 else 0.0))


def test_a_model_that_makes_it_hard_is_averaged_right():
    task = replace(TASK, model=Tangled, batch=2)
    got, result = averages("factors", task)
    exact, _ = averages("none", task)
    assert_near(got, exact)
    assert 0 < result.nodes[0]["coded_bytes"] < result.nodes[0]["dense_bytes"]


def trained(codec="factors", **options):
    task = replace(blobs(), model=wide_model, batch=4)
    result = shoal.run(task, "sync", codec=codec, **{"workers": 3, "epochs": 1, **options})
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()]), result


def wide_model():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 3))


@pytest.mark.soak
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path):
    trained(transport="sim", checkpoint=tmp_path)
    resumed, _ = trained(transport="sim", epochs=2, checkpoint=tmp_path)
    assert torch.equal(resumed, trained(transport="sim", epochs=2)[0])


def test_one_worker_records_nothing_and_sends_nothing():
    alone, result = trained(transport="sim", workers=1)
    assert torch.equal(alone, trained("none", transport="sim", workers=1)[0])
    assert result.nodes[0]["bytes_sent"] == 0


def test_the_model_comes_back_without_a_trace():
    _, result = trained(transport="sim")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.model.modules())


@pytest.mark.soak
def test_batches_that_grow_and_shares_that_differ():
    for options in ({"grow_batch": "8@1", "epochs": 2}, {"balance": True}):
        got, result = trained(transport="sim", **options)
        assert torch.allclose(got, trained("none", transport="sim", **options)[0], atol=1e-5)
        assert result.nodes[0]["coded_bytes"] < result.nodes[0]["dense_bytes"]


@pytest.mark.slow
def test_real_processes_have_the_bits_of_virtual_time_and_an_all_reduce_is_near():
    virtual, simulated = trained(transport="sim", workers=2)
    real, result = trained(transport="processes", workers=2)
    assert torch.equal(real, virtual) and result.bytes_sent == simulated.bytes_sent
    reduced, result = trained(transport="gloo", workers=2)
    assert torch.allclose(reduced, virtual, atol=1e-5)
    assert result.nodes[0]["coded_bytes"] == simulated.nodes[0]["coded_bytes"]
