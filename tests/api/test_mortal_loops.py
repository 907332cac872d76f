"""Workers of a user's own loop are killed: the others go on, they come back, and every sample counts once."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import mortal_parts
import pytest
import torch
from torch.nn import functional as F

from ports import free_port
from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.core.errors import WorkerFailed
from shoal.launch.crew import Crew
from shoal.launch.member import order

run_loop = partial(run_a_script, script=Path(__file__).with_name("mortal_loop.py"), workers=3, strategy=None)
PARTS = Path(__file__).with_name("mortal_parts.py")
pytestmark = [pytest.mark.usefixtures("warm_scripts"), pytest.mark.slow, pytest.mark.timeout(120)]

SAMPLES = 60


def ended(printed: list[str]) -> list[torch.Tensor]:
    """The final weights of those who came to the end, which all have the same."""
    found = [final_weights(lines) for lines in printed if "weights" in lines]
    assert found
    assert all(torch.equal(own, found[0]) for own in found)
    assert sum("is first" in lines for lines in printed) == 1
    return found


def kill(*moments: str) -> list[str]:
    return ["--kill", *moments]


@pytest.mark.parametrize(
    ("moments", "epochs"),
    [
        *(pytest.param([moment], 8, marks=pytest.mark.soak) for moment in ("1:3", "0:5")),
        (["1:4", "2:4"], 8),
        (["1:eval"], 2),
        (["0:end"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_sample_counts_once_an_epoch_whoever_is_killed(moments, epochs, tmp_path):
    waits = ["--returns", str(tmp_path)] if epochs > 2 else []
    printed = run_loop("--epochs", str(epochs), *waits, *kill(*moments))
    for counts in ended(printed):
        assert torch.equal(counts, torch.full((SAMPLES,), float(epochs)))
    if epochs > 2:
        assert sum("goes on from" in lines for lines in printed) == len(moments)
        assert len(ended(printed)) == 3


def test_a_worker_that_is_back_after_the_keeper_has_ended_does_not_wait_for_it(monkeypatch):
    """The launcher has not heard that the others are done when the successor is ready."""
    start_again, hear, orders = Crew._start_again, Crew._hear, []

    def start_again_without_a_keeper(self, member, how):
        self.members[-1].process.join(20)
        start_again(self, member, how)

    def hear_the_others_last(self, members, seconds):
        back = [m for m in self.members if m.incarnation]
        waits = len(members) > 1 and any(not (m.ready or m.ended) for m in back)
        hear(self, [m for m in members if m in back] if waits else members, seconds)

    def note(member, what):
        if member.incarnation:
            orders.append(what["order"])
        order(member, what)

    monkeypatch.setattr(Crew, "_start_again", start_again_without_a_keeper)
    monkeypatch.setattr(Crew, "_hear", hear_the_others_last)
    monkeypatch.setattr("shoal.launch.crew.order", note)
    printed = run_loop("--epochs", "2", *kill("0:end"))
    assert [counts.unique().tolist() for counts in ended(printed)] == [[2.0]] * 2
    assert orders == []


@pytest.mark.parametrize(
    "transport",
    [
        "gloo",
        pytest.param("grpc", marks=pytest.mark.soak),
    ],  # tests/runs/test_kills.py kills workers over gRPC
)
def test_over_other_transports_they_come_back_too(transport, tmp_path):
    printed = run_loop("--epochs", "8", "--returns", str(tmp_path), *kill("1:3"), transport=transport)
    assert [counts.unique().tolist() for counts in ended(printed)] == [[8.0]] * 3


def test_over_gloo_the_last_worker_ends_although_the_others_have_gone():
    """Its average is over itself, and nobody else can end it."""
    printed = run_loop(
        "--epochs", "1", "--pause", "0", *kill("1:5"), transport="gloo", strategy="sync", workers=2
    )
    assert "weights" in printed[0]


@pytest.mark.soak
def test_a_port_is_that_of_the_first_who_listens_and_the_others_take_those_after_it():
    listens = {"listen": f"127.0.0.1:{free_port()}"}
    printed = run_loop("--epochs", "1", "--pause", "0", transport="grpc", access=listens)
    assert len(ended(printed)) == 3


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_over_gloo_a_gradient_is_averaged_anew_if_a_worker_dies_while_it_travels(victim, tmp_path):
    """One machine that does the steps which were done, with all their samples, ends with the same model."""
    printed = run_a_script(str(tmp_path), f"{victim}:7", script=PARTS, workers=3, transport="gloo")
    done: dict[int, list[int]] = {}
    for line in "\n".join(printed).splitlines():
        if line.startswith("did "):
            _, step, samples = line.split(" ", 2)
            done.setdefault(int(step), []).extend(json.loads(samples))
    counts = Counter(sample for samples in done.values() for sample in samples)
    assert counts == dict.fromkeys(range(mortal_parts.SAMPLES), mortal_parts.EPOCHS)
    assert len(done[6]) == 12 and len(done[7]) == 8
    assert all(int(lines.split("early ")[1].split()[0]) > 20 for lines in printed)
    model, x = mortal_parts.built(), mortal_parts.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=mortal_parts.RATE, momentum=mortal_parts.MOMENTUM)
    for step in sorted(done):
        optimizer.zero_grad()
        F.mse_loss(model(x[done[step]]), x[done[step]]).backward()
        optimizer.step()
    for lines in printed:
        assert torch.allclose(final_weights(lines), mortal_parts.weights(model), atol=1e-5)


@pytest.mark.parametrize(
    "samples", mostly_soak([61, 62], few=1)
)  # so that a pass may end with fewer samples than workers
def test_batches_of_one_sample_and_a_kill_in_the_last_step_of_a_pass(samples):
    options = ["--epochs", "2", "--batch", "1", "--pause", "0.01", "--samples", str(samples)]
    printed = run_loop(*options, *kill("2:20"))
    for counts in ended(printed):
        assert torch.equal(counts, torch.full((samples,), 2.0))


def test_with_local_steps_no_sample_counts_twice_and_what_is_lost_is_said():
    printed = run_loop("--epochs", "8", "--period", "4", *kill("1:13", "0:39"))
    counts = ended(printed)[0]
    lost = [int(line.split("UserWarning: ")[1].split()[0]) for line in said(printed, "are not in the model")]
    assert counts.max() <= 8.0
    assert 8 * SAMPLES - int(counts.sum()) == sum(lost)


@pytest.mark.parametrize("strategy", mostly_soak(["bmuf", "sync", "local", "diloco", "slowmo"], few=1))
def test_every_strategy_that_averages_ends_with_one_model(strategy, tmp_path):
    options = {} if strategy == "sync" else {"strategy_options": {"period": "4"}}
    words = ["--epochs", "8", "--gamma", "0.9", "--returns", str(tmp_path)]
    printed = run_loop(*words, *kill("1:4"), strategy=strategy, **options)
    assert len(ended(printed)) == 3
    assert "goes on from" in printed[1]
    buffers = {line for lines in printed for line in lines.splitlines() if line.startswith("buffers")}
    assert len(buffers) == 1


def test_a_stream_goes_on_and_what_is_lost_is_said():
    printed = run_loop("--data", "stream", "--epochs", "8", *kill("1:3"))
    counts = ended(printed)[0]
    assert said(printed, "1 batch of workers that are gone will not be trained on")
    assert int(counts.sum()) == 8 * SAMPLES - 4


@pytest.mark.parametrize(
    ("arguments", "strategy", "sentence"),
    [
        (["--data", "own"], None, "Read the data through shoal.shard"),
        (["--gamma", "0.9", "--per-batch", "wrong"], "sync", "has not brought its learning rate to step"),
        (["--uneven", "0"], None, "Take equally many batches for a step at every worker"),
    ],
    ids=["no shard", "learning rate", "uneven"],
)
def test_a_loop_that_would_go_wrong_ends_with_a_sentence(arguments, strategy, sentence, tmp_path):
    waits = ["--returns", str(tmp_path)]
    with pytest.raises(WorkerFailed, match=sentence):
        run_loop("--epochs", "12", *waits, *arguments, *kill("1:3"), strategy=strategy)


@pytest.mark.soak
def test_a_scheduler_is_brought_to_its_step_by_the_loop(tmp_path):
    falls = ["--gamma", "0.99", "--per-batch", "right", "--returns", str(tmp_path)]
    printed = run_loop("--epochs", "8", *falls, *kill("1:3"), strategy="sync")
    assert len(ended(printed)) == 3


@pytest.mark.soak  # tests/sim/test_resuming.py has it in virtual time
def test_a_checkpoint_knows_what_was_dealt_again(tmp_path):
    saves = {"checkpoint": str(tmp_path), "every": 1}
    with pytest.raises(WorkerFailed, match="exit code 9"):
        run_loop("--epochs", "12", "--stop-after", "43", *kill("1:3"), **saves)
    printed = run_loop("--epochs", "12", "--pause", "0", **saves)
    assert [counts.unique().tolist() for counts in ended(printed)] == [[12.0]] * 3


class Assassin(threading.Thread):
    """Kills workers and the keeper of a crew in turn, each when another worker has the model."""

    def __init__(self, crews: list[Crew], kills: int, seed: int) -> None:
        super().__init__()
        self.killed: list[str] = []
        self._crews, self._left, self._dice = crews, kills, random.Random(seed)
        self._over = threading.Event()

    def __enter__(self) -> Assassin:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while len(self.killed) < self._left and not self._over.wait(self._dice.uniform(0.1, 0.5)):
            members = self._crews[0].members if self._crews and self._crews[0]._went_at else []
            train = [m for m in members[:-1] if m.first_progress is not None and not m.ended]
            if len(train) < 2:
                continue
            victim = members[-1] if self._dice.random() < 0.2 else self._dice.choice(train)
            if victim.ready and not victim.ended:
                os.kill(victim.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                self.killed.append(victim.name)
                while not victim.ended and not self._over.wait(0.02):
                    pass  # until the launcher has seen it


@pytest.mark.parametrize(
    ("seed", "kills", "epochs"),
    [(1, 5, 30), *(pytest.param(k, 20, 120, marks=pytest.mark.soak) for k in range(2, 6))],
)
def test_workers_and_the_keeper_are_killed_again_and_again(crews, seed, kills, epochs):
    with Assassin(crews, kills, seed) as assassin:
        printed = run_loop("--epochs", str(epochs), "--pause", "0.02")
    crews.clear()  # with the pipes of its processes
    assert len(assassin.killed) == kills, "the run was over before all kills"
    assert {tuple(counts.unique().tolist()) for counts in ended(printed)} == {(float(epochs),)}


def said(printed: list[str], sentence: str) -> list[str]:
    return [line for lines in printed for line in lines.splitlines() if sentence in line]


@pytest.fixture(autouse=True)
def quietly(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield


@pytest.mark.soak  # tests/runs/test_kills.py has one in a run of Shoal's own loop
def test_a_spare_takes_the_place_of_a_killed_worker_and_training_waits_for_it(monkeypatch, caplog):
    listen, start_again, killed, started = Crew._listen, Crew._start_again, [], []
    frozen = []  # the spare, until training waits: it might join before worker 1 is missed

    def kill_once_a_spare_waits(self):
        ready = [spare.pid for spare, line in self.spares._waiting if line.poll()]
        if not killed and self._went_at and ready:
            frozen.extend(ready)
            os.kill(ready[0], signal.SIGSTOP)
            killed.append(self.members[1].process.pid)
            os.kill(killed[0], signal.SIGKILL)
        if frozen and self._warned:
            os.kill(frozen.pop(), signal.SIGCONT)
        listen(self)

    def without_a_new_process(self, member, how):
        start, self.start = self.start, lambda *place: pytest.fail("a spare was there")
        self.spares._number = 0  # no other spare takes its place
        start_again(self, member, how)
        self.start = start
        started.append(member.rank)

    monkeypatch.setattr(Crew, "_listen", kill_once_a_spare_waits)
    monkeypatch.setattr(Crew, "_start_again", without_a_new_process)
    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run_loop("--epochs", "40", min_workers=3, spares=1)
    assert started == [1]
    assert "goes on from" in printed[1]  # what the spare prints is worker 1's
    assert [counts.unique().tolist() for counts in ended(printed)] == [[40.0]] * 3
    assert "training waits: it needs 3 workers, and 2 are there" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"min_workers": 2, "strategy": "asgd"}, "nobody waits for others"),
        ({"min_workers": 4}, "take 1 to 3"),
        ({"spares": 1, "strategy": "gossip"}, "nobody takes the place"),
    ],
)
def test_least_numbers_and_spares_are_refused_where_nobody_comes_back(settings, why):
    with pytest.raises(ValueError, match=why):
        run_loop(**settings)


@pytest.mark.parametrize(
    ("settings", "why"), [({"min_workers": 2}, "nobody waits"), ({"spares": 1}, "nobody takes")]
)
def test_they_are_refused_if_the_strategy_in_the_script_keeps_no_roster(settings, why):
    with pytest.raises(WorkerFailed, match=f"the keeper failed: .*{why}"):
        run_loop("--strategy-in-code", "gossip", **settings)
