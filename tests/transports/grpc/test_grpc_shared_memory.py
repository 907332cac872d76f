"""gRPC on one host: large messages lie in shared memory, by themselves, and nothing is left of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from grpc_nodes import (
    PATIENCE,
    WAIT,
    Caller,
    connect,
    hub_and_caller,
    is_alive,
    nodes,
    notices,
    receive,
    script,
    wait_until,
)
from harness import drive, in_process, in_threads, is_shared, open_files, shared_memories
from torch import Tensor

from shoal.core.transport import HEADER_BYTES, JOINED, LOST, Message
from shoal.transports import frames
from shoal.transports.frames import COPY, LARGE_MESSAGE, SHARED_READ, WINDOW, MemoryLocation
from shoal.transports.grpc.calls import CallFailed
from shoal.transports.grpc.control_pb2 import PollRequest, Receipt
from shoal.transports.grpc.hub_protocol import INLINE, POLL, POST, Envelope
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.large_messages import MOST_BUFFERS, SMALLEST_SHARED, LargeMessages
from shoal.transports.shared_memory.memory import SWITCH, MemoryProbe, SharedMemory

pytestmark = [
    pytest.mark.usefixtures("grpc_core"),
    pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory"),
]

LARGE = SMALLEST_SHARED // 4
BULKY = 3 << 20  # elements: a hub has room for one message of them at a time
ONE = torch.ones(LARGE)


@pytest.fixture
def shown() -> Iterator[dict[str, int]]:
    """What somebody says who shares memory."""
    probe = MemoryProbe(True)
    yield dict(zip(("pid", "fd", "serial"), probe.location, strict=True))
    probe.retire()


@pytest.fixture
def made() -> Iterator[SharedMemory]:
    """Memory in which a message could lie."""
    memory = SharedMemory.create(ONE.nbytes)
    yield memory
    memory.close()


def large_messages(hub: Any, rank: int = 1) -> LargeMessages:
    """The hub's end of what it shares with that node."""
    found: LargeMessages = hub._hub._by_rank[rank].large_messages
    return found


def await_agreement(hub: Any, rank: int = 1) -> None:
    """The node tells in its first call that it can map the hub's memory."""
    wait_until(lambda: large_messages(hub, rank).is_mapped)


def exchange(a: Any, b: Any, *parts: Tensor) -> Message:
    drive(a.send(b.rank, Message("parcel", parts)))
    return receive(b)


def held() -> tuple[int, int]:
    """How many pieces of shared memory this process has open, and has mapped."""
    gc.collect()
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    mapped = Path("/proc/self/maps").read_text().count("memfd:shoal")
    return sum(file.startswith("/memfd:shoal") for file in files), mapped


# Whether memory is shared


def test_large_messages_arrive_as_views_on_shared_memory_and_small_ones_do_not() -> None:
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        for a, b in ((hub, t), (t, hub)):
            sent = (torch.arange(7), torch.empty(0), torch.randn(LARGE), torch.ones(3, dtype=torch.uint8))
            m = exchange(a, b, *sent)
            assert all(torch.equal(x, y) for x, y in zip(m.parts, sent, strict=True))
            assert all(is_shared(part) for part in m.parts if part.numel())
            assert m.src == a.rank and m.nbytes == HEADER_BYTES + sum(part.nbytes for part in sent)
            m.parts[2].zero_()  # it is the receiver's own to change
            assert not is_shared(exchange(a, b, torch.ones(LARGE - 1)).body)


def test_hubs_share_with_each_other_too() -> None:
    with nodes(3, (1, 2)) as ((_, first, second), _):
        await_agreement(first, 2)
        assert is_shared(exchange(first, second, ONE).body)
        assert is_shared(exchange(second, first, ONE).body)


def test_what_a_hub_passes_on_goes_over_the_wire() -> None:
    with nodes(3) as ((_, a, b), _):
        for elements in (LARGE, BULKY):
            got = exchange(a, b, torch.full((elements,), 3.0)).body
            assert not is_shared(got)
            assert got.sum() == 3 * elements


@pytest.mark.parametrize("word", ["0", "1"])
def test_the_switch_decides(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(SWITCH, word)
        files = open_files()
        with nodes(2) as ((hub, t), _):
            if word == "1":
                await_agreement(hub)
            assert is_shared(exchange(hub, t, ONE).body) is (word == "1")
            assert is_shared(exchange(t, hub, ONE).body) is (word == "1")
        wait_until(lambda: open_files() == files)


@pytest.mark.parametrize("sharer", [0, 1])
def test_one_node_without_shared_memory_is_served_over_the_wire(sharer: int) -> None:
    store = dist.HashStore()
    hub, t = in_threads(2, lambda rank: connect(rank, 2, store, share_memory=rank == sharer))
    assert not is_shared(exchange(hub, t, ONE).body)
    assert not is_shared(exchange(t, hub, ONE).body)
    in_threads(2, lambda rank: drive((hub, t)[rank].close()))


def test_where_one_direction_works_the_other_one_goes_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryProbe.sharing_pid

    def only_at_the_hub(probe: MemoryProbe, theirs: Any) -> int:
        return original(probe, theirs) if type(theirs).__name__ == "JoinRequest" else 0

    monkeypatch.setattr(MemoryProbe, "sharing_pid", only_at_the_hub)
    with nodes(2) as ((hub, t), _):
        for _ in range(2):
            assert is_shared(exchange(t, hub, ONE).body)
            assert not is_shared(exchange(hub, t, ONE).body)


def test_a_node_in_another_place_is_served_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose memory cannot be opened, as on another host, says hello all the same."""
    monkeypatch.setattr("shoal.transports.shared_memory.memory.os.getpid", lambda: 2**22 + 1)
    with nodes(2) as ((hub, t), _):
        assert not is_shared(exchange(t, hub, ONE).body)
        assert not is_shared(exchange(hub, t, ONE).body)


def test_a_hub_shows_its_probe_to_those_alone_whose_own_it_can_map(shown: dict[str, int]) -> None:
    with hub_and_caller() as (hub, caller):
        wrong = ({"serial": shown["serial"] + 1}, {"pid": -shown["pid"]}, {"fd": 0})
        for incarnation, odd in enumerate(wrong, start=1):
            assert caller.join(incarnation=incarnation, **{**shown, **odd}).pid == 0
        assert caller.join(incarnation=9, **shown).pid == os.getpid()
        assert large_messages(hub).pid == shown["pid"] and not large_messages(hub).is_mapped


# How much of it


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_while_all_buffers_are_in_use_messages_go_over_the_wire(up: bool) -> None:
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        a, b = (t, hub) if up else (hub, t)
        for i in range(2 * MOST_BUFFERS):
            drive(a.send(b.rank, Message("many", (torch.full((LARGE,), float(i)),))))
        got = [receive(b).body for _ in range(2 * MOST_BUFFERS)]
        assert [is_shared(x) for x in got] == [True] * MOST_BUFFERS + [False] * MOST_BUFFERS
        assert [float(x[-1]) for x in got] == list(range(2 * MOST_BUFFERS))
        got.clear()
        wait_until(lambda: is_shared(exchange(a, b, ONE).body))


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_large_messages_find_the_wire_too(up: bool) -> None:
    """Two of the largest are all that one peer is given buffers for."""
    with nodes(2, limit_bytes=4 * BULKY) as ((hub, t), _):
        await_agreement(hub)
        a, b = (t, hub) if up else (hub, t)
        held = [exchange(a, b, torch.full((BULKY,), float(i))).body for i in range(3)]
        assert [is_shared(x) for x in held] == [True, True, False]
        assert [float(x.sum()) for x in held] == [0.0, BULKY, 2.0 * BULKY]


def test_buffers_are_used_again() -> None:
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        files = 0
        for i in range(50):
            for a, b in ((hub, t), (t, hub)):
                assert exchange(a, b, torch.full((LARGE,), float(i))).body[-1] == i
            files = files or open_files()
        assert open_files() <= files + 2


def test_a_message_that_comes_on_two_lines_at_once_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer is not free before what was delivered is gone."""
    with nodes(2, failure_timeout=0.4, patience=PATIENCE) as ((hub, node), _):
        await_agreement(hub)
        ours, session = node._clients[0]._calls.large_messages, hub._hub._by_rank[1]
        header, parts = ours.wrap(frames.encode(Message("x"), (ONE,), 1), (ONE,))
        assert not parts
        envelope = Envelope(1, 0, 0, header).pack()
        both, flow_for = threading.Barrier(2), hub._hub._flow_for

        def wait_for_the_other(*args: Any) -> Any:
            both.wait(PATIENCE)
            return flow_for(*args)

        monkeypatch.setattr(hub._hub, "_flow_for", wait_for_the_other)
        session.move_to(1)
        in_threads(2, lambda _: hub._hub.receive(session, iter((envelope,))))
        m = receive(hub)
        gc.collect()
        (buffer,) = ours._send_buffers._buffers
        assert not buffer.is_free() and torch.equal(m.body, ONE)
        del m
        wait_until(buffer.is_free)
        node._clients[0]._calls._sent = 1


def test_parcels_take_no_room_at_a_hub() -> None:
    with nodes(4) as ((hub, *others), _):
        senders = [
            threading.Thread(target=partial(exchange_none, t, torch.full((BULKY,), float(t.rank))))
            for t in others
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE)
            assert not sender.is_alive(), "a sender waits for room"
        small, large = hub._hub._inbox
        assert (small._inside, large._inside) == (3 * HEADER_BYTES, 0)
        assert sorted(receive(hub).body[-1].item() for _ in others) == [1, 2, 3]
        assert (small._inside, large._inside) == (0, 0)


def exchange_none(t: Any, x: Tensor) -> None:
    drive(t.send(0, Message("x", (x,))))


def test_room_is_made_for_what_was_taken_and_not_for_what_it_looks_like() -> None:
    """Of a message that came over the wire its size, of a parcel its header, whatever the order."""
    with nodes(2, limit_bytes=4 * BULKY) as ((hub, t), _):
        small, large = hub._hub._inbox
        held = [exchange(t, hub, torch.ones(BULKY)).body for _ in range(2)]
        drive(t.send(0, Message("wire", (torch.ones(BULKY),))))
        assert large._inside == HEADER_BYTES + 4 * BULKY
        drive(t.send(0, Message("small", (torch.ones(3),))))
        held.pop()
        drive(t.send(0, Message("parcel", (torch.ones(BULKY),))))
        assert small._inside == 2 * HEADER_BYTES + 12
        assert [receive(hub).tag, receive(hub).tag] == ["wire", "small"]
        assert (small._inside, large._inside) == (HEADER_BYTES, 0)
        assert receive(hub).tag == "parcel"
        assert (small._inside, large._inside) == (0, 0)
        assert hub._hub._unread == {}


# Coming and going


def break_at_the_hub(hub: Any, t: Any) -> None:
    hub._hub.lose(hub._hub._by_rank[1], "the cable was pulled")


def break_at_the_node(hub: Any, t: Any) -> None:
    t._clients[0]._calls.cut("the cable was pulled")


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_line", [pytest.param(break_at_the_hub, marks=pytest.mark.soak), break_at_the_node]
)
def test_each_stay_begins_afresh_and_leaves_nothing(break_line: Callable[[Any, Any], None]) -> None:
    before = held()
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        quiet = held()
        assert quiet == (before[0] + 2, before[1] + 2), "a probe at each end"
        for _ in range(2):
            kept = [exchange(t, hub, torch.full((LARGE,), 5.0)).body[:3], exchange(hub, t, ONE).body[:3]]
            drive(hub.send(1, Message("never taken", (ONE,))))
            assert all(is_shared(x) for x in kept)
            break_line(hub, t)
            assert notices(hub, 2) == [(LOST, 1, 0), (JOINED, 1, 0)]
            tags = [receive(t).tag for _ in range(2)]
            if tags[0] == "never taken":
                tags = [tags[1], receive(t).tag]
            assert tags == [LOST, JOINED]
            assert [x.tolist() for x in kept] == [[5.0] * 3, [1.0] * 3], "what a peer sent outlives it"
            del kept
            await_agreement(hub)
            wait_until(lambda: held() == quiet)
        assert is_shared(exchange(t, hub, ONE).body)
    del hub, t
    wait_until(lambda: held() == before)


def test_what_a_node_sent_outlives_all() -> None:
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        kept = [exchange(t, hub, ONE).body, exchange(hub, t, ONE).body]
    assert all(is_shared(x) and x.sum() == LARGE for x in kept)


def test_a_node_that_leaves_takes_its_memory_along() -> None:
    with nodes(2) as ((hub, t), _):
        await_agreement(hub)
        exchange(t, hub, ONE)
        drive(hub.send(1, Message("never taken", (ONE,))))
        drive(t.close())
        assert receive(hub).tag == "left"
        assert hub._hub._by_rank[1].large_messages._send_buffers._closed
        assert hub._hub._by_rank[1].large_messages._mappings._mapped == {}
        before = shared_memories()
        drive(hub.send(1, Message("too late", (ONE,))))
        assert shared_memories() == before


POUR = """
for i in range(1, 1000000):
    drive(t.send(0, Message("x", (torch.full((100_000,), float(i)),), seq=i)))
"""


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_midst_leaves_nothing_and_may_come_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 100)
    with in_process(script(1, 2, path, POUR)) as child:
        hub = connect(0, 2, store, timeout=60)
        await_agreement(hub)
        kept = [receive(hub) for _ in range(5)]
        for _ in range(3):
            drive(hub.send(1, Message("never taken", (ONE,))))
        wait_until(lambda: held()[0] == 4)  # the probe, and what was sent; what arrives is open for a moment
        child.send_signal(signal.SIGKILL)
        while (m := receive(hub)).tag != LOST:
            kept.append(m)
        assert all(is_shared(m.body) for m in kept[:5])
        assert all(bool((m.body == m.seq).all()) for m in kept)
        assert [m.seq for m in kept] == [*range(1, len(kept) + 1)]
        del kept, m
        wait_until(lambda: held() == (1, 1))
    with in_process(script(1, 2, path, "drive(t.send(0, drive(t.recv(60))))\n" + WAIT, incarnation=1)):
        assert notices(hub, 1) == [(JOINED, 1, 1)]
        await_agreement(hub)
        drive(hub.send(1, Message("there and back", (torch.full((LARGE,), 7.0),))))
        m = receive(hub)
        assert is_shared(m.body) and m.body.sum() == 7 * LARGE
    drive(hub.close())


@pytest.mark.slow
def test_a_hub_that_is_killed_in_the_midst_leaves_nothing_and_may_come_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    echo = "while True: m = drive(t.recv(60)); m.parts and drive(t.send(1, m))"
    with in_process(script(0, 2, path, echo)) as child:
        t = connect(1, 2, dist.FileStore(str(path), 100), timeout=60)
        drive(t.send(0, Message("x", (ONE,))))
        receive(t)  # the first answer may still go over the wire
        drive(t.send(0, Message("x", (torch.full((LARGE,), 7.0),))))
        kept = receive(t).body
        child.send_signal(signal.SIGKILL)
        assert notices(t, 1) == [(LOST, 0, 0)]
        assert is_shared(kept) and kept.sum() == 7 * LARGE
        del kept
        wait_until(lambda: held() == (1, 1))
    with in_process(script(0, 2, path, echo, incarnation=1)):
        assert notices(t, 1) == [(JOINED, 0, 1)]
        for _ in range(2):
            drive(t.send(0, Message("x", (torch.full((LARGE,), 9.0),))))
            got = receive(t).body
        assert is_shared(got) and got.sum() == 9 * LARGE
        drive(t.close())


# Nonsense from somebody who shares memory


def elsewhere(place: MemoryLocation, *parts: Tensor, src: int = 1) -> bytes:
    """The header of a message whose parts are said to lie there."""
    return frames.encode_location(frames.encode(Message("odd"), parts, src), place)


def is_refused(hub: Any, caller: Caller, said: bytes) -> str:
    """The reason, if that makes the hub lose the caller and costs it neither a file nor room."""
    files = open_files()
    text = caller.is_refused("INVALID_ARGUMENT", POST, said)
    assert notices(hub, 1) == [(LOST, 1, 0)]
    assert hub.reasons[1] == text
    assert open_files() <= files
    assert [flow._inside for flow in hub._hub._inbox] == [0, 0]
    return text


@pytest.mark.parametrize(
    ("kind", "wrong", "parts", "reason"),
    [
        (LARGE_MESSAGE, {"fd": 0}, (ONE,), "refers to memory in its file 0"),
        (LARGE_MESSAGE, {"fd": -1}, (ONE,), "cannot be opened"),
        (LARGE_MESSAGE, {"fd": 1 << 20}, (ONE,), "cannot be opened"),
        (LARGE_MESSAGE, {"serial": 1 << 60}, (ONE,), "has serial number"),
        (LARGE_MESSAGE, {"offset": 64}, (ONE,), "do not fit"),
        (LARGE_MESSAGE, {"offset": 2**64 - 64}, (ONE,), "do not fit"),
        (LARGE_MESSAGE, {"offset": 2}, (torch.ones(1),), "cannot begin at"),
        (LARGE_MESSAGE, {}, (torch.ones(2 * LARGE),), "do not fit"),
        (LARGE_MESSAGE, {}, (torch.empty(1).expand(1 << 40),), "exceeds the limit"),
        (SHARED_READ, {}, (ONE,), "memory location of kind 2, only 1 is allowed here"),
        (COPY, {}, (ONE,), "memory location of kind 3, only 1 is allowed here"),
        (WINDOW, {}, (ONE,), "memory location of kind 4, only 1 is allowed here"),
        (9, {}, (ONE,), "kind of memory location 9"),
    ],
)
def test_memory_that_is_not_as_it_is_said_to_be_is_refused_and_the_hub_lives(
    kind: int,
    wrong: dict[str, int],
    parts: tuple[Tensor, ...],
    reason: str,
    shown: dict[str, int],
    made: SharedMemory,
) -> None:
    place = MemoryLocation(kind, made.fd, made.serial)._replace(**wrong)
    with hub_and_caller(shown) as (hub, caller):
        said = Envelope(1, 0, 0, elsewhere(place, *parts)).pack()
        assert reason in is_refused(hub, caller, said)
        assert is_alive(hub, caller)


@pytest.mark.parametrize(
    ("dst", "cut", "more", "reason"),
    [
        (0, 1, b"", "a memory location has 33 bytes, got 32"),
        (0, 33, b"", "a memory location has 33 bytes, got 0"),
        (0, 0, b"!", "a memory location has 33 bytes, got 34"),
        (7, 0, b"", "does not forward from node 1 to node 7"),
    ],
)
def test_a_parcel_that_is_cut_off_too_long_or_for_others_is_refused(
    dst: int, cut: int, more: bytes, reason: str, shown: dict[str, int], made: SharedMemory
) -> None:
    with hub_and_caller(shown) as (hub, caller):
        said = Envelope(
            1, dst, 0, elsewhere(MemoryLocation(LARGE_MESSAGE, made.fd, made.serial, number=1), ONE)
        ).pack()
        assert reason in is_refused(hub, caller, said[: len(said) - cut] + more)
        assert is_alive(hub, caller)


def test_what_follows_a_parcel_is_refused_and_the_hub_lives(
    shown: dict[str, int], made: SharedMemory
) -> None:
    said = Envelope(
        1, 0, 0, elsewhere(MemoryLocation(LARGE_MESSAGE, made.fd, made.serial, number=1), ONE)
    ).pack()
    with hub_and_caller(shown) as (hub, caller):
        with pytest.raises(grpc.RpcError, match="longer than its header says"):
            caller.push(said, b"!")
        assert notices(hub, 1) == [(LOST, 1, 0)]
        assert [flow._inside for flow in hub._hub._inbox] == [0, 0]
        assert is_alive(hub, caller)


def test_memory_where_none_was_agreed_is_refused_and_the_hub_lives(made: SharedMemory) -> None:
    said = Envelope(
        1, 0, 0, elsewhere(MemoryLocation(LARGE_MESSAGE, made.fd, made.serial, number=1), ONE)
    ).pack()
    with hub_and_caller() as (hub, caller):
        assert is_refused(hub, caller, said) == "it refers to shared memory, but none was agreed on"
        caller.join()
        assert notices(hub, 1) == [(JOINED, 1, 0)]
        ask = PollRequest(maps=True).SerializeToString()
        text = caller.is_refused("INVALID_ARGUMENT", POLL, ask)
        assert text == "node 1 claims to map memory, but none was agreed on"
        assert notices(hub, 1) == [(LOST, 1, 0)]
        assert is_alive(hub, caller)


def test_a_parcel_for_another_node_is_refused_and_the_hub_lives(made: SharedMemory) -> None:
    with nodes(3) as ((hub, a, b), _):
        header = elsewhere(MemoryLocation(LARGE_MESSAGE, made.fd, made.serial, number=1), ONE)
        with pytest.raises(CallFailed):
            a._clients[0]._calls.send(2, a._tracker.session_number_of(2), header, ())
        assert notices(hub, 2) == notices(b, 2) == [(LOST, 1, 0), (JOINED, 1, 0)]
        assert hub.reasons[1] == "node 0 does not forward from node 1 to node 2"


@pytest.mark.slow
def test_one_place_sent_again_and_again_fills_no_more_than_a_hub_s_room(
    shown: dict[str, int], made: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parcel counts as its header, so that somebody who never waits for a free buffer waits here."""
    monkeypatch.setattr("shoal.transports.grpc.hub.ROOM_BYTES", 10 * HEADER_BYTES)
    header = elsewhere(MemoryLocation(LARGE_MESSAGE, made.fd, made.serial, number=1), ONE)
    with hub_and_caller({**shown, "failure_timeout": 0.5}, failure_timeout=0.5) as (hub, caller):
        answers = [caller.call(POST, Envelope(i, 0, 0, header).pack()) for i in range(1, 12)]
        assert [Receipt.FromString(answer).busy for answer in answers] == [False] * 10 + [True]
        assert len([*hub.drain()]) == 10
        assert not Receipt.FromString(caller.call(POST, Envelope(11, 0, 0, header).pack())).busy


@pytest.mark.parametrize(
    ("kind", "src", "agreed", "reason"),
    [
        (LARGE_MESSAGE, 0, False, "refers to shared memory, but none was agreed on"),
        (SHARED_READ, 0, True, "only 1 is allowed here"),
        (LARGE_MESSAGE, 2, True, "forwarded a message of node 2"),
    ],
)
def test_a_node_refuses_such_a_hub(
    kind: int, src: int, agreed: bool, reason: str, made: SharedMemory
) -> None:
    with nodes(3, share_memory=agreed) as ((hub, t, _), _):
        if agreed:
            await_agreement(hub)
        body = elsewhere(MemoryLocation(kind, made.fd, made.serial, number=1), ONE, src=src)
        hub._hub._by_rank[1].queue.put(INLINE, body)
        assert notices(t, 2) == [(LOST, 0, 0), (JOINED, 0, 0)]
        assert reason in t.reasons[0]
        drive(t.send(0, Message("fine")))
        assert [m for m in (receive(hub).tag for _ in range(3)) if m not in (LOST, JOINED)] == ["fine"]
