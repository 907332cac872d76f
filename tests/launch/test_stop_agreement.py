"""Workers without a launcher agree on the step at which all stop, whichever of them heard the signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch import distributed as dist

from shoal.core.identity import NodeIdentity
from shoal.launch import stop_agreement
from shoal.launch.stop_agreement import ASKED, StopAgreement


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_agreement, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(stop_agreement, "PATIENCE", 0.2)


@pytest.fixture
def crew() -> Iterator[Callable[..., list[StopAgreement]]]:
    """Nodes that meet at one store, each before a step; what is left of them is closed in the end."""
    made: list[StopAgreement] = []

    def begin(*steps: int, servers: int = 0) -> list[StopAgreement]:
        store = dist.HashStore()
        made.extend(
            StopAgreement(store, NodeIdentity(rank, len(steps), servers))
            for rank in range(len(steps) + servers)
        )
        for node in made:
            node.tell("ready")
        for node, step in zip(made, steps, strict=False):
            assert node.heard(step) is None
        return made

    yield begin
    for node in made:
        node.close()


def stops_before(node: StopAgreement, step: int, last: int = 10**6) -> int | None:
    """The step before which this worker stops, which trains on from `step`."""
    run_to, final = None, False
    while step < last:
        order = node.heard(step)
        if order is not None:
            run_to, final = order["step"], order["final"]
        while run_to == step and not final:
            order = node.await_order()
            run_to, final = order["step"], order["final"]
        if run_to == step:
            return step
        step += 1
        time.sleep(0.0002)
    return None


def stopped(nodes: list[StopAgreement], *steps: int, last: int = 10**6) -> list[int | None]:
    """The steps before which workers that train on at these steps stop."""
    found: list[int | None] = [None] * len(steps)

    def train(rank: int) -> None:
        found[rank] = stops_before(nodes[rank], steps[rank], last)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_a_signal_to_one_worker_stops_all_at_the_same_step(crew):
    nodes = crew(5, 40, 7)
    os.kill(os.getpid(), signal.SIGUSR1)  # the first of them took the signal
    steps = stopped(nodes, 5, 40, 7)
    assert len(set(steps)) == 1 and steps[0] is not None and steps[0] > 40


def test_a_worker_that_waits_for_the_others_keeps_nobody_waiting(crew):
    """Worker 1 is inside a step until the others have stopped; its thread has promised the next one."""
    nodes = crew(5, 9, 7)
    nodes[0]._ask(signal.SIGTERM, None)
    first, third = stopped(nodes[::2], 5, 7)
    assert first == third == stops_before(nodes[1], 10)


def test_a_signal_to_a_server_stops_the_workers(crew):
    nodes = crew(3, 3, servers=1)
    nodes[2]._ask(signal.SIGTERM, None)
    first, second = stopped(nodes, 3, 3)
    assert first == second and first is not None


def test_a_dead_worker_is_not_waited_for_long(crew):
    nodes = crew(3, 3, 3)
    nodes[2].close()  # it died, and promises nothing
    nodes[0]._ask(signal.SIGTERM, None)
    first, second = stopped(nodes[:2], 3, 3)
    assert first == second and first is not None


def test_after_one_has_finished_the_others_go_on_to_their_end(crew):
    nodes = crew(3, 8)
    nodes[1].tell("done")
    nodes[0]._ask(signal.SIGTERM, None)
    assert stopped(nodes[:1], 3, last=400) == [None]


def test_without_a_signal_nothing_is_asked(crew):
    nodes = crew(3, 8)
    assert stopped(nodes, 3, 8, last=50) == [None, None]
    assert not nodes[0]._store.check([ASKED])


def test_a_handler_of_the_script_s_own_stays(crew):
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        nodes = crew(3)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert stopped(nodes, 3, last=50) == [None]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_signals_are_given_back(crew):
    (node,) = crew(3)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    node.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
