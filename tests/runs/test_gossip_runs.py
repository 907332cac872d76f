"""Workers that gossip, as real processes: they learn, end together, and do without one that is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import shoal
from one_kill import run_with_a_kill
from sampling import mostly_soak
from shoal.api.script import run_script
from shoal.launch.environment import Place
from shoal.programs.tasks import TASKS
from shoal.strategies import ADPSGD, CHOCO, DPSGD, SGP, STRATEGIES, Gossip, GossipGraD, NoLoCo
from shoal.testing import blobs
from throttled import Throttle

GOSSIP = [word for word in STRATEGIES if STRATEGIES[word].survives and not STRATEGIES[word].independent]
IN_ROUNDS = [
    GossipGraD(),
    CHOCO(),
    DPSGD(),
    SGP(),
    NoLoCo(period=3),
]  # whoever is how fast, they learn the same
TRANSPORTS = ["processes", "gloo"]
MOSTLY = ["processes", pytest.param("gloo", marks=pytest.mark.soak)]  # what differs is tested elsewhere
EPOCHS = 15
EVEN = 0.01  # seconds that a batch takes at least: workers keep pace with each other on a busy machine, too
POINTS = {"gossip": 8}  # of accuracy that it may be behind: it moves two thirds as far
LOOP = Path(__file__).with_name("uneven_loop.py")


def weights(result: shoal.Result) -> torch.Tensor:
    assert result.model is not None
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@functools.cache
def synchronous() -> float:
    return shoal.run("digits", "sync", workers=4, epochs=10, transport="sim").test_accuracy


def test_all_are_tested_here():
    assert GOSSIP == ["gossip", "gossipgrad", "noloco", "dpsgd", "sgp", "adpsgd", "choco", "strom"]


@pytest.mark.slow
@pytest.mark.soak  # the run with a kill below learns as much
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("word", GOSSIP)
def test_they_learn_about_as_much_as_synchronous_training(word, transport, tmp_path):
    task = Throttle(tmp_path / "even", seconds=EVEN).task(TASKS.make("digits"))
    result = shoal.run(task, word, workers=4, epochs=10, transport=transport)
    assert result.test_accuracy > synchronous() - POINTS.get(word, 4)
    assert result.samples == result.curve[-1]["samples"] == 10 * 1437
    assert len(result.curve) > 10
    assert result.wait_fraction < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mostly_soak(IN_ROUNDS, few=1), ids=lambda s: type(s).__name__)
def test_in_rounds_they_are_bit_equal_in_virtual_time_on_sockets_and_on_gloo(strategy):
    results = [
        shoal.run(blobs(), strategy, workers=3, epochs=2, transport=transport)
        for transport in ("sim", *TRANSPORTS)
    ]
    virtual, sockets, gloo = (weights(result) for result in results)
    assert torch.equal(virtual, sockets)
    assert torch.equal(virtual, gloo)
    assert len({result.bytes_sent for result in results}) == 1


@pytest.mark.soak
def test_a_compressed_run_sends_less_and_learns():
    exact, half = (
        shoal.run("digits", "choco", workers=4, epochs=10, codec=codec) for codec in ("none", "fp16")
    )
    assert half.bytes_sent < 0.6 * exact.bytes_sent
    assert half.test_accuracy > synchronous() - 4


def run_digits_with_a_kill(word, transport, victim, crews, caplog, tmp_path, *, returns) -> shoal.Result:
    throttle = Throttle(tmp_path / "slow", seconds=0.05)
    task = throttle.task(TASKS.make("digits"))
    settings = {"workers": 4, "epochs": EPOCHS, "transport": transport}
    with caplog.at_level(logging.WARNING, logger="shoal"):
        return run_with_a_kill(task, word, victim, crews, throttle, returns=returns, pause=EVEN, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",  # tests/sim/test_gossip_returns.py has all of them, in virtual time
    [w if w == "gossip" else pytest.param(w, marks=pytest.mark.soak) for w in GOSSIP],
)
@pytest.mark.parametrize(
    "transport", ["processes", *(pytest.param(t, marks=pytest.mark.soak) for t in ("grpc", "gloo"))]
)
def test_a_killed_worker_comes_back_with_the_model_of_another(word, transport, crews, caplog, tmp_path):
    result = run_digits_with_a_kill(word, transport, 2, crews, caplog, tmp_path, returns=True)
    assert "worker 2 was ended by SIGKILL; the other 3 go on, and it is started again" in caplog.text
    assert result.workers == 4
    assert result.nodes[2]["steps"] > 0
    assert result.test_accuracy > synchronous() - POINTS.get(word, 4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "word",  # tests/strategies/test_gossip_ends.py kills workers of all, in virtual time
    [w if w == "choco" else pytest.param(w, marks=pytest.mark.soak) for w in GOSSIP],
)
@pytest.mark.soak
def test_a_killed_worker_that_cannot_come_back_is_done_without(
    word, victim, crews, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr("shoal.launch.crew.MOST_FALSE_STARTS", 0)
    result = run_digits_with_a_kill(word, "processes", victim, crews, caplog, tmp_path, returns=False)
    said = rf"worker {victim} was ended by SIGKILL; the other 3 go on\. Nobody does its last \d+ steps"
    assert re.search(said, caplog.text)
    assert result.workers == 3
    assert {node["rank"] for node in result.nodes} == {0, 1, 2, 3} - {victim}
    assert all(f"worker {victim} was lost" in node["faults"] for node in result.nodes)
    assert result.test_accuracy > synchronous() - POINTS.get(word, 4)


# -- a loop of your own ----------------------------------------------------------------------------


def run_loop(word: str, *arguments: str, workers: int = 3) -> dict[str, str]:
    """The final weights that each worker printed."""
    lines: dict[str, str] = {}
    run_script(
        LOOP,
        arguments,
        workers=workers,
        strategy=STRATEGIES.make(word),
        place=Place(strategy=word),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.update({name: line}),
    )
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("word", mostly_soak(["gossip", "dpsgd", "sgp", "adpsgd"], few=1))
@pytest.mark.usefixtures("warm_scripts")
def test_loops_of_different_lengths_end_with_the_same_model(word):
    printed = run_loop(word, workers=2)
    assert len(printed) == 2
    assert len(set(printed.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("word", ["adpsgd"])
@pytest.mark.usefixtures("warm_scripts")
def test_a_loop_that_is_killed_is_done_without(word, caplog):
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        printed = run_loop(word, "--die", "1", "5")
    assert printed.keys() == {"worker 0", "worker 2"}
    assert len(set(printed.values())) == 1


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", mostly_soak(IN_ROUNDS[::-1], few=1), ids=lambda s: type(s).__name__)
def test_in_rounds_a_resumed_run_is_bit_equal(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim"}
    shoal.run(blobs(), strategy, epochs=1, checkpoint=tmp_path, **settings)
    resumed = shoal.run(blobs(), strategy, epochs=3, checkpoint=tmp_path, every=3, **settings)
    straight = shoal.run(blobs(), strategy, epochs=3, **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.samples == straight.samples


@pytest.mark.parametrize("strategy", mostly_soak([SGP(overlap=2), Gossip(), ADPSGD()], few=1), ids=repr)
def test_the_others_resume_too(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), strategy, epochs=1, **settings)
    resumed = shoal.run(blobs(), strategy, epochs=4, **settings)
    assert resumed.samples == 4 * 300
    assert resumed.test_accuracy > 75


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["gossip", *(pytest.param(word, marks=pytest.mark.soak) for word in ("dpsgd", "adpsgd"))]
)
@pytest.mark.soak
def test_ctrl_c_saves_and_the_same_call_goes_on(word, tmp_path):
    pressed = []

    def press_ctrl_c(event: dict[str, object]) -> None:
        if event["step"] > 5 and not pressed:  # type: ignore[operator]
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"workers": 3, "checkpoint": tmp_path / "saved", "epochs": 10}
    slow = Throttle(tmp_path / "slow", seconds=0.5).task(blobs())  # not over before they hear of it
    with pytest.raises(shoal.Interrupted):
        shoal.run(slow, word, on_progress=press_ctrl_c, **settings)
    assert list(tmp_path.glob("saved/step-*/worker-2.json"))
    assert shoal.run(blobs(), word, **settings).samples == 10 * 300


# -- helping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", mostly_soak(["adpsgd", "gossip"], few=1))
def test_a_run_in_which_some_helped_goes_on_from_where_all_was_done(word, tmp_path):
    settings = {
        "workers": 3,
        "transport": "sim",
        "compute": shoal.Compute(0.02, jitter=0.1, slow={2: 6.0}),
        "checkpoint": tmp_path,
        "every": 5,
    }
    task = blobs()
    first = shoal.run(task, word, epochs=4, **settings)
    samples = [node["samples"] for node in first.nodes]
    assert max(samples) > 3 * min(samples)
    assert first.samples == sum(samples) == 4 * len(task.data().x)
    assert shoal.run(task, word, epochs=4, **settings).seconds < 0.1 * first.seconds
    more = shoal.run(task, word, epochs=7, **settings)
    assert more.samples == 7 * len(task.data().x)


class SlowForOne:
    """A loss whose computing takes longer in the first process that comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            place = self.folder / "slow"
            with contextlib.suppress(FileExistsError):
                place.symlink_to(str(os.getpid()))
            time.sleep(0.05 if str(place.readlink()) == str(os.getpid()) else 0.01)
        return torch.nn.functional.cross_entropy(outputs, labels)


@pytest.mark.slow
@pytest.mark.parametrize("transport", MOSTLY)
@pytest.mark.parametrize("word", ["gossip", pytest.param("adpsgd", marks=pytest.mark.soak)])
def test_processes_do_the_batches_of_a_slow_one(word, transport, tmp_path):
    task = dataclasses.replace(TASKS.make("digits"), loss=SlowForOne(tmp_path))
    result = shoal.run(task, word, workers=3, epochs=5, threads=1, transport=transport)
    slowest, *others = sorted(node["samples"] for node in result.nodes)
    assert result.samples == slowest + sum(others) == 5 * 1437
    assert slowest < 0.7 * min(others)
