"""Runs whose crew grows: what is trained, what carries over, and which samples, in virtual time and real."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import sabotage
import shoal
from sampling import mostly_soak, sampled
from shoal import BMUF, Data, Task
from shoal.core.seeds import stream
from shoal.runs import processes
from shoal.sim import Faults
from shoal.strategies import STRATEGIES
from shoal.testing import blobs

CREW = "2@0,3@4"


def weights(result: shoal.Result) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


# -- by hand ---------------------------------------------------------------------------------------


class Point(nn.Module):
    """A point that is drawn to the samples: a quadratic, whose gradient is the distance to their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def points(samples: int) -> Data:
    x = torch.arange(samples, dtype=torch.float64).reshape(-1, 1)
    return Data(x, torch.zeros(samples), x[:1], torch.zeros(1))


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return out.square().sum(1).mul(0.5).mean()


def quadratic(samples: int = 24, batch: int = 2, lr: float = 0.5, **options: object) -> Task:
    return Task("points", Point, partial(points, samples), half_square, lr=lr, batch=batch, **options)


def order(samples: int, epoch: int) -> list[int]:
    """The order in which all workers together go through the samples, with seed 0."""
    return torch.randperm(samples, generator=stream(0, "data", epoch)).tolist()


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def test_sync_by_hand_one_worker_for_three_steps_and_then_two():
    result = shoal.run(quadratic(), "sync", crew="1@0,2@3", transport="sim")
    x, w = order(24, 0), 0.0
    for k in range(3):  # one worker, two samples a step
        w -= 0.5 * (w - mean(x[2 * k : 2 * k + 2]))
    for k in range(5):  # 18 samples are left for two workers: 4 a step, and 2 in the last
        w -= 0.5 * (w - mean(x[6 + 4 * k : 10 + 4 * k]))
    assert float(weights(result)) == pytest.approx(w, abs=1e-12)
    assert [node["steps"] for node in result.nodes] == [8, 5]
    assert [node["samples"] for node in result.nodes] == [6 + 9, 9]
    assert result.samples == 24 and result.workers == 2


def test_the_learning_rate_is_scaled_by_the_workers_that_are_there():
    result = shoal.run(quadratic(lr=0.1), "sync", crew="1@0,2@3", transport="sim", scale_lr="linear")
    x, w = order(24, 0), 0.0
    for k in range(3):
        w -= 0.1 * (w - mean(x[2 * k : 2 * k + 2]))
    for k in range(5):
        w -= 0.2 * (w - mean(x[6 + 4 * k : 10 + 4 * k]))
    assert float(weights(result)) == pytest.approx(w, abs=1e-12)
    assert [leg["lr"] for leg in result.legs] == [0.1, 0.2] and result.config["lr"] == 0.2


def test_the_momentum_of_blocks_is_carried_over():
    bmuf = BMUF(period=2, warmup=0, momentum=0.5, nesterov=False)
    result = shoal.run(quadratic(), bmuf, crew="1@0,2@4", transport="sim")
    x, start, delta = order(24, 0), 0.0, 0.0

    def block(batches: list[list[int]]) -> float:
        w = start
        for batch in batches:
            w -= 0.5 * (w - mean(batch))
        return w - start

    for k in range(2):
        delta = 0.5 * delta + block([x[4 * k : 4 * k + 2], x[4 * k + 2 : 4 * k + 4]])
        start += delta
    for k in range(2):  # worker 0 takes every second sample, worker 1 the others
        four = [x[8 + 8 * k + 4 * j : 12 + 8 * k + 4 * j] for j in range(2)]
        delta = 0.5 * delta + mean([block([four[0][r::2], four[1][r::2]]) for r in range(2)])
        start += delta
    assert float(weights(result)) == pytest.approx(start, abs=1e-12)


def test_the_optimizer_of_a_server_is_carried_over():
    task = quadratic(optimizer=torch.optim.Adam, batch=6)
    result = shoal.run(task, "asgd", crew="1@0,2@2", epochs=2, transport="sim", compute="1s,0%,1:1.1x")
    point = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([point], lr=0.5)

    def apply(at: float, batch: list[int]) -> None:
        point.grad = torch.tensor([at - mean(batch)], dtype=torch.float64)
        adam.step()

    first, second = order(24, 0), order(24, 1)
    apply(0.0, first[:6])
    apply(float(point.detach()), first[6:12])
    # both pull, worker 1 is slower; its gradient is one version old, and from then on both are
    pulled = {0: float(point.detach()), 1: float(point.detach())}
    for batch in (first[12:], second[:12], second[12:]):
        for rank in (0, 1):
            apply(pulled[rank], batch[rank::2])
            pulled[rank] = float(point.detach())
    assert float(weights(result)) == pytest.approx(float(point.detach()), abs=1e-9)
    assert result.staleness == {"0": 3, "1": 5}


def test_new_workers_take_over_the_velocity_of_the_first():
    task = quadratic(lr=0.1, optimizer=partial(torch.optim.SGD, momentum=0.9))
    result = shoal.run(task, "sync", crew="1@0,2@3", transport="sim")
    x, w, v = order(24, 0), 0.0, 0.0
    batches = [x[2 * k : 2 * k + 2] for k in range(3)] + [x[6 + 4 * k : 10 + 4 * k] for k in range(5)]
    for batch in batches:
        v = 0.9 * v + (w - mean(batch))
        w -= 0.1 * v
    assert float(weights(result)) == pytest.approx(w, abs=1e-12)


# -- as other runs are -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["sync", "bmuf", "asgd", "gossip"])
def test_a_crew_that_does_not_grow_is_so_many_workers(word):
    settings = {"transport": "sim", "epochs": 2, "compute": "10ms,10%", "network": "1Gbit,1ms"}
    crew, plain = (
        shoal.run(blobs(), word, crew="3@0", **settings),
        shoal.run(blobs(), word, workers=3, **settings),
    )
    assert torch.equal(weights(crew), weights(plain))
    assert crew.digest == plain.digest and crew.seconds == plain.seconds
    assert crew.curve == plain.curve and repr(crew.nodes) == repr(plain.nodes)
    assert [leg["workers"] for leg in crew.legs] == [3] and plain.legs == []


REFUSED = {
    "single": "Single runs on 1 worker",
    "ensemble": "models of their own",
    "downpour": "its own share",
    "sandblaster": "no step in common",
}


@pytest.mark.parametrize("word", mostly_soak([word for word in STRATEGIES if word not in REFUSED], 5))
def test_every_strategy_trains_in_two_legs(word):
    result = shoal.run(blobs(), word, crew=CREW, transport="sim", epochs=3, compute="10ms")
    assert result.samples == 3 * 300 == sum(leg["samples"] for leg in result.legs)
    assert result.curve[-1]["samples"] == 900 and result.test_accuracy > 60
    assert result.staleness_mean is None or result.staleness_mean < 5


@pytest.mark.parametrize("word", REFUSED)
def test_some_strategies_are_refused_with_the_reason(word):
    with pytest.raises(ValueError, match=REFUSED[word]):
        shoal.run(blobs(), word, crew="1@0,2@4", transport="sim")


def test_downpour_grows_where_shares_are_not_fixed():
    strategy = shoal.Downpour(fixed_shares=False, optimizer="adagrad", rate=0.1, n_fetch=3, n_push=3)
    result = shoal.run(blobs(), strategy, crew="1@0,3@5", transport="sim", epochs=3)
    assert result.samples == 900 and result.test_accuracy > 60
    assert result.staleness_mean < 10  # the first push after the edge knows what its worker had


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"crew": "1@0,2@5", "workers": 4}, "which ends with 2: leave workers out"),
        ({"crew": "1@0,2@500"}, "the run ends after 19 steps of each worker"),
        ({"crew": "1@0,2@5", "strategy": BMUF(blocks=2)}, "blocks=2 cuts the data up"),
        ({"crew": "1@0,4@5", "strategy": "hierarchical"}, "more groups than the 1 workers"),
        ({"crew": "1@0,2@5", "faults": Faults()}, "a crew that grows moves them"),
    ],
)
def test_settings_that_make_no_sense_with_a_crew_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        shoal.run(blobs(), **{"transport": "sim", **settings})


def test_with_a_batch_that_grows_epochs_stay_those_of_the_run():
    result = shoal.run(blobs(), "sync", crew="1@0,2@10", grow_batch="2@1", epochs=2, transport="sim")
    # 160 of 300 samples, then 140 in batches of 2 x 16: 5 steps, and an epoch in batches of 2 x 32: 5 steps
    assert [node["steps"] for node in result.nodes] == [10 + 5 + 5, 5 + 5]
    assert result.samples == 600


# -- figures ---------------------------------------------------------------------------------------


def test_figures_join_across_legs():
    settings = {"transport": "sim", "epochs": 2, "compute": "10ms", "network": "1Mbit,1ms"}
    result = shoal.run(blobs(), "asgd", crew="1@0,3@6", **settings)
    first, second = result.legs
    assert (first["workers"], first["step"], first["began"]) == (1, 0, 0.0)
    assert (second["workers"], second["step"], second["began"]) == (3, 6, first["seconds"])
    assert result.seconds == pytest.approx(first["seconds"] + second["seconds"])
    assert result.bytes_sent == first["bytes_sent"] + second["bytes_sent"]
    workers = [node for node in result.nodes if node["role"] == "worker"]
    assert [node["rank"] for node in result.nodes] == [0, 1, 2, 3]
    assert [node["seconds"] for node in workers] == pytest.approx([result.seconds, *[second["seconds"]] * 2])
    assert result.nodes[3]["role"] == "server" and set(workers[0]["waited_for"]) == {"3"}
    assert sum(node["samples"] for node in workers) == 600
    seconds, samples = ([point[key] for point in result.curve] for key in ("seconds", "samples"))
    assert seconds == sorted(seconds) and samples == sorted(set(samples))
    assert first["samples"] in samples, "the model at the edge is on the curve"


def test_listeners_know_servers_by_the_rank_they_have_in_the_end():
    seen = set()
    shoal.run(
        blobs(),
        "asgd",
        crew="1@0,3@6",
        transport="sim",
        on_progress=lambda event: seen.add((event["role"], event["rank"])),
    )
    assert ("server", 3) in seen and ("server", 1) not in seen


# -- checkpoints -----------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class StopsAfter:
    """The loss of blobs, which ends the run at the gradient of that number."""

    def __init__(self, gradients: int) -> None:
        self.left = gradients

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.left -= torch.is_grad_enabled()
        if self.left < 0:
            raise Stopped
        return nn.functional.cross_entropy(out, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "gradients"),
    sampled(["sync", "bmuf", "asgd"], [2 * 5, 2 * 8 + 1, 2 * 8 + 3 * 3]),  # early, at the edge, in leg 2
)
def test_a_run_resumes_in_the_leg_in_which_it_stopped(word, gradients, tmp_path):
    settings = {"crew": "2@0,3@8", "epochs": 2, "transport": "sim", "compute": "10ms"}
    straight = shoal.run(blobs(), word, **settings)
    stops = replace(blobs(), loss=StopsAfter(gradients))
    with pytest.raises(Stopped):
        shoal.run(stops, word, checkpoint=tmp_path, every=2, **settings)
    assert (tmp_path / "leg-1" / "edge").is_dir() == (gradients > 2 * 8)
    assert any((tmp_path / "leg-2").glob("step-*")) == (gradients > 2 * 8 + 2)
    resumed = shoal.run(blobs(), word, checkpoint=tmp_path, every=2, **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.samples == straight.samples == 600
    assert len(resumed.legs) == (1 if gradients > 2 * 8 else 2)


def test_the_last_test_is_that_of_the_last_leg_however_few_there_are():
    often, once = (
        shoal.run(blobs(), "sync", crew=CREW, transport="sim", epochs=2, tests=tests) for tests in (20, 0)
    )
    assert [point["samples"] for point in once.curve][-1] == 600 == often.curve[-1]["samples"]
    assert once.test_accuracy == often.curve[-1]["test_accuracy"]
    samples = [point["samples"] for point in often.curve]
    assert samples == sorted(set(samples))


class Done:
    """A crew that was asked to stop when it was done."""

    began_at = None
    was_asked_to_stop = True
    started = False

    def start_all(self):
        pass

    def see_through(self, *meanwhile):
        self.started = True
        return []

    def end_all(self):
        pass


def test_ctrl_c_when_a_leg_is_done_keeps_the_next_from_beginning(tmp_path):
    legs = [
        SimpleNamespace(workers=n, edge_after=lambda root: SimpleNamespace(seal=lambda: None)) for n in (1, 2)
    ]
    crews = [Done(), Done()]
    with pytest.raises(shoal.Interrupted):
        processes._see_through(legs, crews, str(tmp_path), SimpleNamespace())
    assert [crew.started for crew in crews] == [True, False]


def test_the_checkpoint_of_another_crew_is_refused(tmp_path):
    settings = {"transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), "sync", crew="1@0,2@5", **settings)
    with pytest.raises(shoal.CheckpointError, match=r"crew='1@0,2@5' \(now '1@0,2@6'\)"):
        shoal.run(blobs(), "sync", crew="1@0,2@6", **settings)
    with pytest.raises(shoal.CheckpointError, match="belongs to a run whose crew grows"):
        shoal.run(blobs(), "sync", workers=2, **settings)


# -- real processes --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mostly_soak([BMUF(period=4), shoal.Sync()], few=1), ids=repr)
def test_real_processes_learn_the_same(strategy):
    settings = {"crew": CREW, "epochs": 2, "collective": "stripes"}
    real, virtual = (shoal.run(blobs(), strategy, transport=t, **settings) for t in ("processes", "sim"))
    assert torch.equal(weights(real), weights(virtual))
    assert real.bytes_sent == virtual.bytes_sent and real.samples == virtual.samples == 600
    assert [leg["samples"] for leg in real.legs] == [leg["samples"] for leg in virtual.legs]
    assert real.seconds == pytest.approx(sum(leg["seconds"] for leg in real.legs))


@pytest.mark.slow
@pytest.mark.soak
def test_ctrl_c_in_a_later_leg_saves_and_the_same_call_goes_on(tmp_path):
    pressed = []

    def press_ctrl_c(event):
        if event["step"] > 8 and not pressed:
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"crew": "2@0,3@5", "epochs": 12, "checkpoint": tmp_path}
    with pytest.raises(shoal.Interrupted):
        shoal.run(blobs(), sabotage.Slow(), on_progress=press_ctrl_c, **settings)
    assert (tmp_path / "leg-1" / "edge").is_dir() and not (tmp_path / "model.safetensors").exists()
    assert len(list((tmp_path / "leg-2").glob("step-*"))) == 1
    resumed = shoal.run(blobs(), sabotage.Slow(), **settings)
    assert len(resumed.legs) == 1 and resumed.legs[0]["samples"] < 12 * 300 - 160
    straight = shoal.run(blobs(), "sync", crew="2@0,3@5", epochs=12, transport="sim")
    assert torch.equal(weights(resumed), weights(straight))
