"""MpiTransport: messages, all-reduce and windows between the ranks of an MPI job.

Importing this module starts MPI. From then on a process that fails ends the whole job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.core.transport import HEADER_BYTES, LEFT, Message, Reduction
from shoal.transports.all_reduce import Position
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.frames import BufferPool, bytes_of
from shoal.transports.mpi.all_reduce import POSITION_BYTES, MpiAllReduce, pack_position, unpack_position
from shoal.transports.mpi.library import MPI, Polling, poll
from shoal.transports.mpi.windows import MpiWindow

CHUNK_BYTES = 1 << 30
"""The largest MPI message: counts are 32 bits wide in many MPI libraries."""

LAST_WORDS_SECONDS = 0.2
"""How long a failing process waits for mpiexec to read its output; unread output is lost."""

_HEADER, _PART, _QUESTION, _ANSWER = range(4)  # tags of MPI messages
_BYTES = {_HEADER: HEADER_BYTES, _QUESTION: 0, _ANSWER: POSITION_BYTES}  # a part's is in its header

_job: list[MpiTransport] = []  # every transport of this process
_rank_process = os.getpid()  # forked children are no ranks


class MpiTransport(Endpoint):
    """Frames between ranks: the header is one MPI message, each part another, or several if it is long.

    One thread receives continuously, so a sender never waits for the receiver's algorithm. It polls,
    because MPICH spins while it waits. Its calls also progress peers' access to this node's windows. When a
    process dies, MPI ends the job. A peer that receives nothing for `timeout` seconds is lost.
    """

    notices_silence = False  # a rank that is frozen breaks no connection

    @classmethod
    def connect(
        cls,
        *,
        limit_bytes: int,
        timeout: float = 300.0,
        workers: int | None = None,
        expected: tuple[int, int] | None = None,
        world: MPI.Intracomm = MPI.COMM_WORLD,
    ) -> MpiTransport:
        """Join the ranks of `world`, which all call this; ranks 0 to `workers` - 1 take part in all-reduce.

        `expected` is the rank and the number of ranks according to the launcher; raises Unavailable if MPI
        disagrees. Raises PeerLost if not all ranks come within `timeout` seconds.
        """
        rank, size = world.Get_rank(), world.Get_size()
        _check_library(expected, (rank, size))
        workers = size if workers is None else workers
        if not 0 < workers <= size:
            raise ValueError(f"workers={workers} must be 1 to size={size}")
        mesh, request = world.Idup()
        if not poll(request.Test, timeout):
            raise PeerLost(f"not all {size} nodes came within {timeout:g} s (I am node {rank})")
        if size == MPI.COMM_WORLD.Get_size():
            _remove_shared_memory()  # all ranks have opened it by now: its names are no longer needed
        return cls(mesh, workers=workers, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(self, mesh: MPI.Intracomm, *, workers: int, limit_bytes: int, timeout: float) -> None:
        super().__init__(mesh.Get_rank(), mesh.Get_size(), limit_bytes)
        self.timeout = timeout
        self._mesh = mesh
        self._buffers = BufferPool()
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._locks = {peer: threading.Lock() for peer in peers}
        self._unreachable: set[int] = set()  # peers that left, were lost, or heard our goodbye
        self._gone: set[int] = set()  # peers that have said goodbye
        self._refused: set[int] = set()  # lost peers: only their goodbye is still read
        self._under_way: dict[int, deque[_Arrival]] = {}
        self._posted: list[MPI.Request] = []  # sends that nobody waits for
        self._answers: dict[int, Position] = {}
        self._windows: dict[int, MpiWindow] = {}
        self._all_reduce = None
        if self.rank < workers:
            self._all_reduce = MpiAllReduce(mesh, self.rank, workers, self._gone, self._ask)
        self._stopping = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"shoal {self.rank} from all", daemon=True)
        self._reader.start()
        _job.append(self)

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the workers, in place; returns the bytes that a ring all-reduce sends.

        Raises PeerLost naming who is missing after `timeout` seconds, by default the transport's timeout.
        Then `v` is undefined and every later call fails at once. Raises ValueError if the workers'
        dtypes or lengths differ.
        """
        return self._worker_all_reduce().sum(v, self.timeout if timeout is None else timeout)

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """All-reduce part by part: started parts are summed while the rest is computed.

        MPI progresses only inside its calls, here those of the receiving thread. Fails as `all_reduce`
        does: at once if the workers' parts differ, else in `finish`.
        """
        return self._worker_all_reduce().begin(v, parts, self.timeout if timeout is None else timeout)

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose a copy of the owner's `x`; all nodes call this together. One window per owner.

        Returns the exposed memory itself at the owner, `x` elsewhere. That memory lives until the process
        ends. Raises PeerLost if not all nodes come in time.
        """
        if not 0 <= owner < self.size:
            raise ValueError(f"there is no node {owner}: nodes are 0 to {self.size - 1}")
        if owner in self._windows:
            raise ValueError(f"node {owner} already has a window")
        self._windows[owner] = window = MpiWindow(self._mesh, owner, x, self.timeout)
        return x if window.memory is None else window.memory

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy the exposed vector into `out`; returns the number of additions finished before."""
        return self._window(owner).fetch(out)

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to the exposed vector; returns the number of additions finished before."""
        return self._window(owner).accumulate(v)

    async def close(self) -> None:
        """Say goodbye, wait for every peer's, end the thread. A frozen peer costs 5 s.

        The owner of a window waits until all peers close, at most `timeout` seconds: they may still use it.
        """
        if self._closing:
            return
        self._closing = True
        if self._all_reduce is not None:
            self._all_reduce.close()
        for peer in self._locks:
            self._say_goodbye(peer)
        self._reader.join(self.timeout if self.rank in self._windows else CLOSING_SECONDS)
        self._stopping.set()
        self._reader.join()
        flushed = poll(self._forget_finished, CLOSING_SECONDS if self._all_gone else 0.0)
        if flushed and self._all_gone and not self._windows:
            if self._all_reduce is not None:
                self._all_reduce.free()
            self._mesh.Free()

    def leave_job(self) -> None:
        """Free the windows; all nodes do so at exit."""
        for window in self._windows.values():
            window.free()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def _all_gone(self) -> bool:
        return len(self._gone) == len(self._locks)

    def _worker_all_reduce(self) -> MpiAllReduce:
        if self._all_reduce is None or self._closing:
            why = "has closed its transport" if self._closing else "is not a worker"
            raise ValueError(f"node {self.rank} {why} and cannot take part in all_reduce")
        return self._all_reduce

    def _window(self, owner: int) -> MpiWindow:
        if owner not in self._windows or self._closing:
            raise ValueError(f"node {owner} has no open window")
        return self._windows[owner]

    # Sending

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        with self._locks[dst]:
            if dst in self._unreachable:
                return
            requests = self._post(dst, header, parts)
            if poll(lambda: MPI.Request.Testall(requests) or dst in self._gone, self.timeout):
                self._posted += requests if dst in self._gone else ()
                return
            self._posted += requests  # MPI may still read their memory
            self._unreachable.add(dst)
            self._refused.add(dst)
            self._announce(dst, TimeoutError(f"node {dst} took nothing for {self.timeout:g} s"))

    def _post(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> list[MPI.Request]:
        tagged = [(memoryview(header), _HEADER), *((chunk, _PART) for chunk in _chunks(map(bytes_of, parts)))]
        return [self._mesh.Isend([memory, MPI.BYTE], dst, tag) for memory, tag in tagged]

    def _say_goodbye(self, peer: int) -> None:
        with self._locks[peer]:
            if peer not in self._unreachable:
                self._unreachable.add(peer)
                self._posted += self._post(peer, self._goodbye(), ())

    def _forget_finished(self) -> bool:
        self._posted = [request for request in self._posted if not request.Test()]
        return not self._posted

    # Receiving

    def _read(self) -> None:
        """Deliver all messages, until every peer has said goodbye or `close` stops waiting."""
        polling = Polling()
        try:
            while not (self._all_gone or self._stopping.is_set()):
                accepted = self._accept()
                if self._deliver() or accepted:
                    polling.reset()
                else:
                    polling.pause()
        except Exception as error:  # any error: a silent end would be worse
            for peer in self._locks.keys() - self._gone:
                self._announce(peer, error)

    def _accept(self) -> bool:
        """Receive the next header, question or answer, if there is one."""
        status = MPI.Status()
        for _ in range(2):  # MPICH matches first and progresses afterwards
            found = self._mesh.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is not None:
                break
        else:
            return False
        peer, tag, nbytes = status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)
        if nbytes != _BYTES.get(tag):
            with contextlib.suppress(MPI.Exception):  # truncated, but its sender is released
                found.Recv([bytearray(), MPI.BYTE])
            if tag != _PART:  # a part of a refused message is expected
                what = f"an MPI message with tag {tag} has {_BYTES.get(tag, 'no')} bytes, got {nbytes:,}"
                self._refuse(peer, WireError(what))
            return True
        memory = bytearray(nbytes)
        found.Recv([memory, MPI.BYTE])
        if tag == _QUESTION:
            self._posted.append(self._mesh.Isend([self._position(), MPI.BYTE], peer, _ANSWER))
        elif tag == _ANSWER:
            self._answers[peer] = unpack_position(memory)
        else:
            self._begin(peer, memory)
        return True

    def _begin(self, peer: int, header: bytearray) -> None:
        """Post the receives for the parts of a message whose header has come."""
        try:
            message, shapes = self._decode(peer, header)
        except WireError as error:
            self._refuse(peer, error)
            return
        if peer in self._refused:
            if message.tag == LEFT:
                self._gone.add(peer)
            return
        arrival = _Arrival(message)
        for dtype, elements in shapes:
            part, memory = self._buffers.empty(dtype, elements)
            message.parts += (part,)
            arrival.requests += [
                self._mesh.Irecv([chunk, MPI.BYTE], peer, _PART) for chunk in _chunks([memory])
            ]
        self._under_way.setdefault(peer, deque()).append(arrival)

    def _refuse(self, peer: int, error: WireError) -> None:
        """Accept nothing more from a peer but its goodbye; say goodbye to it."""
        if peer not in self._refused:
            self._refused.add(peer)
            self._announce(peer, error)
            self._say_goodbye(peer)

    def _deliver(self) -> bool:
        """Deliver complete messages in the order of their headers."""
        moved = False
        for peer, arrivals in list(self._under_way.items()):
            while arrivals and MPI.Request.Testall(arrivals[0].requests):
                moved = True
                message = arrivals.popleft().message
                if message.tag == LEFT:
                    self._part_from(peer)
                else:
                    self._arrived.put(message)
            if not arrivals:
                del self._under_way[peer]
        return moved

    def _part_from(self, peer: int) -> None:
        self._gone.add(peer)
        self._announce(peer, None)
        if peer not in self._windows:  # the owner of a window must stay until we close
            self._say_goodbye(peer)

    # Positions in the sequence of all-reduces

    def _position(self) -> bytes:
        return pack_position(Position() if self._all_reduce is None else self._all_reduce.schedule.here)

    def _ask(self, peers: Iterable[int], seconds: float) -> dict[int, Position]:
        """The positions of the peers; without those that do not answer in time."""
        wanted = set(peers)
        self._answers.clear()
        self._posted += [self._mesh.Isend([b"", MPI.BYTE], peer, _QUESTION) for peer in wanted]
        poll(lambda: wanted <= self._answers.keys(), seconds)
        return dict(self._answers)


@dataclass
class _Arrival:
    """A message whose header has come, and the receives of its parts."""

    message: Message
    requests: list[MPI.Request] = field(default_factory=list)


def _chunks(memories: Iterable[memoryview]) -> Iterator[memoryview]:
    """Pieces that fit into an MPI message; none for an empty part."""
    for memory in memories:
        for begin in range(0, len(memory), CHUNK_BYTES):
            yield memory[begin : begin + CHUNK_BYTES]


def _check_library(expected: tuple[int, int] | None, found: tuple[int, int]) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise Unavailable(
            "transport 'mpi' receives in a thread of its own and needs MPI_THREAD_MULTIPLE, but MPI was "
            "started without it. Do not change mpi4py.rc.thread_level, or install another MPI"
        )
    if expected is not None and expected != found:
        raise Unavailable(
            f"the launcher says that this is node {expected[0]} of {expected[1]}, MPI says {found[0]} of "
            f"{found[1]}: mpiexec and mpi4py belong to different MPI libraries. `shoal doctor` finds the one "
            "that fits"
        )


@atexit.register
def _leave_job() -> None:
    """Abort the job if this process failed; else free what only all ranks together can free."""
    if MPI.Is_finalized() or os.getpid() != _rank_process:
        return
    failed = getattr(sys, "last_value", None) is not None
    if failed or not all(transport.is_closed for transport in _job):
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LAST_WORDS_SECONDS)
        _remove_shared_memory()
        MPI.COMM_WORLD.Abort(1)
    for transport in _job:
        transport.leave_job()


def _remove_shared_memory() -> None:
    """Remove MPICH's shared-memory files, as it does itself only on a normal exit."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for path in re.findall(r"/dev/shm/mpich_shm_\w+", maps):
            Path(path).unlink(missing_ok=True)
