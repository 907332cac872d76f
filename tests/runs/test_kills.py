"""Processes killed with -9 at random moments: nothing acknowledged is lost, and nobody hangs."""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sabotage
import shoal
from convex import convex
from marks import SAMPLES, marks
from shoal.core.errors import WorkerFailed
from shoal.core.task import Task
from shoal.launch.crew import Crew
from shoal.launch.member import Member
from shoal.strategies import BMUF, DiLoCo, Local, PostLocal, Sandblaster, SlowMo, Sync
from shoal.testing import blobs
from throttled import Throttle

WORKERS = 4
PAUSE_SECONDS = 0.35
"""How long a batch takes until the last kill: five seconds for each kill, with few batches to compute."""

SILENCE_SECONDS = 10.0
"""How long a run may show no progress on a quiet machine, whatever is killed."""

Choose = Callable[[Crew], Member | None]


class Assassin:
    """Kills what `choose` names, `kills` times, at random moments; and watches that the run goes on.

    Its `task` is slow until the last kill, so that the run is not over before.
    """

    def __init__(self, crews: list[Crew], choose: Choose, kills: int, seed: int, folder: Path) -> None:
        self.killed: list[int] = []
        self.longest_silence = 0.0
        self._crews, self._choose, self._kills = crews, choose, kills
        self._throttle = Throttle(folder / "slow", PAUSE_SECONDS)
        self._random = random.Random(seed)
        self._began = self._last = time.monotonic()
        self._start_seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Assassin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def task(self, task: Task) -> Task:
        """The same task, but slow until the last kill."""
        return self._throttle.task(task)

    def heard(self, event: dict[str, object]) -> None:
        """Progress of the run."""
        now = time.monotonic()
        self._start_seconds = self._start_seconds or now - self._began
        if self.killed:
            self.longest_silence = max(self.longest_silence, now - self._last)
        self._last = now

    @property
    def has_waited_too_long(self) -> bool:
        """Whether the run showed no progress for longer than it may, and starting processes explains."""
        return self.longest_silence > SILENCE_SECONDS + 2 * self._start_seconds

    def _work(self) -> None:
        while len(self.killed) < self._kills and not self._over.wait(self._random.uniform(0.05, 0.6)):
            victim = self._choose(self._crews[0]) if self._crews and self._crews[0]._went_at else None
            if victim is not None and victim.ready and not victim.ended:
                os.kill(victim.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                self.killed.append(victim.process.pid)  # type: ignore[attr-defined]
                while not (victim.ended or self._over.wait(0.02)):
                    pass  # until the launcher has seen it: the next victim must not be the last who trains
        self._throttle.release()


def the_server(crew: Crew) -> Member | None:
    return crew.members[WORKERS]


def a_worker(crew: Crew) -> Member | None:
    """The last of the workers that still run, unless it is the only one."""
    running = [m for m in crew.members[:WORKERS] if not m.ended and m.process.is_alive()]
    return running[-1] if len(running) > 1 else None


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(autouse=True)
def quietly(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "kills", "epochs"),
    [
        ("processes", 2, 2),
        ("grpc", 1, 2),
        pytest.param("gloo", 1, 2, marks=pytest.mark.soak),
        pytest.param("processes", 10, 8, marks=pytest.mark.soak),
        pytest.param("grpc", 3, 8, marks=pytest.mark.soak),
    ],
)
def test_a_server_killed_again_and_again_loses_nothing_it_acknowledged(
    crews, tmp_path, transport, kills, epochs
):
    with Assassin(crews, the_server, kills, 1, tmp_path) as assassin:
        result = shoal.run(
            assassin.task(marks()),
            "asgd",
            workers=WORKERS,
            epochs=epochs,
            durability="journal",
            transport=transport,
            on_progress=assassin.heard,
        )
    assert len(assassin.killed) == kills, "the run was over before all kills"
    assert torch.equal(result.model.marks, torch.full((SAMPLES,), -float(epochs), dtype=torch.float64))
    assert not assassin.has_waited_too_long
    assert all(is_gone(pid) for pid in assassin.killed)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 2, 3))])
def test_the_others_do_what_killed_workers_left_undone(crews, tmp_path, seed):
    with Assassin(crews, a_worker, 3, seed, tmp_path) as assassin:
        result = shoal.run(
            assassin.task(marks()), "asgd", workers=WORKERS, epochs=3, on_progress=assassin.heard
        )
    assert len(assassin.killed) == 3, "the run was over before all kills"
    assert torch.equal(result.model.marks, torch.full((SAMPLES,), -3.0, dtype=torch.float64))
    assert not assassin.has_waited_too_long


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_a_server_loses_without_a_journal_is_said(crews, tmp_path):
    with Assassin(crews, the_server, 1, 3, tmp_path) as assassin:
        result = shoal.run(
            assassin.task(marks()), "asgd", workers=WORKERS, epochs=2, on_progress=assassin.heard
        )
    assert len(assassin.killed) == 1
    lost = result.model.marks + 2.0  # an update that is lost is missing, none is there twice
    assert bool((lost >= 0).all())
    server = result.nodes[-1]
    assert any("died and came back at version" in fault for fault in server["faults"])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_without_a_server_whose_workers_are_all_killed_fails_and_says_so(crews, tmp_path):
    def all_at_once(crew: Crew) -> Member | None:
        for m in crew.members[1:WORKERS]:
            os.kill(m.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return crew.members[0]

    with (
        Assassin(crews, all_at_once, 1, 5, tmp_path),
        # the second if the launcher has started one of them again before it sees the last one die
        pytest.raises(
            WorkerFailed, match=r"it was ended by SIGKILL|every worker that had the model was killed"
        ),
    ):
        shoal.run(marks(), "sync", workers=WORKERS, epochs=200)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_outlives_all_its_workers_and_they_come_back(crews, tmp_path):
    def all_at_once(crew: Crew) -> Member | None:
        for m in crew.members[1:WORKERS]:
            os.kill(m.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return crew.members[0]

    with Assassin(crews, all_at_once, 1, 5, tmp_path) as assassin:
        result = shoal.run(assassin.task(marks()), "asgd", workers=WORKERS, epochs=2)
    assert torch.equal(result.model.marks, torch.full((SAMPLES,), -2.0, dtype=torch.float64))


def has_stepped(member: Member) -> bool:
    """Whether it has done a step since it was started, and so has the model."""
    return member.first_progress is not None and member.progress.get("step", 0) > member.first_progress[1]


def a_worker_or_the_keeper(crew: Crew) -> Member | None:
    """Now a worker that trains, now the keeper; never the only worker that has the model."""
    begun = [m for m in crew.members[:WORKERS] if has_stepped(m) and not m.ended]
    number = sum(m.incarnation for m in crew.members)
    if number % 3 == 2:
        return crew.members[WORKERS]
    return begun[number % len(begun)] if len(begun) > 1 else None


def wide_net() -> nn.Module:
    """Large enough that processes average in mapped memory."""
    return nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 3))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # fifty kills take five minutes on quiet cores
@pytest.mark.parametrize(
    ("strategy", "transport", "kills"),
    [
        (Sync(), "processes", 15),
        (BMUF(period=4), "processes", 5),
        (BMUF(period=4, overlap=1), "grpc", 5),
        (Sync(), "gloo", 5),
        *(
            pytest.param(strategy, transport, 50, marks=pytest.mark.soak)
            for strategy, transport in (
                *((Sync(), transport) for transport in ("processes", "grpc", "gloo")),
                *((BMUF(period=4), transport) for transport in ("processes", "grpc", "gloo")),
                *((Local(period=3, overlap=1), transport) for transport in ("processes", "gloo")),
                *((DiLoCo(period=8), transport) for transport in ("processes", "grpc")),
                *((strategy, "processes") for strategy in (SlowMo(period=4), Local(period=3), PostLocal())),
            )
        ),
    ],
)
def test_workers_and_the_keeper_are_killed_and_every_sample_counts_once(
    crews, tmp_path, monkeypatch, strategy, transport, kills
):
    epochs, task, temporary = 3 * kills, replace(blobs(), model=wide_net), tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    settings = {"workers": WORKERS, "epochs": epochs, "tests": 0, "transport": transport}
    with Assassin(crews, a_worker_or_the_keeper, kills, 2, tmp_path) as assassin:
        result = shoal.run(assassin.task(task), strategy, **settings, on_progress=assassin.heard)
    assert len(assassin.killed) == kills, "the run was over before all kills"
    assert result.samples == epochs * len(task.data().x)
    assert not assassin.has_waited_too_long
    assert all(is_gone(pid) for pid in assassin.killed)
    assert [path.name for path in temporary.iterdir() if path.name.startswith("shoal")] == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_spare_takes_the_place_of_a_killed_worker_and_training_waits_for_the_least_number(crews, tmp_path):
    frozen: list[int] = []  # the spare, until training waits: it might join before worker 1 is missed

    def worker_1_once_a_spare_waits(crew: Crew) -> Member | None:
        ready = [spare.pid for spare, line in crew.spares._waiting if line.poll()]
        for pid in ready:
            os.kill(pid, signal.SIGSTOP)
            frozen.append(pid)
        return crew.members[1] if ready else None

    def heard(event: dict[str, object]) -> None:
        crews[0].start = start_anew

    def wake_it_once_training_waits() -> None:
        while not ((frozen and crews[0]._warned) or is_over.wait(0.05)):
            pass
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    def start_anew(number: int, incarnation: int) -> Member:
        raise AssertionError("a spare was there")

    settings = {"workers": 2, "epochs": 60, "tests": 0, "min_workers": 2, "spares": 1}
    is_over = threading.Event()
    waker = threading.Thread(target=wake_it_once_training_waits)
    waker.start()
    try:
        with Assassin(crews, worker_1_once_a_spare_waits, 1, 1, tmp_path) as assassin:
            result = shoal.run(assassin.task(blobs()), BMUF(period=4), **settings, on_progress=heard)
    finally:
        is_over.set()
        waker.join()
    assert len(assassin.killed) == 1, "the run was over before the kill"
    assert result.samples == 60 * len(blobs().data().x)
    assert crews[0]._warned == {"training waits: it needs 2 workers, and 1 are there"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_killed_when_all_workers_have_left_comes_back_and_waits_for_nobody(crews, tmp_path):
    def the_server_once_it_is_alone(crew: Crew) -> Member | None:
        return crew.members[WORKERS] if all(m.report for m in crew.members[:WORKERS]) else None

    with Assassin(crews, the_server_once_it_is_alone, 1, 7, tmp_path) as assassin:
        result = shoal.run(blobs(), sabotage.Lingers(), workers=WORKERS)
    assert len(assassin.killed) == 1
    assert result.workers == WORKERS
    assert any("died and came back" in fault for fault in result.nodes[-1]["faults"])


def slow_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For which a kill comes in time, though little is to be computed."""
    time.sleep(0.01)
    return torch.nn.functional.cross_entropy(outputs, labels)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "servers"),
    [("processes", 2), pytest.param("grpc", 2, marks=pytest.mark.soak)],
)
def test_killed_workers_change_only_who_computes_which_portion(crews, tmp_path, transport, servers):
    strategy = Sandblaster(tolerance=1e-8, l2=0.01)
    task = replace(convex(), batch=8, loss=slow_loss)
    whole = shoal.run(
        replace(convex(), batch=8), strategy, workers=WORKERS, servers=servers, epochs=100, transport="sim"
    )
    with Assassin(crews, a_worker, 1, 5, tmp_path) as assassin:
        result = shoal.run(
            task,
            strategy,
            workers=WORKERS,
            servers=servers,
            epochs=100,
            transport=transport,
            on_progress=assassin.heard,
        )
    assert len(assassin.killed) == 1, "the run was over before the kill"
    # sums of gradients in another order: the last bits of double precision
    assert torch.allclose(result.model.weight, whole.model.weight, rtol=0, atol=1e-9)
    ours, theirs = result.nodes[-servers], whole.nodes[-servers]
    assert ours["steps"] == theirs["steps"]  # iterations
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    assert not assassin.has_waited_too_long
