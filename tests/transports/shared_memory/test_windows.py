"""Windows: many add to one vector at once, and no addition is ever lost."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import drive, in_process, in_threads, sockets_mesh

from shoal.core.errors import PeerLost, Unavailable
from shoal.core.transport import LEFT, LOST, Message, Windows
from shoal.transports.shared_memory import memory, windows
from shoal.transports.shared_memory.windows import STRIPE_BYTES
from shoal.transports.sockets import SocketTransport

needs_memory = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")

PATIENCE = 10.0
STRIPE = STRIPE_BYTES // 4


def open_windows(mesh: list[SocketTransport], owner: int, x: torch.Tensor) -> list[torch.Tensor]:
    return in_threads(len(mesh), lambda rank: drive(mesh[rank].open_window(owner, x)))


@needs_memory
def test_all_read_and_add_to_the_owner_s_vector() -> None:
    with sockets_mesh(3) as mesh:
        assert isinstance(mesh[0], Windows)
        x = torch.arange(6.0).view(2, 3)
        exposed = open_windows(mesh, 1, x)
        assert exposed[0] is x and exposed[2] is x
        assert exposed[1] is not x and torch.equal(exposed[1], x)
        assert drive(mesh[0].accumulate(1, torch.ones(2, 3))) == 0
        assert drive(mesh[1].accumulate(1, torch.ones(6))) == 1
        out = torch.empty(6)
        assert drive(mesh[2].fetch(1, out)) == 2
        assert out.tolist() == [2, 3, 4, 5, 6, 7]
        assert exposed[1].tolist() == [[2, 3, 4], [5, 6, 7]]
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


@needs_memory
def test_every_node_may_own_a_window() -> None:
    with sockets_mesh(2) as mesh:
        for owner in (0, 1):
            open_windows(mesh, owner, torch.full((3,), float(owner)))
        drive(mesh[0].accumulate(1, torch.ones(3)))
        out = torch.empty(3)
        assert [(drive(mesh[1].fetch(owner, out)), out.tolist()) for owner in (0, 1)] == [
            (0, [0, 0, 0]),
            (1, [2, 2, 2]),
        ]


@needs_memory
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_other_dtypes(dtype: torch.dtype) -> None:
    with sockets_mesh(2) as mesh:
        open_windows(mesh, 0, torch.ones(5, dtype=dtype))
        drive(mesh[1].accumulate(0, torch.arange(5).to(dtype)))
        out = torch.empty(5, dtype=dtype)
        drive(mesh[1].fetch(0, out))
        assert out.tolist() == [1, 2, 3, 4, 5]


@needs_memory
def test_threads_lose_no_addition() -> None:
    """Nodes in one process exclude each other too: their locks belong to open files, not to the process."""
    times, elements = 40, 2 * STRIPE + 5

    def node(t: SocketTransport) -> None:
        for _ in range(times):
            drive(t.accumulate(0, torch.full((elements,), float(t.rank + 1))))

    with sockets_mesh(3) as mesh:
        exposed = open_windows(mesh, 0, torch.zeros(elements))[0]
        in_threads(3, lambda rank: node(mesh[rank]))
        assert bool((exposed == times * (1 + 2 + 3)).all())
        assert drive(mesh[0].fetch(0, torch.empty(elements))) == 3 * times


@needs_memory
def test_stripes_without_a_change_are_left_alone() -> None:
    with sockets_mesh(2) as mesh:
        open_windows(mesh, 0, torch.zeros(4 * STRIPE))
        window = mesh[1]._windows.find(0)
        touched: list[int] = []
        lock = window._lock
        window._lock = lambda stripe: touched.append(stripe) or lock(stripe)  # type: ignore[method-assign]
        v = torch.zeros(4 * STRIPE)
        v[3 * STRIPE - 1] = 1e-30
        v[-1] = float("nan")
        drive(mesh[1].accumulate(0, v))
        assert sorted(touched) == [-1, 2, 3]  # and the count


@contextlib.contextmanager
def held(t: SocketTransport, owner: int, stripe: int) -> Iterator[None]:
    """A stripe in the hands of somebody else."""
    window = t._windows.find(owner)
    assert window._lock(stripe)
    try:
        yield
    finally:
        window._unlock(stripe)


@needs_memory
def test_who_holds_a_part_holds_up_nobody_elsewhere_and_is_complained_of() -> None:
    with sockets_mesh(2, timeout=0.1) as mesh:
        exposed = open_windows(mesh, 0, torch.zeros(3 * STRIPE))[0]
        complaint = r"another node has locked a stripe of the window of node 0 for 0.1 s"
        with held(mesh[0], 0, 1), pytest.raises(PeerLost, match=complaint):
            drive(mesh[1].accumulate(0, torch.ones(3 * STRIPE)))
        assert exposed[::STRIPE].tolist() == [1, 0, 1]
        assert drive(mesh[1].accumulate(0, torch.ones(3 * STRIPE))) == 0, (
            "what was not finished is not counted"
        )


@needs_memory
def test_an_addition_goes_on_when_the_part_is_let_go() -> None:
    with sockets_mesh(2) as mesh:
        exposed = open_windows(mesh, 0, torch.zeros(STRIPE))[0]
        with held(mesh[0], 0, 0):
            adding = threading.Thread(target=lambda: drive(mesh[1].accumulate(0, torch.ones(STRIPE))))
            adding.start()
            adding.join(0.02)
            assert adding.is_alive()
        adding.join(PATIENCE)
        assert float(exposed.sum()) == STRIPE


@needs_memory
@pytest.mark.parametrize("how", [LEFT, LOST])
def test_a_window_goes_with_its_owner(how: str) -> None:
    with sockets_mesh(2) as mesh:
        open_windows(mesh, 1, torch.zeros(4))
        if how == LEFT:
            drive(mesh[1].close())
        else:
            mesh[1]._connections[0].cut()
        assert drive(mesh[0].recv(PATIENCE)).tag == how
        for verb in (mesh[0].fetch, mesh[0].accumulate):
            with pytest.raises(PeerLost, match="knows no window of node"):
                drive(verb(1, torch.ones(4)))
        with pytest.raises(PeerLost, match="was lost before it opened"):
            drive(mesh[0].open_window(1, torch.zeros(4)))


@needs_memory
def test_an_owner_that_goes_in_the_midst_of_an_addition_is_named() -> None:
    with sockets_mesh(2) as mesh:
        open_windows(mesh, 1, torch.zeros(STRIPE))
        raised: list[Any] = []

        def add() -> None:
            with pytest.raises(PeerLost) as lost:
                drive(mesh[0].accumulate(1, torch.ones(STRIPE)))
            raised.append(str(lost.value))

        with held(mesh[1], 1, 0):
            adding = threading.Thread(target=add)
            adding.start()
            adding.join(0.02)
            mesh[1]._connections[0].cut()
            adding.join(PATIENCE)
        assert raised == ["node 1 was lost while node 0 added to its window"]


@needs_memory
def test_an_owner_that_opens_none_is_named() -> None:
    with (
        sockets_mesh(2, timeout=0.05) as mesh,
        pytest.raises(PeerLost, match=r"node 1 did not open its window within 0.05 s"),
    ):
        drive(mesh[0].open_window(1, torch.zeros(4)))


@needs_memory
def test_what_does_not_fit_is_a_value_error() -> None:
    with sockets_mesh(2, limit_bytes=1 << 16) as mesh:
        drive(mesh[0].open_window(0, torch.zeros(4)))
        for x in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"holds 4 x torch.float32, node 1 brings"):
                drive(mesh[1].open_window(0, x))
            for verb in (mesh[1].fetch, mesh[1].accumulate):
                with pytest.raises(ValueError, match="holds 4"):
                    drive(verb(0, x))
        for x, complaint in (
            (torch.zeros(4), "already has a window"),
            (torch.zeros(1 << 16), "limit_bytes is 65,536"),
        ):
            with pytest.raises(ValueError, match=complaint):
                drive(mesh[0].open_window(0, x))
        with pytest.raises(ValueError, match="at least one element"):
            drive(mesh[1].open_window(1, torch.zeros(0)))


def test_without_shared_memory_there_are_no_windows() -> None:
    with sockets_mesh(2, share_memory=False) as mesh:
        for rank in (0, 1):
            with pytest.raises(Unavailable, match="windows need shared memory"):
                drive(mesh[rank].open_window(0, torch.zeros(4)))


HAMMER = """
    store = dist.FileStore({path!r}, {size})
    t = SocketTransport.connect({rank}, {size}, store, limit_bytes=1 << 24, timeout=60)
    x = torch.zeros({elements})
    drive(t.open_window(0, x))
    v = torch.zeros({elements})
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range({times}):
        v.zero_()
        v[7 if {rank} == 3 else i % 7 :: 8] = float({rank})  # whole numbers add up without rounding
        drive(t.accumulate(0, v))
    print("done", flush=True)
    sys.stdin.readline()
    drive(t.close())
"""


@needs_memory
@pytest.mark.slow
def test_processes_lose_no_addition_even_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size, elements, times = str(tmp_path / "store"), 4, 3 * STRIPE + 11, 140
    scripts = [
        HAMMER.format(rank=rank, size=size, path=path, elements=elements, times=10**9 if rank == 3 else times)
        for rank in (1, 2, 3)
    ]
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(in_process(script)) for script in scripts]
        t = SocketTransport.connect(0, size, dist.FileStore(path, size), limit_bytes=1 << 24, timeout=60)
        exposed = drive(t.open_window(0, torch.zeros(elements)))
        for child in children:
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("go\n")
            child.stdin.flush()
        for _ in range(times):
            drive(t.accumulate(0, torch.ones(elements)))
        children[2].kill()  # in the midst of an addition, as good as always
        for child in children[:2]:
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == "done\n"
        for residue in range(7):
            theirs = sum((1 + 2) * (i % 7 == residue) for i in range(times))
            assert bool((exposed[residue::8] == times + theirs).all())
        rest = exposed[7::8] - times  # of the killed one: as often as it came to each stripe
        assert bool((rest > 0).all() and (rest % 3 == 0).all())
        began = drive(t.fetch(0, torch.empty(elements)))
        assert drive(t.accumulate(0, torch.ones(elements))) == began >= 3 * times
        assert {drive(t.recv(PATIENCE)).tag} == {LOST}
        for child in children[:2]:
            assert child.stdin is not None
            child.stdin.write("end\n")
            child.stdin.flush()
        drive(t.close())


@needs_memory
def test_a_lock_is_lifted_when_its_holder_is_gone() -> None:
    made = memory.SharedMemory.create(100)
    try:
        other = memory.SharedMemory.attach(os.getpid(), made.fd, made.serial, 1 << 20)
        shape = (torch.uint8, 100)
        mine, theirs = (
            windows.SharedWindow(m, shape, owner=0, rank=rank, timeout=1)
            for rank, m in enumerate((made, other))
        )
        assert theirs._lock(0)
        assert not mine._lock(0)
        other.close()
        assert mine._lock(0)
    finally:
        made.close()


@needs_memory
def test_a_message_is_not_mistaken_for_a_window() -> None:
    with sockets_mesh(2) as (a, b):
        drive(a.send(1, Message("window", (torch.ones(4),))))
        assert drive(b.recv(PATIENCE)).tag == "window"
