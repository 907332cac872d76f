"""Gloo: the conformance suite, and what missing, killed, frozen and mistaken workers do."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, gloo_world, in_interpreter, in_process, in_threads

from shoal.core.errors import PeerLost, Unavailable
from shoal.core.transport import LOST, AllReduces, Message, Overlaps
from shoal.testing.conformance import CHECKS, World
from shoal.transports import all_reduce as base
from shoal.transports.gloo import GlooTransport, all_reduce, transport

PATIENCE = 10.0
STARTING = 60.0  # for a process that may have to share its core


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[World], None]) -> None:
    check(gloo_world)


def connect(rank: int, size: int, store: Any, workers: int | None = None, **options: Any) -> GlooTransport:
    return GlooTransport.connect(
        rank, size, store, workers=workers or size, limit_bytes=LIMIT, **{"timeout": PATIENCE, **options}
    )


def failure(t: GlooTransport, v: torch.Tensor, timeout: float) -> Exception:
    with pytest.raises((PeerLost, ValueError)) as info:
        drive(t.all_reduce(v, timeout))
    return info.value


# Joining


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("shoal/here/2", "")
    with pytest.raises(PeerLost, match=r"node 1, 3 did not come to the meeting point within 0.05 s"):
        connect(0, 4, store, timeout=0.05)


def test_an_unknown_interface_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="network interface 'nonesuch0'"):
        connect(0, 1, dist.HashStore(), interface="nonesuch0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch1")
    with pytest.raises(Unavailable, match="network interface 'nonesuch1'"):
        connect(0, 1, dist.HashStore())
    drive(connect(0, 1, dist.HashStore(), interface="lo").close())


def test_the_default_group_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        assert gloo_world(2, _sum_of_ones) == [2.0, 2.0]
        assert dist.group.WORLD is default
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


async def _sum_of_ones(t: GlooTransport) -> float:
    v = torch.ones(1)
    await t.all_reduce(v)
    return v.item()


# Messages


@pytest.mark.slow
def test_silence_longer_than_the_timeout_breaks_nothing() -> None:
    store = dist.HashStore()

    def node(rank: int) -> Any:
        t = connect(rank, 2, store, timeout=0.2)
        if rank == 0:
            drive(t.sleep(0.5))
            drive(t.send(1, Message("at last")))
        tag = drive(t.recv(PATIENCE)).tag if rank == 1 else None
        drive(t.close())
        return tag

    assert in_threads(2, node)[1] == "at last"


@pytest.mark.slow
def test_a_frozen_peer_delays_closing_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSING_SECONDS", 0.2)
    path = str(tmp_path / "store")
    script = f"""
        t = GlooTransport.connect(1, 2, dist.FileStore({path!r}, 2), workers=2, limit_bytes=100)
        time.sleep(60)
    """
    with in_process(script) as child:
        t = connect(0, 2, dist.FileStore(path, 2), timeout=STARTING)
        child.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        drive(t.close())
        assert time.monotonic() - began < PATIENCE


@pytest.mark.slow
def test_a_frozen_peer_cuts_off_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSING_SECONDS", 0.2)
    path = str(tmp_path / "store")
    script = f"""
        t = GlooTransport.connect(1, 3, dist.FileStore({path!r}, 3), workers=3, limit_bytes=1 << 30)
        time.sleep(60)
    """
    with in_process(script) as child:
        nodes = here, there = in_threads(
            2, lambda i: connect(2 * i, 3, dist.FileStore(path, 3), timeout=STARTING)
        )
        here.timeout = 0.5
        child.send_signal(signal.SIGSTOP)
        drive(here.send(1, Message("large", (torch.zeros(16 << 20),))))
        drive(here.send(2, Message("all well")))
        drive(there.send(0, Message("here too")))
        heard = [(m.tag, m.src) for m in (drive(here.recv(PATIENCE)) for _ in range(2))]
        assert sorted(heard) == [("here too", 2), (LOST, 1)]
        assert drive(there.recv(PATIENCE)).tag == "all well"
        assert here.reasons[1].startswith("node 1 does not take what it is sent: ")
        assert list(here.reasons) == [1]
        assert list(here.drain()) == list(there.drain()) == []
        in_threads(2, lambda i: drive(nodes[i].close()))


# Sums


def test_only_workers_take_part_in_a_sum() -> None:
    store = dist.HashStore()

    def node(rank: int) -> Any:
        t = connect(rank, 3, store, workers=2)
        assert isinstance(t, AllReduces)
        v = torch.full((10,), 1.0 + rank)
        if rank == 2:
            with pytest.raises(ValueError, match="node 2 is not a worker"):
                drive(t.all_reduce(v))
            sent = 0
        else:
            sent = drive(t.all_reduce(v))
        drive(t.close())
        return v[0].item(), sent

    assert in_threads(3, node) == [(3.0, 40), (3.0, 40), (3.0, 0)]  # 2 * (2 - 1) / 2 * 40 bytes


def test_a_sum_fills_tensors_gloo_could_not_take_itself() -> None:
    async def body(t: GlooTransport) -> list[float]:
        matrix = torch.ones(4, 2, requires_grad=True)
        await t.all_reduce(matrix.detach()[:, 0])  # a column: not contiguous
        return matrix.flatten().tolist()

    assert gloo_world(2, body) == [[2.0, 1.0] * 4] * 2


@pytest.mark.slow
def test_a_worker_that_does_not_join_a_sum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "GRACE_SECONDS", 0.3)
    store = dist.HashStore()

    def node(rank: int) -> list[str]:
        t = connect(rank, 3, store)
        v = torch.ones(1000)
        drive(t.all_reduce(v))
        if rank == 1:
            drive(t.sleep(1.0))
        first = str(failure(t, v, 0.2))
        began = t.now()
        again = str(failure(t, v, 0.2))
        assert t.now() - began < 0.2
        drive(t.close())
        return [first, again]

    here, late, there = in_threads(3, node)
    assert here[0] == "all_reduce 2 of 1000 x float32 failed (I am worker 0): worker 1 did not come in time"
    assert "(I am worker 2): worker 1 did not come in time" in there[0]
    assert "all workers are alive, but one came late" in late[0]
    assert here[0] == here[1]


@pytest.mark.slow
def test_a_killed_worker_is_named_and_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    script = f"""
        rank = {{rank}}
        t = GlooTransport.connect(rank, 3, dist.FileStore({path!r}, 3), workers=3, limit_bytes=100)
        drive(t.all_reduce(torch.ones(5)))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            drive(t.all_reduce(torch.ones(5), 20.0))
        except PeerLost as lost:
            print(lost)
        drive(t.close())
    """
    with in_process(script.format(rank=1)) as survivor, in_process(script.format(rank=2)):
        t = connect(0, 3, dist.FileStore(path, 3), timeout=STARTING)
        drive(t.all_reduce(torch.ones(5)))
        assert "all_reduce 2 of 5 x float32 failed (I am worker 0): worker 2 is gone" in str(
            failure(t, torch.ones(5), 20.0)
        )
        notice = drive(t.recv(PATIENCE))
        assert (notice.tag, notice.src) == (LOST, 2)
        drive(t.send(2, Message("harmless")))
        drive(t.close())
        assert "(I am worker 1): worker 2 is gone" in survivor.communicate(timeout=PATIENCE)[0]


def test_different_lengths_are_named_and_harmless() -> None:
    store = dist.HashStore()

    def node(rank: int) -> tuple[str, float]:
        t = connect(rank, 2, store)
        mismatch = str(failure(t, torch.ones(1000 + 500 * rank), PATIENCE))
        total = drive(_sum_of_ones(t))
        drive(t.close())
        return mismatch, total

    expected = (
        "all_reduce 1 needs the same dtype and length from all: "
        "worker 0 has 1000 x float32, worker 1 has 1500 x float32"
    )
    assert in_threads(2, node) == [(expected, 2.0)] * 2


@pytest.mark.slow
def test_a_worker_that_departs_from_the_schedule_alone_is_named() -> None:
    """Worker 0 sums what it always summed, so only worker 1 asks; neither may reach gloo's own check."""
    store = dist.HashStore()

    def node(rank: int) -> str:
        t = connect(rank, 2, store)
        for _ in range(3):
            drive(t.all_reduce(torch.ones(4)))
        wrong = failure(t, torch.ones(4, dtype=torch.float64 if rank else torch.float32), 0.3)
        assert isinstance(wrong, ValueError)
        drive(t.close())
        return str(wrong)

    for said in in_threads(2, node):
        assert said.endswith("worker 0 has 4 x float32, worker 1 has 4 x float64")


def test_a_schedule_that_repeats_does_not_ask_the_store_again() -> None:
    store = dist.HashStore()

    def node(rank: int) -> list[int]:
        t = connect(rank, 2, store)
        keys = []
        for _ in range(5):
            for elements in (10, 20, 30):
                drive(t.all_reduce(torch.ones(elements)))
            keys.append(store.num_keys())
        drive(t.close())
        return keys

    for keys in in_threads(2, node):
        assert keys[1] == keys[4], f"the store grew: {keys}"


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_what_cannot_be_summed_is_a_value_error(dtype: torch.dtype) -> None:
    t = connect(0, 1, dist.HashStore())
    with pytest.raises(ValueError, match="cannot sum"):
        drive(t.all_reduce(torch.ones(1, dtype=dtype)))
    assert drive(t.all_reduce(torch.ones(1))) == 0
    drive(t.close())


# Sums that begin early


HALVES = [slice(500), slice(500, 1000)]


def test_a_part_is_summed_before_the_rest_is_computed() -> None:
    async def body(t: GlooTransport) -> None:
        v = torch.ones(1000)
        reduction = t.begin_all_reduce(v, HALVES)
        assert isinstance(t, Overlaps)
        reduction.start(0)
        deadline = t.now() + PATIENCE
        while v[:500].sum() != 1000 and t.now() < deadline:
            await t.sleep(0.001)
        assert v.tolist() == [2.0] * 500 + [1.0] * 500
        await reduction.finish()
        assert v.tolist() == [2.0] * 1000

    gloo_world(2, body)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([slice(0, 4)], "end at element 4 of 10"),
        ([slice(0, 4), slice(5, 10)], r"a part that ends at 4 is followed by \[5:10:1\]"),
        ([slice(0, 4), slice(3, 10)], r"a part that ends at 4 is followed by \[3:10:1\]"),
        ([slice(0, 10, 2)], r"a part that ends at 0 is followed by \[0:10:2\]"),
    ],
)
def test_parts_must_cover_the_vector(parts: list[slice], complaint: str) -> None:
    t = connect(0, 1, dist.HashStore())
    with pytest.raises(ValueError, match=complaint):
        t.begin_all_reduce(torch.ones(10), parts)
    with pytest.raises(ValueError, match="only a flat vector has parts"):
        t.begin_all_reduce(torch.ones(5, 2), [slice(0, 5)])
    drive(t.close())


def test_parts_start_in_order_and_sums_one_at_a_time() -> None:
    t = connect(0, 1, dist.HashStore())
    reduction = t.begin_all_reduce(torch.ones(1000), HALVES)
    with pytest.raises(ValueError, match="each once: not part 1 of 2, 0 is next"):
        reduction.start(1)
    with pytest.raises(ValueError, match=r"has begun and is not finished: await its finish\(\)"):
        t.begin_all_reduce(torch.ones(1), [slice(1)])
    assert drive(reduction.finish()) == 0
    with pytest.raises(ValueError, match="not part 2 of 2, all have started"):
        reduction.start(2)
    with pytest.raises(ValueError, match="was finished before"):
        drive(reduction.finish())
    drive(t.close())


def test_parts_gloo_could_not_take_itself_are_copied_out_and_back() -> None:
    async def body(t: GlooTransport) -> list[float]:
        matrix = torch.ones(1000, 2)
        reduction = t.begin_all_reduce(matrix[:, 0], HALVES)
        reduction.start(0)
        await reduction.finish()
        return matrix.unique(dim=0).tolist()

    assert gloo_world(2, body) == [[[2.0, 1.0]]] * 2


@pytest.fixture(scope="module")
def gpu() -> None:
    """Started before a test is asked what it leaves open."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.ones(1, device="cuda").fill_(2.0).unique().tolist()


@pytest.mark.usefixtures("gpu")
def test_parts_in_the_memory_of_a_gpu_are_copied_out_and_back() -> None:
    async def body(t: GlooTransport) -> list[float]:
        v = torch.zeros(1000, device="cuda")
        reduction = t.begin_all_reduce(v, HALVES)
        v[:500] = t.rank + 1
        reduction.start(0)
        v[500:] = t.rank + 2
        await reduction.finish()
        return v.unique().tolist()

    assert gloo_world(2, body) == [[3.0, 5.0]] * 2


def test_who_is_late_in_a_sum_that_began_early_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(base, "GRACE_SECONDS", 0.1)
    store = dist.HashStore()

    def node(rank: int) -> str:
        t = connect(rank, 2, store)
        reduction = t.begin_all_reduce(torch.ones(1000), HALVES, timeout=0.3)
        if rank == 1:
            drive(t.recv(PATIENCE))  # until the other has given up
        began = t.now()
        with pytest.raises(PeerLost) as info:
            drive(reduction.finish())
        assert t.now() - began < 1.0
        drive(t.send(1 - rank, Message("gave up")))
        drive(t.close())
        return str(info.value)

    assert re.fullmatch(
        r"all_reduce 1 of 1000 x float32 in 2 parts \([0-9a-f]{8}\) failed \(I am worker 0\): "
        "worker 1 did not come in time",
        in_threads(2, node)[0],
    )


@pytest.mark.slow
def test_computing_longer_than_the_timeout_is_no_failure() -> None:
    async def body(t: GlooTransport) -> None:
        for seconds in (0.0, 1.1):  # the first time they compare what they bring
            v = torch.ones(1000)
            reduction = t.begin_all_reduce(v, HALVES, timeout=1.0 if seconds else PATIENCE)
            await t.sleep(seconds)
            reduction.start(0)
            await reduction.finish()
            assert v.tolist() == [2.0] * 1000

    gloo_world(2, body)


@pytest.mark.slow
def test_a_worker_killed_between_two_parts_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    script = f"""
        t = GlooTransport.connect(2, 3, dist.FileStore({path!r}, 3), workers=3, limit_bytes=100)
        reduction = t.begin_all_reduce(torch.ones(1000), [slice(500), slice(500, 1000)])
        reduction.start(0)
        for _ in range(2):
            drive(t.recv())
        os.kill(os.getpid(), signal.SIGKILL)
    """

    def node(rank: int) -> str:
        t = connect(rank, 3, dist.FileStore(path, 3), timeout=STARTING)
        reduction = t.begin_all_reduce(torch.ones(1000), HALVES)
        reduction.start(0)
        drive(t.send(2, Message("connected")))  # else it could die while this node still connects to it
        with pytest.raises(PeerLost) as info:
            drive(reduction.finish())
        drive(t.close())
        return str(info.value)

    with in_process(script):
        for rank, said in enumerate(in_threads(2, node)):
            assert said.endswith(f"failed (I am worker {rank}): worker 2 is gone")


@pytest.mark.parametrize("started", [0, 1, 2])
def test_closing_gives_up_a_sum_that_was_never_finished(started: int) -> None:
    """Also if the others never come to it; nothing is written to the vector afterwards."""
    store = dist.HashStore()

    def node(rank: int) -> None:
        t = connect(rank, 2, store)
        v = torch.ones(1000)
        reduction = t.begin_all_reduce(v, HALVES)
        for part in range(started * (1 - rank)):
            reduction.start(part)
        began = t.now()
        drive(t.close())
        assert t.now() - began < 2.0
        with pytest.raises(ValueError, match="closed"):
            drive(reduction.finish())

    in_threads(2, node)


@pytest.mark.slow
@pytest.mark.soak
def test_a_process_that_never_closes_still_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    script = f"""
        t = GlooTransport.connect({{rank}}, 2, dist.FileStore({path!r}, 2), workers=2, limit_bytes=100)
        reduction = t.begin_all_reduce(torch.ones(1000), [slice(500), slice(500, 1000)])
        reduction.start(0)
        if {{rank}}:
            reduction.start(1)
        raise SystemExit(3)
    """
    with in_interpreter(script.format(rank=0)) as a, in_process(script.format(rank=1)) as b:
        assert (a.wait(STARTING), b.wait(STARTING)) == (3, 3)


# Signs of life


@pytest.mark.soak
def test_who_says_nothing_for_long_but_is_there_stays() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda rank: connect(rank, 2, store, patience=4.0), (0, 1))
    try:
        with pytest.raises(TimeoutError):
            drive(first.recv(6.0))
        assert not first.reasons and not second.reasons
    finally:
        close_all(first, second)


def test_who_gives_no_sign_of_life_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is there, but mute: worker 0 gives it up, in an all-reduce and as a sender of messages."""
    store = dist.HashStore()
    send_sign = GlooTransport._send_sign

    def mute(t: GlooTransport, peer: int) -> None:
        if t.rank == 0:
            send_sign(t, peer)

    monkeypatch.setattr(GlooTransport, "_send_sign", mute)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda rank: connect(rank, 2, store, patience=1.0, timeout=60.0), (0, 1))
    try:
        assert "worker 1 is gone" in str(failure(first, torch.ones(3), 60.0))
        assert drive(first.recv(STARTING)).tag == LOST
        assert "no sign of life for 1 s" in first.reasons[1]
    finally:
        close_all(first, second)


class SlowLink:
    """A pair of nodes between which bytes travel slowly."""

    def __init__(self, pair: Any, bytes_per_second: float) -> None:
        self._pair, self._speed = pair, bytes_per_second

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        time.sleep(sum(tensor.nbytes for tensor in tensors) / self._speed)
        return self._pair.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


@pytest.mark.slow
def test_a_large_message_on_a_slow_link_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twice as long as a silence may last; a piece of it takes a quarter of that."""
    monkeypatch.setattr(transport, "PIECE_BYTES", 1024)
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda rank: connect(rank, 2, store, patience=2.0), (0, 1))
    try:
        second._pairs[0] = SlowLink(second._pairs[0], bytes_per_second=2048.0)
        sent = torch.arange(2048.0)
        drive(second.send(0, Message("large", (sent,))))
        m = drive(first.recv(STARTING))
        assert m.tag == "large" and torch.equal(m.body, sent)
        assert not first.reasons
    finally:
        second._pairs[0] = second._pairs[0]._pair
        close_all(first, second)


def close_all(*transports: GlooTransport) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda t: drive(t.close()), transports))
