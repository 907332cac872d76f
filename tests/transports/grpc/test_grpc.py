"""gRPC: the conformance suite, and what crashes, frozen peers and those who come back do."""

from __future__ import annotations

import contextlib
import importlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grpc_nodes import (
    PATIENCE,
    RUN,
    WAIT,
    WAYS,
    Puppet,
    connect,
    nodes,
    notices,
    receive,
    script,
    wait_until,
)
from harness import drive, grpc_world, in_process, in_threads

from sampling import mostly_soak, sampled
from shoal.core.errors import PeerLost, Unavailable
from shoal.core.transport import JOINED, LEFT, LOST, Message, Transport
from shoal.testing.conformance import CHECKS, World
from shoal.transports.grpc import GrpcTransport, Security
from shoal.transports.grpc.hub import ROOM_BYTES
from shoal.transports.grpc.sessions import FlowControl

pytestmark = pytest.mark.usefixtures("grpc_core")

LARGE = 3 << 20  # elements: more than ROOM_BYTES hold once, less than twice

HUBS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "first": lambda size: (0,),
    "last": lambda size: (size - 1,),
    "two": lambda size: tuple(range(size)[-2:]),
    "all": lambda size: tuple(range(size)),
}


# The contract


@pytest.mark.parametrize(("hubs", "way"), sampled(list(HUBS), list(WAYS)))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.whole
def test_conformance(check: Callable[[World], None], hubs: str, way: str) -> None:
    check(lambda size, body: grpc_world(size, body, HUBS[hubs](size), WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize("share", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("hub", [0, 1])
def test_a_large_message_crosses_both_ways_at_once(hub: int, share: bool | None) -> None:
    def node(rank: int) -> bool:
        options = {"limit_bytes": 64 << 20, "share_memory": share}
        with contextlib.closing(Closing(connect(rank, 2, store, (hub,), **options))) as t:
            x = torch.arange(10_000_000, dtype=torch.float32) + rank
            drive(t.send(1 - rank, Message("x", (x[:7], x, x[:0].double(), x[:9].long()))))
            seven, all_of_it, none, nine = receive(t).parts
            expected = x + (1 - 2 * rank)
            return (
                torch.equal(seven, expected[:7])
                and torch.equal(all_of_it, expected)
                and none.dtype == torch.float64
                and nine.tolist() == expected[:9].tolist()
            )

    store = dist.HashStore()
    assert in_threads(2, node) == [True, True]


class Closing:
    """A transport that can be closed outside a coroutine."""

    def __init__(self, t: GrpcTransport) -> None:
        self._t = t

    def __getattr__(self, name: str) -> Any:
        return getattr(self._t, name)

    def close(self) -> None:
        drive(self._t.close())


@pytest.mark.slow
def test_without_grpc_everything_else_can_be_imported() -> None:
    """In an interpreter of its own: programs that start warm have imported it."""
    code = "import sys; sys.modules['grpc'] = None; import shoal.api.run, shoal.api.script, shoal.cli.compare"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stderr


@pytest.mark.parametrize("module", ["grpc", "google.protobuf"])
def test_what_to_install_is_said(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "shoal.transports.grpc")
    monkeypatch.delitem(sys.modules, "shoal.transports.grpc.control_pb2")
    with pytest.raises(Unavailable, match=r"needs grpcio. Install it with: pip install 'shoal\[grpc\]'"):
        importlib.import_module("shoal.transports.grpc")


# Joining


@pytest.mark.slow
@pytest.mark.parametrize("hub", mostly_soak([1, 0], few=1))
def test_who_does_not_come_is_named(hub: int) -> None:
    store = dist.HashStore()

    def node(rank: int) -> str:
        with pytest.raises(PeerLost) as lost:
            connect(rank, 4, store, (hub,), timeout=1.0)
        return str(lost.value)

    first, second = in_threads(2, node)
    assert first.startswith("node 2, 3 did not join within 1 s (I am node 0)")
    assert second.startswith("node 2, 3 did not join within 1 s (I am node 1)")


@pytest.mark.parametrize("published", [False, True])
def test_a_missing_hub_is_named(published: bool) -> None:
    store = dist.HashStore()
    if published:
        store.set("shoal/grpc/0", "127.0.0.1:1")
    with pytest.raises(PeerLost, match=r"node 0 did not join within 0.2 s \(I am node 1\)"):
        connect(1, 2, store, timeout=0.2)


def test_hubs_can_be_found_without_a_store() -> None:
    settings: dict[str, Any] = {"hubs": (0,), "run_id": RUN, "manifest": "", "limit_bytes": 9, "timeout": 5}
    addresses: dict[int, str] = {}

    def node(rank: int) -> str | None:
        if rank == 1:
            addresses[0] = found.get(timeout=PATIENCE)
        t = GrpcTransport.connect(rank, 2, security=Security(), addresses=addresses, **settings)
        drive(t.close())
        return t.address

    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    original = GrpcTransport._meet

    def meet(t: GrpcTransport, deadline: float) -> None:
        if t.address is not None:
            found.put(t.address)
        original(t, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpcTransport, "_meet", meet)
        first, second = in_threads(2, node)
    assert first == addresses[0] and first.startswith("127.0.0.1:")
    assert second is None


# Leaving


def test_closing_leaves_no_thread() -> None:
    threads = threading.active_count()

    async def body(t: Transport) -> None:
        await t.send((t.rank + 1) % t.size, Message("round", (torch.ones(200_000),)))

    grpc_world(4, body)
    deadline = time.monotonic() + 2.0  # one that was told to stop may still be on its way out
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_a_port_is_free_again_once_its_hub_has_closed() -> None:
    with nodes(1) as ((t,), store):
        address = t.address
    again = connect(0, 1, store, listen=address)
    assert again.address == address
    drive(again.close())


@pytest.mark.slow
@pytest.mark.parametrize("hub", mostly_soak([1, 0], few=1))
def test_closing_waits_no_longer_than_its_limit_for_a_frozen_peer(
    hub: int, puppet: Puppet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("transport", "sessions", "server"):
        monkeypatch.setattr(f"shoal.transports.grpc.{module}.CLOSING_SECONDS", 0.5)
    puppet.do(script(1, 2, tmp_path / "store", "time.sleep(1); t._abandon()", hubs=(hub,)))
    t = connect(0, 2, dist.FileStore(str(tmp_path / "store"), 100), (hub,), timeout=60)
    with puppet.frozen():
        began = time.monotonic()
        drive(t.close())
        assert time.monotonic() - began < 3


def test_a_hub_that_has_closed_passes_messages_on_until_the_others_leave() -> None:
    with nodes(3) as ((hub, a, b), _):
        closing = threading.Thread(target=lambda: drive(hub.close()))
        closing.start()
        assert notices(a, 1) == notices(b, 1) == [(LEFT, 0, 0)]
        drive(a.send(2, Message("still", (torch.ones(LARGE),))))
        assert receive(b).tag == "still"
        assert closing.is_alive()
        drive(a.close())
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert notices(b, 1) == [(LEFT, 1, 0)]
        assert list(b.drain()) == []


def test_who_leaves_is_gone_for_good_though_another_hub_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(3, (0, 1)) as ((first, second, t), _):
        let_go, heard = second._hub._handle_goodbye, threading.Event()

        def late(guest: Any) -> None:
            heard.wait(0.2)  # long enough for a node to join again
            let_go(guest)

        monkeypatch.setattr(second._hub, "_handle_goodbye", late)
        drive(t.close())
        assert notices(first, 1) == notices(second, 1) == [(LEFT, 2, 0)]
        assert list(first.drain()) == []


def test_who_waits_to_send_to_a_hub_that_closes_is_let_go() -> None:
    with nodes(3, share_memory=False) as ((hub, a, b), _):
        drive(a.send(0, Message("full", (torch.ones(LARGE),))))
        waiting = threading.Thread(target=lambda: drive(b.send(0, Message("late", (torch.ones(LARGE),)))))
        waiting.start()
        wait_until(lambda: len(hub._hub._inbox[1]._queue) == 1)
        closing = threading.Thread(target=lambda: drive(hub.close()))
        closing.start()
        waiting.join(PATIENCE / 4)
        assert not waiting.is_alive(), "nobody is going to take what fills the inbox"
        drive(a.send(0, Message("too late", (torch.ones(LARGE),))))
        in_threads(2, lambda i: drive((a, b)[i].close()))
        closing.join(PATIENCE / 4)
        assert not closing.is_alive()
        assert sum(flow._inside for flow in hub._hub._inbox) == 0


# Losing and coming back


POUR = """
x = torch.ones(4 << 20)
for _ in range(4):
    drive(t.send(0, Message("x", (x,))))
drive(t.close())
"""


BUSY_SECONDS = 5.0  # more, where other processes have the cores; gRPC by itself takes a minute
ON_QUIET_CORES = pytest.param(0.0, marks=[pytest.mark.soak, pytest.mark.alone])


@pytest.mark.slow
@pytest.mark.parametrize("more", [BUSY_SECONDS, ON_QUIET_CORES])
@pytest.mark.parametrize(("hub", "busy"), sampled([0, 1], [False, True]))
def test_a_frozen_peer_is_noticed_within_two_timeouts(
    hub: int, busy: bool, more: float, puppet: Puppet, tmp_path: Path
) -> None:
    then = POUR if busy else "time.sleep(0.5); drive(t.close())"
    options = {"failure_timeout": 1.0, "share_memory": False}
    puppet.do(script(1, 2, tmp_path / "store", then, hubs=(hub,), **options))
    t = connect(0, 2, dist.FileStore(str(tmp_path / "store"), 100), (hub,), timeout=60, **options)
    try:
        if busy:
            assert receive(t).tag == "x"
        with puppet.frozen():
            began = time.monotonic()
            while receive(t, seconds=3.0 + more).tag != LOST:
                pass
            assert time.monotonic() - began < 2.0 + more, t.reasons
            assert 1 in t.reasons
    finally:
        drive(t.close())


@pytest.mark.slow
@pytest.mark.parametrize("more", [BUSY_SECONDS, ON_QUIET_CORES])
@pytest.mark.parametrize(("hub", "share"), sampled([0, 1], [*WAYS.values()]))
def test_a_send_to_a_frozen_peer_returns_within_two_timeouts(
    hub: int, share: bool | None, more: float, puppet: Puppet, tmp_path: Path
) -> None:
    then = "time.sleep(0.5); drive(t.close())"
    options = {"failure_timeout": 1.0, "share_memory": share}
    puppet.do(script(1, 2, tmp_path / "store", then, hubs=(hub,), **options))
    t = connect(0, 2, dist.FileStore(str(tmp_path / "store"), 100), (hub,), timeout=60, **options)
    try:
        with puppet.frozen():
            began = time.monotonic()
            drive(t.send(1, Message("x", (torch.ones(4 << 20),))))
            assert time.monotonic() - began < 2.0 + more
            assert notices(t, 1) == [(LOST, 1, 0)]
    finally:
        drive(t.close())


@pytest.mark.slow
@pytest.mark.parametrize("share", WAYS.values(), ids=WAYS)
def test_a_hub_that_was_killed_is_rejoined_when_it_is_started_again(
    share: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    answer = """
while True:
    m = drive(t.recv(60))
    if m.tag == "ask":
        drive(t.send(m.src, Message("answer", (torch.ones(1 << 20),), seq=m.seq)))
"""
    store = dist.FileStore(str(path), 100)

    def ask(t: Transport) -> int:
        drive(t.send(0, Message("ask", seq=7)))
        m = receive(t)
        return int(m.seq * m.body[-1])

    with in_process(script(0, 3, path, answer, share_memory=share)) as child:
        a, b = in_threads(2, lambda i: connect(i + 1, 3, store, timeout=60, share_memory=share))
        assert ask(a) == ask(b) == 7
        began = time.monotonic()
        child.kill()
        assert notices(a, 1) == notices(b, 1) == [(LOST, 0, 0)]
        assert time.monotonic() - began < 1.0
    drive(a.send(0, Message("into the void")))
    with in_process(script(0, 3, path, answer, incarnation=1, share_memory=share)) as child:
        assert child.stdout and child.stdout.readline() == "here\n"
        assert notices(a, 1) == notices(b, 1) == [(JOINED, 0, 1)]
        assert ask(a) == ask(b) == 7
        in_threads(2, lambda i: drive((a, b)[i].close()))


@pytest.mark.slow
def test_a_node_that_was_killed_joins_again_and_all_hear_of_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 100)
    pour = 'while True: drive(t.send(2, Message("before", (torch.ones(100_000),))))'
    with in_process(script(1, 3, path, pour)) as child:
        hub, other = in_threads(2, lambda i: connect(2 * i, 3, store, timeout=60))
        assert receive(other).tag == "before"
        child.kill()
        assert notices(hub, 1) == [(LOST, 1, 0)]
    with in_process(
        script(1, 3, path, 'drive(t.send(2, Message("after")))\n' + WAIT, incarnation=1)
    ) as child:
        assert notices(hub, 1) == [(JOINED, 1, 1)]
        tags = [receive(other).tag]
        while tags[-1] != "after":
            tags.append(receive(other).tag)
        told = tags.index(LOST)
        assert set(tags[:told]) <= {"before"}
        assert tags[told:] == [LOST, JOINED, "after"]
        child.kill()
        assert notices(hub, 1) == notices(other, 1) == [(LOST, 1, 0)]
    in_threads(2, lambda i: drive((hub, other)[i].close()))


def test_strangers_who_make_many_calls_do_not_shut_out_the_others() -> None:
    with nodes(2, security=Security(tokens=("t" * 64,))) as ((hub, t), _):
        hub._server._server._state.maximum_concurrent_rpcs = 1  # the poll of node 1 takes that
        sent = threading.Thread(target=lambda: drive(t.send(0, Message("patience"))))
        sent.start()
        time.sleep(0.1)
        assert list(hub.drain()) == []
        hub._server._server._state.maximum_concurrent_rpcs = 64
        assert receive(hub).tag == "patience"
        sent.join(PATIENCE)


@pytest.mark.slow
def test_a_hub_that_answers_within_the_patience_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(2, failure_timeout=0.2, patience=30.0) as ((hub, t), _):
        answer, late = hub._hub.poll, threading.Event()

        def poll(*request: Any) -> bytes:
            if not late.is_set():
                time.sleep(1.5)  # five times as long as a peer may be silent without patience
                late.set()
            return answer(*request)

        monkeypatch.setattr(hub._hub, "poll", poll)
        late.wait(PATIENCE)
        drive(hub.send(1, Message("word")))
        assert drive(t.recv(PATIENCE)).tag == "word"


@pytest.mark.slow
def test_a_hub_that_does_not_answer_a_poll_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(2, failure_timeout=0.5) as ((hub, t), _):
        monkeypatch.setattr(hub._hub, "poll", lambda *_: time.sleep(1.2))
        began = time.monotonic()
        assert notices(t, 1) == [(LOST, 0, 0)]
        assert time.monotonic() - began < 3
        assert t.reasons[0].startswith("it gave no sign of life for 0.75 s")
        monkeypatch.undo()


def test_a_node_can_close_in_the_midst_of_a_large_message(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    def fetch(*_: Any) -> Iterator[bytes]:
        begun.set()
        yield bytes(1 << 20)
        over.wait(PATIENCE)

    with nodes(2, share_memory=False) as ((hub, t), _):
        monkeypatch.setattr(hub._hub, "fetch", fetch)
        sending = threading.Thread(target=lambda: drive(hub.send(1, Message("x", (torch.ones(LARGE),)))))
        sending.start()
        assert begun.wait(PATIENCE)
        began = time.monotonic()
        drive(t.close())
        sending.join(PATIENCE)
        assert time.monotonic() - began < 2
        assert notices(hub, 1) == [(LEFT, 1, 0)]
        over.set()


def break_line(hub: Any, rank: int) -> None:
    """What a broken connection does, without waiting for one."""
    hub._hub.lose(hub._hub._by_rank[rank], "the cable was pulled")


def test_a_broken_connection_is_told_to_both_ends_and_mended() -> None:
    with nodes(2) as ((hub, t), _):
        break_line(hub, 1)
        assert notices(hub, 2) == [(LOST, 1, 0), (JOINED, 1, 0)]
        assert notices(t, 2) == [(LOST, 0, 0), (JOINED, 0, 0)]
        assert hub.reasons == {1: "the cable was pulled"}
        drive(t.send(0, Message("again")))
        drive(hub.send(1, Message("again")))
        assert receive(hub).tag == receive(t).tag == "again"


def test_what_was_meant_for_a_peer_before_it_came_back_never_reaches_it() -> None:
    with nodes(3) as ((hub, a, b), _):
        break_line(hub, 1)
        wait_until(lambda: hub._arrived.qsize() == 2 and b._arrived.qsize() == 2 and a._arrived.qsize() == 2)
        drive(hub.send(1, Message("for the old one")))
        drive(b.send(1, Message("for the old one")))
        assert notices(b, 2) == notices(hub, 2) == [(LOST, 1, 0), (JOINED, 1, 0)]
        drive(b.send(1, Message("for the new one")))
        assert notices(a, 2) == [(LOST, 0, 0), (JOINED, 0, 0)]
        assert receive(a).tag == "for the new one"


def test_a_hub_drops_what_was_on_its_way_to_an_earlier_stay() -> None:
    with nodes(3) as ((hub, a, b), _):
        line = b._clients[0]._calls
        line.send(1, b._tracker.session_number_of(1) ^ 1, b._checked(1, Message("late"))[0], ())
        drive(b.send(1, Message("in time")))
        assert receive(a).tag == "in time"
        assert list(hub.drain()) == []


def test_those_behind_a_lost_hub_are_lost_with_it_if_they_were_spoken_to() -> None:
    with nodes(4) as ((hub, a, b, _), _):
        drive(a.send(2, Message("hello")))
        assert receive(b).tag == "hello"
        a._clients[0]._calls.cut("the cable was pulled")
        assert notices(a, 4) == [(LOST, 0, 0), (LOST, 2, 0), (JOINED, 0, 0), (JOINED, 2, 0)]
        assert a.reasons == {
            0: "the cable was pulled",
            2: "node 0, which forwards its messages, is lost",
        }
        assert notices(hub, 2) == notices(b, 2) == [(LOST, 1, 0), (JOINED, 1, 0)]
        drive(a.send(2, Message("again")))
        assert receive(b).tag == "again"


@pytest.mark.slow
def test_a_hub_started_again_goes_on_without_those_who_do_not_come() -> None:
    store = dist.HashStore()

    def node(rank: int) -> GrpcTransport:
        return connect(rank, 4, store, timeout=2.0 if rank == 0 else PATIENCE, incarnation=int(rank == 0))

    transports = in_threads(3, node)
    assert [notices(t, 1) for t in transports] == [[(LOST, 3, 0)]] * 3
    late = node(3)
    assert [notices(t, 1) for t in transports] == [[(JOINED, 3, 0)]] * 3
    transports.append(late)
    drive(late.send(1, Message("made it")))
    assert receive(transports[1]).tag == "made it"
    in_threads(4, lambda rank: drive(transports[rank].close()))


def test_a_node_that_comes_again_hears_who_has_gone_meanwhile() -> None:
    with nodes(4) as ((hub, a, b, c), store):
        drive(b.close())
        assert notices(a, 1) == notices(c, 1) == notices(hub, 1) == [(LEFT, 2, 0)]
        again = connect(3, 4, store, incarnation=1)
        assert notices(a, 2) == [(LOST, 3, 0), (JOINED, 3, 1)]
        assert notices(again, 1) == [(LEFT, 2, 0)]
        drive(again.send(1, Message("here I am")))
        assert receive(a).tag == "here I am"
        drive(again.close())


# How much a hub takes in


def test_a_hub_holds_one_large_message_and_the_others_wait() -> None:
    with nodes(4, share_memory=False) as ((hub, *others), _):
        sent: list[int] = []

        def push(t: Any) -> None:
            drive(t.send(0, Message("x", (torch.full((LARGE,), float(t.rank)),))))
            sent.append(t.rank)

        threads = [threading.Thread(target=partial(push, t)) for t in others]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(sent) == 1)
        time.sleep(0.1)
        assert len(sent) == 1, "a hub took in more than it has room for"
        assert 4 * LARGE <= sum(flow._inside for flow in hub._hub._inbox) <= ROOM_BYTES
        drive(others[0].send(0, Message("small"))) if sent == [1] else None
        got = [m.body[-1].item() for m in (receive(hub) for _ in range(3 + (sent == [1]))) if m.parts]
        assert sorted(got) == [1, 2, 3]
        for thread in threads:
            thread.join(PATIENCE)
        assert sum(flow._inside for flow in hub._hub._inbox) == 0


@pytest.mark.slow
def test_who_waits_for_room_longer_than_a_call_lasts_tries_again() -> None:
    with nodes(2, failure_timeout=1.0, share_memory=False) as ((hub, t), _):
        threads = [
            threading.Thread(target=lambda i=i: drive(t.send(0, Message("x", (torch.ones(LARGE),), seq=i))))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.2)
        assert [receive(hub).tag, receive(hub).tag] == ["x", "x"]
        for thread in threads:
            thread.join(PATIENCE)
        assert list(hub.drain()) == [] and t.reasons == {} and hub.reasons == {}


def test_a_gate_lets_in_as_much_as_fits_in_order() -> None:
    flow = FlowControl(10)
    assert flow.enter(25, 0.0), "a single message may always enter"
    assert not flow.enter(1, 0.01)
    flow.leave(25)
    assert flow.enter(6, 0.0) and flow.enter(4, 0.0) and not flow.enter(1, 0.0)
    order: list[int] = []

    def enter(n: int) -> None:
        if flow.enter(n, PATIENCE):
            order.append(n)

    threads = [threading.Thread(target=enter, args=(n,)) for n in (9, 1)]
    for i, thread in enumerate(threads, start=1):
        thread.start()
        wait_until(lambda i=i: len(flow._queue) == i)  # type: ignore[misc]
    flow.leave(4)  # room for the second, but it is not its turn
    time.sleep(0.02)
    assert order == []
    flow.leave(6)
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [9, 1]
    flow.close()
    assert not flow.enter(1, PATIENCE)


def test_where_all_call_each_other_one_that_is_back_does_without_those_before_it() -> None:
    with nodes(3, hubs=(0, 1, 2)) as (transports, store):
        for gone in (0, 1):
            transports[gone]._abandon()
        back = connect(1, 3, store, hubs=(0, 1, 2), incarnation=1)
        try:
            drive(back.send(2, Message("hello")))
            heard = [receive(transports[2]) for _ in range(4)]
            assert {(m.tag, m.src) for m in heard} == {(LOST, 0), (LOST, 1), (JOINED, 1), ("hello", 1)}
            lost = receive(back)
            assert (lost.tag, lost.src) == (LOST, 0)
        finally:
            drive(back.close())
