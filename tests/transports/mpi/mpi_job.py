"""What every rank of a job runs that test_mpi.py starts: mpiexec -n 3 python mpi_job.py NAME.

Prints one line of JSON for each thing found out. A rank that fails ends the job with its traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from shoal.core.errors import PeerLost, Unavailable
from shoal.core.transport import LEFT, LOST, AllReduces, Message, Windows
from shoal.launch.drive import drive
from shoal.testing.conformance import CHECKS, Body, next_message
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.mpi import MpiTransport, all_reduce

torch.set_num_threads(1)
WORLD = MPI.COMM_WORLD
rank = WORLD.Get_rank()
PATIENCE = 20.0
LIMIT = 64 << 20


def tell(**found: Any) -> None:
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")  # one write: ranks do not mix their lines
    sys.stdout.flush()


def connect(size: int | None = None, **options: Any) -> MpiTransport:
    ranks = WORLD if size is None else WORLD.Create_group(WORLD.Get_group().Incl(list(range(size))))
    return MpiTransport.connect(world=ranks, **{"limit_bytes": LIMIT, "timeout": PATIENCE, **options})


def world(size: int, body: Body) -> list[Any]:
    """The first ranks of the job; each knows only what its own body returns."""
    if rank >= size:
        return []
    transport = connect(size)
    try:
        return [drive(body(transport))]
    finally:
        drive(transport.close())


def failure(kinds: Any, action: Callable[[], Any]) -> str:
    try:
        action()
    except kinds as error:
        return str(error)
    raise AssertionError(f"nothing was raised by {action}")


# Messages: three ranks


def conformance() -> None:
    for check in CHECKS:
        check(world)
        tell(check=check.__name__)


def large_messages_cross() -> None:
    """Two nodes send 64 MB to each other before either receives."""

    async def body(t: MpiTransport) -> int:
        await t.send(1 - t.rank, Message("large", (torch.full((16 << 20,), float(t.rank)),)))
        got = (await next_message(t)).body
        assert bool((got == 1 - t.rank).all())
        return got.nbytes

    for nbytes in world(2, body):
        tell(crossed=nbytes)


def a_message_above_the_limit_is_refused() -> None:
    """Its sender is not kept waiting, although nobody ever takes the message; later goodbyes still work."""
    if rank == 2:
        return
    t = connect(2, limit_bytes=4000 if rank == 1 else LIMIT)
    began = t.now()
    if rank == 0:
        for _ in range(3):
            drive(t.send(1, Message("too much", (torch.zeros(10 << 20),))))
        assert drive(t.recv(PATIENCE)).tag == LEFT
    else:
        assert drive(t.recv(PATIENCE)).tag == LOST
        tell(refused=t.reasons[0])
    drive(t.close())
    assert t.now() - began < CLOSING_SECONDS


def a_header_of_any_other_length_is_refused() -> None:
    """Before anything is allocated for it."""
    if rank == 2:
        return
    t = connect(2)
    if rank == 0:
        request = t._mesh.Isend([bytearray(32 << 20), MPI.BYTE], 1, 0)
        assert drive(t.recv(PATIENCE)).tag == LEFT
        request.Wait()
    else:
        tracemalloc.start()
        assert drive(t.recv(PATIENCE)).tag == LOST
        tell(length=t.reasons[0], allocated=tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    drive(t.close())


def wrong_arguments_are_named() -> None:
    tell(
        expected=failure(Unavailable, lambda: connect(expected=(rank, 7))),
        workers=failure(ValueError, lambda: connect(workers=9)),
    )


def idle_ranks_leave_the_cores_alone() -> None:
    t = connect()
    time.sleep(0.2)
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(1.0)
    tell(idle=(time.process_time() - cpu) / (time.monotonic() - began))
    drive(t.close())


# Sums: three ranks


def only_workers_sum() -> None:
    t = connect(workers=2)
    assert isinstance(t, AllReduces)
    v = torch.full((10,), 1.0 + rank)
    if rank == 2:
        tell(outsider=failure(ValueError, lambda: drive(t.all_reduce(v))))
    else:
        tell(sent=drive(t.all_reduce(v)), sum=v.tolist())
    drive(t.close())
    if rank < 2:
        failure(ValueError, lambda: drive(t.all_reduce(v)))


def every_dtype_sums() -> None:
    t = connect()
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16):
        v = torch.arange(5).to(dtype)
        drive(t.all_reduce(v))
        assert v.tolist() == [0, 3, 6, 9, 12], f"{dtype}: {v}"
    long = torch.ones(all_reduce.CHUNK_ELEMENTS + 3)
    drive(t.all_reduce(long))
    assert bool((long == 3).all())
    matrix = torch.ones(4, 2, requires_grad=True)
    drive(t.all_reduce(matrix.detach()[:, 0]))  # a column: not contiguous
    assert matrix.flatten().tolist() == [3.0, 1.0] * 4
    failure(ValueError, lambda: drive(t.all_reduce(torch.ones(1, dtype=torch.bool))))
    drive(t.close())


def a_mismatch_is_named_and_harmless() -> None:
    t = connect()
    tell(mismatch=failure(ValueError, lambda: drive(t.all_reduce(torch.ones(1000 + 500 * (rank == 1))))))
    v = torch.ones(4)
    for _ in range(3):
        drive(t.all_reduce(v))
    assert v.tolist() == [27.0] * 4
    failure(ValueError, lambda: drive(t.all_reduce(torch.ones(5 + rank), 2.0)))
    for elements in (5, 6, 7, 4):  # what was refused is not what anybody expects next
        w = torch.ones(elements)
        drive(t.all_reduce(w, 2.0))
        assert w.tolist() == [3.0] * elements
    if rank == 1:  # departs from the schedule alone; the others sum what they always summed
        v = v.double()
    tell(departure=failure(ValueError, lambda: drive(t.all_reduce(v, 0.5))))
    drive(t.close())


def a_missing_worker_is_named() -> None:
    t = connect()
    v = torch.ones(1000)
    drive(t.all_reduce(v))
    if rank == 1:
        for _ in range(2):  # the others, when they have given up
            drive(t.recv(PATIENCE))
    else:
        first = failure(PeerLost, lambda: drive(t.all_reduce(v, 0.2)))
        began = t.now()
        assert failure(PeerLost, lambda: drive(t.all_reduce(v, PATIENCE))) == first
        assert t.now() - began < PATIENCE / 2
        tell(missing=first)
        drive(t.send(1, Message("gave up")))
    drive(t.close())


def a_worker_that_left_is_named_soon() -> None:
    t = connect()
    if rank != 1:
        began = t.now()
        tell(left=failure(PeerLost, lambda: drive(t.all_reduce(torch.ones(3), PATIENCE))))
        assert t.now() - began < PATIENCE / 2
        drive(t.send(2 - rank, Message("gave up")))
        drive(next_message(t))  # or the other would find two workers gone
    drive(t.close())


def a_sum_that_is_never_finished_keeps_nobody() -> None:
    t = connect()
    v = torch.ones(1000)
    reduction = t.begin_all_reduce(v, [slice(500), slice(500, 1000)])
    for part in range(rank):  # the second is never started by rank 0 and 1, the first not by rank 0
        reduction.start(part)
    began = t.now()
    drive(t.close())
    assert t.now() - began < CLOSING_SECONDS
    failure(ValueError, lambda: drive(reduction.finish()))


def a_part_is_summed_before_the_rest_is_computed() -> None:
    """In the time of the receiving thread: this one makes no call."""
    t = connect()
    v = torch.ones(1000)
    reduction = t.begin_all_reduce(v, [slice(500), slice(500, 1000)])
    reduction.start(0)
    deadline = t.now() + PATIENCE
    while v[499] != 3 and t.now() < deadline:
        time.sleep(0.001)
    assert v.tolist() == [3.0] * 500 + [1.0] * 500
    drive(reduction.finish())
    assert v.tolist() == [3.0] * 1000
    half = torch.ones(10, dtype=torch.bfloat16)
    drive(t.begin_all_reduce(half, [slice(5), slice(5, 10)]).finish())
    assert half.tolist() == [3.0] * 10
    drive(t.close())


# Windows: any number of ranks, of which the last owns most of them


def nothing_is_lost_and_every_addition_counts_once() -> None:
    for dtype, elements, rounds in ((torch.float32, 1, 200), (torch.float64, 3_000_000, 4)):
        t = connect()
        assert isinstance(t, Windows)
        owner = t.size - 1
        x = torch.arange(elements).remainder(7).to(dtype)
        exposed, out = drive(t.open_window(owner, x)), torch.empty_like(x)
        if rank == owner:
            for _ in range(2 * owner):  # "done" and LEFT, from each
                drive(t.recv(PATIENCE))
            assert drive(t.fetch(owner, out)) == owner * rounds
            assert torch.equal(exposed, x + rounds * sum(range(1, t.size)))
            assert torch.equal(exposed, out)
        else:
            before = [drive(t.accumulate(owner, torch.full_like(x, rank + 1))) for _ in range(rounds)]
            assert drive(t.fetch(owner, out)) > before[-1]
            tell(before=before, of=str(dtype))
            drive(t.send(owner, Message("done")))
        drive(t.close())
        if rank == owner:
            assert torch.equal(exposed, out)  # the solution is read after closing


def one_worker_is_serial() -> None:
    """The same bits as without a network: x <- x - rate * gradient(x)."""
    t = connect()
    owner, rate = t.size - 1, 0.1
    x = torch.linspace(-1.0, 1.0, 1001)
    drive(t.open_window(owner, x))
    if rank == 0:
        serial, mine = x.clone(), torch.empty_like(x)
        for step in range(20):
            assert drive(t.fetch(owner, mine)) == step
            assert torch.equal(mine, serial)
            assert drive(t.accumulate(owner, torch.sin(mine).mul(-rate))) == step
            serial += torch.sin(serial).mul(-rate)
    drive(t.close())


def an_owner_helps_while_it_computes_and_after_it_has_closed() -> None:
    t = connect()
    owner, out = t.size - 1, torch.empty(100_000)
    drive(t.open_window(owner, torch.zeros(100_000)))
    began = t.now()
    if rank == owner:
        time.sleep(0.5)  # makes no call; its receiving thread does
        drive(t.close())
        assert t.now() - began >= 1.0, "closed while others could still use its memory"
    else:
        for _ in range(5):
            drive(t.accumulate(owner, torch.ones(100_000)))
        tell(helped=t.now() - began)
        while t.now() - began < 1.0:
            drive(t.fetch(owner, out))
            drive(t.sleep(0.05))
        drive(t.close())


def what_does_not_fit_a_window_is_named() -> None:
    t = connect()
    half, whole = torch.ones(4, dtype=torch.float16), torch.ones(4)
    tell(
        dtype=failure(ValueError, lambda: drive(t.open_window(0, half))),
        nobody=failure(ValueError, lambda: drive(t.open_window(9, whole))),
        unopened=failure(ValueError, lambda: drive(t.fetch(0, whole))),
        lengths=failure(ValueError, lambda: drive(t.open_window(0, torch.ones(4 + rank)))),
    )
    drive(t.open_window(0, whole if rank < 2 else torch.empty(0)))  # the others never use it
    tell(
        again=failure(ValueError, lambda: drive(t.open_window(0, whole))),
        short=failure(ValueError, lambda: drive(t.accumulate(0, torch.ones(3)))),
    )
    if rank == 1:
        column = torch.zeros(4, 2)
        drive(t.fetch(0, column[:, 0]))
        assert column.flatten().tolist() == [1.0, 0.0] * 4
    drive(t.close())


# Windows between hosts: two ranks


def a_frozen_owner_keeps_nobody_waiting() -> None:
    if rank > 1:
        return
    t = connect(2)
    drive(t.open_window(1, torch.zeros(3_000_000)))
    t._windows[1]._timeout = 0.5
    if rank == 1:
        drive(t.send(0, Message("pid", seq=os.getpid())))
        while drive(t.recv(PATIENCE)).tag != LEFT:
            pass
        drive(t.close())
        return
    owner = drive(t.recv(PATIENCE)).seq
    os.kill(owner, signal.SIGSTOP)
    try:
        began = t.now()
        said = failure(PeerLost, lambda: drive(t.accumulate(1, torch.ones(3_000_000))))
        tell(frozen=said, waited=t.now() - began)
    finally:
        os.kill(owner, signal.SIGCONT)
    drive(t.close())


MESSAGES = (
    conformance,
    large_messages_cross,
    a_message_above_the_limit_is_refused,
    a_header_of_any_other_length_is_refused,
    wrong_arguments_are_named,
    idle_ranks_leave_the_cores_alone,
)
SUMS = (
    only_workers_sum,
    every_dtype_sums,
    a_mismatch_is_named_and_harmless,
    a_part_is_summed_before_the_rest_is_computed,
    a_sum_that_is_never_finished_keeps_nobody,
    a_missing_worker_is_named,
    a_worker_that_left_is_named_soon,
)
WINDOWS = (
    nothing_is_lost_and_every_addition_counts_once,
    one_worker_is_serial,
    an_owner_helps_while_it_computes_and_after_it_has_closed,
    what_does_not_fit_a_window_is_named,
)
JOBS: dict[str, tuple[Callable[[], None], ...]] = {
    "all": (*MESSAGES, *SUMS, *WINDOWS),
    "windows": WINDOWS,
    "distant": (*WINDOWS, a_frozen_owner_keeps_nobody_waiting),
}

if __name__ == "__main__":
    for part in JOBS[sys.argv[1]]:
        part()
        tell(passed=part.__name__)
