"""gRPC: connections that carry nothing any more, as after an outage, are replaced within the session."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forwarder import Forwarder
from grpc_nodes import PATIENCE, connect, hub_and_caller, nodes, notices, receive, wait_until
from harness import drive, in_threads

from sampling import mostly_soak
from shoal.core.transport import LOST, Message
from shoal.transports.grpc import calls
from shoal.transports.grpc.control_pb2 import PollRequest
from shoal.transports.grpc.hub_protocol import POLL, STAY
from shoal.transports.grpc.redial import OUTDATED

pytestmark = pytest.mark.usefixtures("grpc_core")

HASTE = {"failure_timeout": 0.4, "patience": PATIENCE, "share_memory": False}


@contextlib.contextmanager
def over_a_forwarder() -> Iterator[tuple[Any, Any, Forwarder]]:
    """A hub, a node that calls it, and what is between them."""
    store = dist.HashStore()
    made: list[Forwarder] = []

    def play(rank: int) -> Any:
        if rank == 0:
            return connect(0, 2, store, **HASTE)
        made.append(Forwarder(store.get("shoal/grpc/0").decode()))
        return connect(1, 2, None, addresses={0: made[0].address}, **HASTE)

    hub, node = in_threads(2, play)
    try:
        yield hub, node, made[0]
    finally:
        in_threads(2, lambda rank: drive((hub, node)[rank].close()))
        made[0].close()


def say(t: Any, numbers: range, elements: int) -> None:
    for number in numbers:
        x = torch.full((elements,), float(number))
        drive(t.send(1 - t.rank, Message("talk", (x,), seq=number)))


def hear(t: Any, numbers: range) -> None:
    for number in numbers:
        m = receive(t)
        assert (m.tag, m.seq) == ("talk", number)
        assert bool((m.body == number).all())


def exchange(hub: Any, node: Any, numbers: range, elements: int) -> None:
    """Each tells the other these numbers, and hears those of the other once, in order."""
    talks = [threading.Thread(target=say, args=[t, numbers, elements]) for t in (hub, node)]
    for talk in talks:
        talk.start()
    for t in (hub, node):
        hear(t, numbers)
    for talk in talks:
        talk.join()


@pytest.mark.slow
@pytest.mark.parametrize("after", mostly_soak([100_000, 0, 3_000_000], few=1))
def test_nothing_is_lost_or_repeated_when_connections_go_dead(after: int) -> None:
    """Also in the midst of large messages, up or down."""
    with over_a_forwarder() as (hub, node, between):
        exchange(hub, node, range(1, 3), 100)
        between.go_dead(after)
        exchange(hub, node, range(3, 8), 400_000)
        exchange(hub, node, range(8, 12), 1)


@pytest.mark.slow
def test_a_node_that_ends_after_that_is_missed_at_once() -> None:
    with over_a_forwarder() as (hub, node, between):
        between.go_dead()
        exchange(hub, node, range(1, 3), 100)
        node._clients[0]._calls.cut("it is killed")
        assert notices(hub, 1) == [(LOST, 1, 0)]
        assert "connection broke" in hub.reasons[1]


def test_a_node_that_ends_between_two_polls_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(2, patience=3 * PATIENCE) as ((hub, node), _):
        goes_on = threading.Event()

        def stand_still(*_: Any) -> bytes:
            goes_on.wait()
            raise calls.CallFailed("UNAVAILABLE", "it was killed")

        monkeypatch.setattr(calls.HubCalls, "_poll", stand_still)
        say(hub, range(1, 2), 1)
        hear(node, range(1, 2))
        wait_until(lambda: len(hub._hub._by_rank[1].calls) == 1)  # a Stay: its last poll is answered
        node._clients[0]._calls.cut("it is killed")
        assert notices(hub, 1) == [(LOST, 1, 0)]
        assert "connection broke" in hub.reasons[1]
        monkeypatch.undo()
        goes_on.set()


def test_a_stay_follows_another() -> None:
    with nodes(2, failure_timeout=0.1, patience=PATIENCE) as ((hub, _), _):
        session = hub._hub._by_rank[1]
        seen: set[Any] = set()
        begin_call = session.begin_call

        def begun(call: Any, line: int) -> None:
            if call._rpc_event.call_details.method.decode() == STAY:
                seen.add(call)
            begin_call(call, line)

        session.begin_call = begun
        wait_until(lambda: len(seen) >= 3)
        assert session.here


def test_a_hub_that_has_heard_an_attempt_which_was_given_up_is_called_again() -> None:
    with over_a_forwarder() as (hub, node, _):
        redial = node._clients[0]._calls._redial
        redial._dialled = 1
        attempt = redial._dial(1)
        attempt.move(b"", timeout=PATIENCE, metadata=attempt.named(redial._metadata))
        attempt.close()
        exchange(hub, node, range(1, 4), 100)
        assert redial.line.number > 1


def test_a_hub_that_leaves_in_order_is_not_called_again() -> None:
    """It ends the call with which a node acknowledges its goodbye; that is no connection to replace."""
    with nodes(2, patience=3 * PATIENCE) as ((hub, node), _):
        drive(hub.close())
        polling = node._clients[0]._thread
        polling.join(PATIENCE)
        assert not polling.is_alive()


class OtherLine:
    """A line that another replaces after a minute."""

    def __init__(self, clock: list[float]) -> None:
        self.line = "old"
        self._clock = clock

    def note(self) -> None:
        pass

    def await_other(self, line: Any, code: str, deadline: float) -> bool:
        self._clock[0] += 60
        self.line = "new"
        return line == "old"


def test_a_call_that_is_repeated_on_a_new_line_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    session = calls.HubCalls.__new__(calls.HubCalls)
    session._redial = OtherLine(clock)  # type: ignore[assignment]
    made = []

    def call(line: Any, seconds: float) -> bytes:
        made.append((line, seconds))
        if line == "old":
            raise ValueError("it is closed")
        return b"answer"

    assert session._insist(65, call) == b"answer"
    assert made == [("old", 65), ("new", 65)]


def test_a_call_that_a_move_overtakes_is_not_served() -> None:
    with hub_and_caller() as (hub, caller):
        session = hub._hub._by_rank[1]
        begin_call = session.begin_call

        def overtaken(call: Any, line: int) -> None:
            begin_call(call, line)
            session.move_to(1)

        session.begin_call = overtaken
        assert caller.outcome(POLL, PollRequest().SerializeToString()) in OUTDATED
        wait_until(lambda: not session.calls)  # it has its answer before the hub is done with the call
        assert session.here


def test_a_move_waits_for_who_holds_the_hub_and_then_the_end_of_an_earlier_line_loses_nobody() -> None:
    with hub_and_caller() as (hub, _):
        session = hub._hub._by_rank[1]
        with hub._hub._members:
            move = threading.Thread(target=session.move_to, args=[1])
            move.start()
            move.join(0.05)
            assert move.is_alive() and session.line == 0
        move.join()
        hub._hub.lose(session, "its connection broke", 0)
        assert session.here and session.line == 1
        hub._hub.lose(session, "its connection broke", 1)
        assert not session.here
