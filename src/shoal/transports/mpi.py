"""MpiTransport: messages, sums and windows between the ranks of an MPI job.

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
from shoal.transports.buffers import BufferPool
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.frames import bytes_of
from shoal.transports.polling import Polling, poll

try:
    from mpi4py import MPI
except ImportError as missing:
    raise Unavailable("transport 'mpi' needs mpi4py. Install it with: pip install 'shoal[mpi]'") from missing
except RuntimeError as missing:  # it is there, but the library that it calls is not
    raise Unavailable(
        f"transport 'mpi' finds no MPI library ({missing}). Install one with: pip install 'shoal[mpi]'"
    ) from missing

from shoal.transports.agreement import Position
from shoal.transports.mpi_sums import POSITION_BYTES, MpiSums, pack, unpack
from shoal.transports.mpi_windows import Window

CHUNK_BYTES = 1 << 30
"""The most that one MPI message carries: counts are 32 bits wide in many MPI libraries."""

LAST_WORDS_SECONDS = 0.2
"""How long a process that fails gives mpiexec to read what it printed: the rest is lost."""

_HEADER, _PART, _QUESTION, _ANSWER = range(4)  # tags of MPI messages
_BYTES = {_HEADER: HEADER_BYTES, _QUESTION: 0, _ANSWER: POSITION_BYTES}  # what they have; parts say it before

_job: list[MpiTransport] = []  # every transport of this process
_rank_process = os.getpid()  # what it forks is no rank


class MpiTransport(Endpoint):
    """Frames between ranks: the header is one MPI message, each part one more, or several if it is long.

    One thread receives all the time, so a sender never waits for the receiver's algorithm. It asks MPI
    rather than waits in it, for MPICH waits at full speed. It also moves what peers do to this node's
    windows. Nobody hears of a peer whose process dies: MPI ends the job then. One that takes nothing for
    `timeout` seconds counts as lost.
    """

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
        """Join the ranks of `world`, which all call this; ranks 0 to `workers` - 1 can sum.

        `expected` is the rank and the number of ranks that the launcher told; Unavailable is raised if MPI
        knows better. Raises PeerLost if not all ranks come within `timeout` seconds.
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
            _remove_shared_memory()  # everyone is past MPI's start, and has it open: names are of no more use
        return cls(mesh, workers=workers, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(self, mesh: MPI.Intracomm, *, workers: int, limit_bytes: int, timeout: float) -> None:
        super().__init__(mesh.Get_rank(), mesh.Get_size(), limit_bytes)
        self.timeout = timeout
        self._mesh = mesh
        self._buffers = BufferPool()
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._locks = {peer: threading.Lock() for peer in peers}
        self._silent: set[int] = set()  # peers we have said goodbye to, or cannot reach
        self._gone: set[int] = set()  # peers that have said goodbye
        self._refused: set[int] = set()  # peers that count as lost: only their goodbye is still heard
        self._under_way: dict[int, deque[_Arrival]] = {}
        self._posted: list[MPI.Request] = []  # sends that nobody waits for
        self._answers: dict[int, Position] = {}
        self._windows: dict[int, Window] = {}
        self._sums = None
        if self.rank < workers:
            self._sums = MpiSums(mesh, self.rank, workers, self._gone, self._ask)
        self._stopping = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"shoal {self.rank} from all", daemon=True)
        self._reader.start()
        _job.append(self)

    async def all_reduce(self, v: Tensor, timeout: float | None = None) -> int:
        """Sum `v` over the workers, in place; the bytes this node sent, as a ring algorithm would.

        Raises PeerLost naming who is missing after `timeout` seconds, or the transport's own timeout; `v`
        is undefined then, and every later call fails at once. Raises ValueError if the workers bring
        different dtypes or lengths.
        """
        return self._workers_sums().sum(v, self.timeout if timeout is None else timeout)

    def begin_all_reduce(self, v: Tensor, parts: Sequence[slice], timeout: float | None = None) -> Reduction:
        """The same, part by part: what has started is summed while the rest is computed.

        MPI moves on only inside its own calls, here those of the receiving thread. Fails as `all_reduce`
        does, here if the workers bring different parts, else when it is finished.
        """
        return self._workers_sums().begin(v, parts, self.timeout if timeout is None else timeout)

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose a copy of the owner's `x`; all nodes call this together. One window for each owner.

        Returns the exposed memory itself at the owner, `x` elsewhere; that memory stays until the process
        ends. Raises PeerLost if not all nodes come in time.
        """
        if not 0 <= owner < self.size:
            raise ValueError(f"there is no node {owner}: nodes are 0 to {self.size - 1}")
        if owner in self._windows:
            raise ValueError(f"node {owner} has a window already")
        self._windows[owner] = window = Window(self._mesh, owner, x, self.timeout)
        return x if window.memory is None else window.memory

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy the exposed vector into `out`; how many times it had been added to when that began."""
        return self._window(owner).fetch(out)

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to the exposed vector; how many times it had been added to before."""
        return self._window(owner).accumulate(v)

    async def close(self) -> None:
        """Say goodbye, wait for everyone's, end the thread. A frozen peer costs 5 s.

        The owner of a window stays until all peers close, or for `timeout` seconds: they may still use it.
        """
        if self._closing:
            return
        self._closing = True
        if self._sums is not None:
            self._sums.close()
        for peer in self._locks:
            self._say_goodbye(peer)
        self._reader.join(self.timeout if self.rank in self._windows else CLOSING_SECONDS)
        self._stopping.set()
        self._reader.join()
        flushed = poll(self._forget_finished, CLOSING_SECONDS if self._all_gone else 0.0)
        if flushed and self._all_gone and not self._windows:
            if self._sums is not None:
                self._sums.free()
            self._mesh.Free()

    def leave_job(self) -> None:
        """Give windows back to MPI; all nodes do so at their very end."""
        for window in self._windows.values():
            window.free()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def _all_gone(self) -> bool:
        return len(self._gone) == len(self._locks)

    def _workers_sums(self) -> MpiSums:
        if self._sums is None or self._closing:
            why = "has closed its transport" if self._closing else "is not a worker"
            raise ValueError(f"node {self.rank} {why} and cannot take part in all_reduce")
        return self._sums

    def _window(self, owner: int) -> Window:
        if owner not in self._windows or self._closing:
            raise ValueError(f"node {owner} has no window that is open")
        return self._windows[owner]

    # Sending

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        with self._locks[dst]:
            if dst in self._silent:
                return
            requests = self._post(dst, header, parts)
            if poll(lambda: MPI.Request.Testall(requests) or dst in self._gone, self.timeout):
                self._posted += requests if dst in self._gone else ()
                return
            self._posted += requests  # MPI may still read their memory
            self._silent.add(dst)
            self._refused.add(dst)
            self._announce(dst, TimeoutError(f"node {dst} took nothing for {self.timeout:g} s"))

    def _post(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> list[MPI.Request]:
        tagged = [(memoryview(header), _HEADER), *((chunk, _PART) for chunk in _chunks(map(bytes_of, parts)))]
        return [self._mesh.Isend([memory, MPI.BYTE], dst, tag) for memory, tag in tagged]

    def _say_goodbye(self, peer: int) -> None:
        with self._locks[peer]:
            if peer not in self._silent:
                self._silent.add(peer)
                self._posted += self._post(peer, self._goodbye(), ())

    def _forget_finished(self) -> bool:
        self._posted = [request for request in self._posted if not request.Test()]
        return not self._posted

    # Receiving

    def _read(self) -> None:
        """Deliver all that comes, until every peer has said goodbye or this node has waited long enough."""
        polling = Polling()
        try:
            while not (self._all_gone or self._stopping.is_set()):
                accepted = self._accept()
                if self._deliver() or accepted:
                    polling.reset()
                else:
                    polling.pause()
        except Exception as error:  # whatever it was: a silent end would be worse
            for peer in self._locks.keys() - self._gone:
                self._announce(peer, error)

    def _accept(self) -> bool:
        """Take the next MPI message that nobody waits for yet, if there is one."""
        status = MPI.Status()
        for _ in range(2):  # MPICH looks first and moves on afterwards: what is there is seen the second time
            found = self._mesh.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is not None:
                break
        else:
            return False
        peer, tag, nbytes = status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)
        if nbytes != _BYTES.get(tag):
            with contextlib.suppress(MPI.Exception):  # it does not fit into nothing, but its sender is free
                found.Recv([bytearray(), MPI.BYTE])
            if tag != _PART:  # that is of a message which was refused
                what = f"an MPI message with tag {tag} has {_BYTES.get(tag, 'no')} bytes, got {nbytes:,}"
                self._refuse(peer, WireError(what))
            return True
        memory = bytearray(nbytes)
        found.Recv([memory, MPI.BYTE])
        if tag == _QUESTION:
            self._posted.append(self._mesh.Isend([self._position(), MPI.BYTE], peer, _ANSWER))
        elif tag == _ANSWER:
            self._answers[peer] = unpack(memory)
        else:
            self._begin(peer, memory)
        return True

    def _begin(self, peer: int, header: bytearray) -> None:
        """Ask MPI for the parts of a message whose header has come."""
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
        """Take nothing more from a peer; it hears a goodbye, and its own is waited for."""
        if peer not in self._refused:
            self._refused.add(peer)
            self._announce(peer, error)
            self._say_goodbye(peer)

    def _deliver(self) -> bool:
        """Hand over the messages that are whole, in the order of their headers."""
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
        if peer not in self._windows:  # who owns one must stay as long as we may use it: until we close
            self._say_goodbye(peer)

    # Who has come to a sum

    def _position(self) -> bytes:
        return pack(Position() if self._sums is None else self._sums.agreement.here)

    def _ask(self, peers: Iterable[int], seconds: float) -> dict[int, Position]:
        """How far each of the peers is with its sums; those that do not answer in time are left out."""
        wanted = set(peers)
        self._answers.clear()
        self._posted += [self._mesh.Isend([b"", MPI.BYTE], peer, _QUESTION) for peer in wanted]
        poll(lambda: wanted <= self._answers.keys(), seconds)
        return dict(self._answers)


@dataclass
class _Arrival:
    """A message of which the header has come, and the requests for its parts."""

    message: Message
    requests: list[MPI.Request] = field(default_factory=list)


def _chunks(memories: Iterable[memoryview]) -> Iterator[memoryview]:
    """Pieces that fit into an MPI message; none of an empty part."""
    for memory in memories:
        for begin in range(0, len(memory), CHUNK_BYTES):
            yield memory[begin : begin + CHUNK_BYTES]


def _check_library(expected: tuple[int, int] | None, found: tuple[int, int]) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise Unavailable(
            "transport 'mpi' receives in a thread of its own and needs MPI_THREAD_MULTIPLE, which MPI was "
            "started without. Leave mpi4py.rc alone, or install another MPI"
        )
    if expected is not None and expected != found:
        raise Unavailable(
            f"the launcher says that this is node {expected[0]} of {expected[1]}, MPI says {found[0]} of "
            f"{found[1]}: mpiexec and mpi4py belong to different MPI libraries. `shoal doctor` finds the one "
            "that fits"
        )


@atexit.register
def _leave_job() -> None:
    """End the whole job if this process fails; else give back what only all ranks together can."""
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
    """Do what MPICH does only in an orderly end; or each failure would cost memory until the next reboot."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for path in re.findall(r"/dev/shm/mpich_shm_\w+", maps):
            Path(path).unlink(missing_ok=True)
