"""Loans: peers read memory in place, and a reader never takes half an update for a whole one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import drive, in_process, in_threads, sockets_mesh

from shoal.core.transport import LEFT, LOST, Lends, Message, Shows
from shoal.transports.shared_memory import memory, shared_reads
from shoal.transports.sockets import SocketTransport

needs_memory = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")

PATIENCE = 10.0


def lend(a: SocketTransport, b: SocketTransport, x: torch.Tensor) -> Message:
    drive(a.lend(b.rank, Message("state", (x,), version=3)))
    return drive(b.recv(PATIENCE))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("share_memory", [True, False])
def test_what_is_lent_can_be_read_and_is_whole(share_memory: bool) -> None:
    with sockets_mesh(2, share_memory=share_memory) as (a, b):
        assert isinstance(a, Lends)
        x = a.share(torch.arange(12.0).view(3, 4))
        assert x.shape == (3, 4)
        m = lend(a, b, x)
        assert (m.tag, m.src, m.version) == ("state", 0, 3)
        assert torch.equal(m.body, x.view(-1))
        assert m.release is not None
        assert m.release() is True
        assert m.release() is True
        drive(a.reclaim(PATIENCE))


@needs_memory
def test_a_loan_is_the_lender_s_own_memory() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.zeros(5))
        m = lend(a, b, x)
        x += 1  # which it must not do; here it shows that nothing was copied
        assert m.body.tolist() == [1.0] * 5


@needs_memory
def test_a_slice_can_be_lent() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.arange(100.0))
        m = lend(a, b, x[40:45])
        assert m.body.tolist() == [40, 41, 42, 43, 44]


@needs_memory
def test_reclaim_waits_for_the_reader() -> None:
    with sockets_mesh(2) as (a, b):
        m = lend(a, b, a.share(torch.zeros(5)))
        assert m.release is not None
        ended: list[float] = []
        waiting = threading.Thread(
            target=lambda: (drive(a.reclaim(PATIENCE)), ended.append(time.monotonic()))
        )
        waiting.start()
        time.sleep(0.02)
        released = time.monotonic()
        assert not ended
        assert m.release()
        waiting.join()
        assert released <= ended[0] < released + PATIENCE / 2


@needs_memory
def test_who_reads_too_long_learns_that_it_read_in_vain() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.zeros(5))
        m = lend(a, b, x)
        began = time.monotonic()
        drive(a.reclaim(0.02))
        assert 0.02 <= time.monotonic() - began < PATIENCE / 2
        x.fill_(1.0)
        again = lend(a, b, x)
        assert m.release is not None and again.release is not None
        assert m.release() is False
        assert m.release() is False
        assert again.release() is True
        drive(a.reclaim(PATIENCE))


@needs_memory
def test_a_reader_that_looked_just_before_the_memory_was_taken_back_hides_no_other() -> None:
    """It writes its word late; if that were another's too, the lender would wait for that one in vain."""
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.zeros(5))
        first = lend(a, b, x)
        late: Any = first.release

        class Late:
            """The words, as a reader sees them that stops between its look and its own word."""

            def __init__(self, words: memoryview) -> None:
                self._words = words

            def __getitem__(self, i: int) -> int:
                return self._words[i]

            def __setitem__(self, i: int, value: int) -> None:
                drive(a.reclaim(0.0))
                m = lend(a, b, x)
                assert m.release is not None and m.release()
                self._words[i] = value

        late._words = Late(late._words)
        assert late() is True
        began = time.monotonic()
        drive(a.reclaim(PATIENCE))
        assert time.monotonic() - began < PATIENCE / 2


@needs_memory
def test_who_has_taken_back_every_slot_sends_copies() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.arange(3.0))
        held = [lend(a, b, x) for _ in range(shared_reads._MOST_SLOTS)]
        drive(a.reclaim(0.0))
        m = lend(a, b, x)
        x.zero_()
        assert m.body.tolist() == [0, 1, 2]
        assert m.release is not None and m.release()
        assert not any(m.release is None or m.release() for m in held)


@needs_memory
def test_a_message_that_is_dropped_unread_is_no_longer_waited_for() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.zeros(5))
        lend(a, b, x)
        began = time.monotonic()
        drive(a.reclaim(PATIENCE))
        assert time.monotonic() - began < PATIENCE / 2


@needs_memory
def test_a_lost_reader_is_not_waited_for_and_cannot_believe_what_it_read() -> None:
    with sockets_mesh(2) as (a, b):
        m = lend(a, b, a.share(torch.zeros(5)))
        b._connections[0].cut()
        assert drive(a.recv(PATIENCE)).tag == LOST
        began = time.monotonic()
        drive(a.reclaim(PATIENCE))
        assert time.monotonic() - began < PATIENCE / 2
        assert m.release is not None
        assert m.release() is False


@needs_memory
def test_many_readers_at_once() -> None:
    """More than there are slots: the rest gets copies."""
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.arange(3.0))
        count = shared_reads._MOST_SLOTS + 5
        for _ in range(3):
            held = [lend(a, b, x) for _ in range(count)]
            assert all(m.body.tolist() == [0, 1, 2] for m in held)
            assert all(m.release is not None and m.release() for m in held)
            drive(a.reclaim(PATIENCE))


def test_lending_to_oneself_gives_a_copy() -> None:
    with sockets_mesh(1) as (a,):
        x = a.share(torch.ones(2))
        m = lend(a, a, x)
        x.zero_()
        assert m.body.tolist() == [1, 1]
        assert m.release is not None and m.release()


def test_lending_to_a_peer_that_left_is_harmless() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.ones(2))
        drive(b.close())
        assert drive(a.recv(PATIENCE)).tag == LEFT
        drive(a.lend(1, Message("late", (x,))))
        drive(a.reclaim(PATIENCE))


def test_an_empty_vector_can_be_lent() -> None:
    with sockets_mesh(2) as (a, b):
        m = lend(a, b, a.share(torch.empty(0)))
        assert m.body.numel() == 0
        assert m.release is not None and m.release()


@needs_memory
def test_what_cannot_be_lent_is_a_value_error() -> None:
    with sockets_mesh(2, limit_bytes=1 << 16) as (a, _):
        x = a.share(torch.ones(8))
        for parts, complaint in (
            ((torch.ones(3),), "came from share"),
            ((x[::2],), "came from share"),
            ((x, x), "2 parts"),
        ):
            with pytest.raises(ValueError, match=complaint):
                drive(a.lend(1, Message("wrong", parts)))
        with pytest.raises(ValueError, match="limit_bytes is 65,536"):
            a.share(torch.ones(1 << 16))


@needs_memory
def test_shared_memory_is_given_back_when_nobody_holds_it() -> None:
    with sockets_mesh(2) as (a, b):
        files = []
        for _ in range(20):
            x = a.share(torch.ones(1 << 16))
            m = lend(a, b, x)
            assert m.release is not None and m.release()
            drive(a.reclaim(PATIENCE))
            del m
            files.append(open_files())
        assert max(files) == files[2]


@needs_memory
def test_closing_lets_a_reader_finish() -> None:
    with sockets_mesh(2) as (a, b):
        m = lend(a, b, a.share(torch.ones(4)))
        closing = threading.Thread(target=lambda: drive(a.close()))
        closing.start()
        time.sleep(0.02)
        assert m.body.tolist() == [1] * 4
        assert m.release is not None and m.release()
        closing.join()


READER = """
    t = SocketTransport.connect(1, 2, dist.FileStore({path!r}, 2), limit_bytes=1 << 24, timeout=20)
    x = torch.empty(1 << 20)
    outcomes = dict.fromkeys(("whole", "revoked", "believed in vain"), 0)
    while (m := drive(t.recv(20))).tag == "state":
        x.copy_(m.body)
        if m.release():
            outcomes["whole" if x.min() == x.max() == m.version else "believed in vain"] += 1
        else:
            outcomes["revoked"] += 1
        drive(t.send(0, Message("done")))
    print(outcomes["whole"], outcomes["revoked"], outcomes["believed in vain"], flush=True)
    drive(t.close())
"""


@needs_memory
@pytest.mark.slow
@pytest.mark.soak
def test_no_reader_in_another_process_ever_believes_half_an_update(tmp_path: Path) -> None:
    """The lender takes its memory back at the worst moments and writes at once; the copies race with that."""
    path = str(tmp_path / "store")
    preamble = "from shoal.core.transport import Message\n"
    with in_process(preamble + READER.replace("\n    ", "\n").format(path=path)) as child:
        t = SocketTransport.connect(0, 2, dist.FileStore(path, 2), limit_bytes=1 << 24, timeout=20)
        x = t.share(torch.zeros(1 << 20))
        for version in range(1, 601):
            x.fill_(float(version))
            drive(t.lend(1, Message("state", (x,), version=version)))
            drive(t.reclaim(version % 24 * 5e-5))  # a copy takes a fraction of a millisecond
            x.fill_(-1.0)
            assert drive(t.recv(PATIENCE)).tag == "done"
        drive(t.send(1, Message("end")))
        assert child.stdout is not None
        whole, revoked, in_vain = map(int, child.stdout.readline().split())
        drive(t.close())
        child.wait(PATIENCE)
    assert in_vain == 0
    assert whole + revoked == 600
    assert min(whole, revoked) > 10, "the race was not run"


def test_two_lenders_read_each_other() -> None:
    def node(t: SocketTransport) -> float:
        x = t.share(torch.full((1000,), float(t.rank + 1)))
        drive(t.lend(1 - t.rank, Message("state", (x,))))
        m = drive(t.recv(PATIENCE))
        read = float(m.body.sum())
        assert m.release is not None and m.release()
        drive(t.reclaim(PATIENCE))
        return read

    with sockets_mesh(2) as mesh:
        assert in_threads(2, lambda rank: node(mesh[rank])) == [2000, 1000]


# -- memory that is shown ------------------------------------------------------------------------


@needs_memory
def test_what_is_shown_is_read_as_often_as_it_is_revised() -> None:
    with sockets_mesh(2) as (a, b):
        assert isinstance(a, Shows) and a.can_show(1)
        x = a.share(torch.zeros(3))
        drive(a.show(1, Message("seen", (x,))))
        a.revise(x)  # it may do so before the peer has heard of it
        m = drive(b.recv(PATIENCE))
        assert m.release is not None
        for value in (1.0, 2.0):
            x.fill_(value)
            assert m.body.tolist() == [value] * 3
            assert m.release()
            a.revise(x)
        assert m.release()
        a.revise(x)
        a.revise(x)
        assert not m.release()  # the second revision may be in what was read


@needs_memory
def test_shown_memory_outlives_its_owner_s_transport() -> None:
    with sockets_mesh(2) as (a, b):
        x = a.share(torch.ones(3))
        drive(a.show(1, Message("seen", (x,))))
        m = drive(b.recv(PATIENCE))
    assert m.body.tolist() == [1.0] * 3


def test_a_peer_that_shares_no_memory_is_shown_none() -> None:
    with sockets_mesh(2, share_memory=False) as (a, _):
        assert isinstance(a, Shows) and not a.can_show(1)
        with pytest.raises(ValueError, match=r"node 1 cannot map memory of node 0; use send\(\)"):
            drive(a.show(1, Message("seen", (a.share(torch.ones(2)),))))
