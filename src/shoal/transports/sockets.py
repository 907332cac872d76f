"""SocketTransport: the processes of one host, with a connection for each pair of nodes and shared memory."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.errors import Unavailable, WireError
from shoal.core.transport import HEADER_BYTES, JOINED, LEFT, Message
from shoal.transports import frames, memory
from shoal.transports.buffers import BufferPool
from shoal.transports.endpoint import CLOSING_SECONDS, Endpoint
from shoal.transports.frames import COPY, LOAN, PARCEL, PLACE_BYTES, Place, Shape
from shoal.transports.lines import Line
from shoal.transports.loans import Lender, borrow
from shoal.transports.lobby import Contact, Lobby
from shoal.transports.rendezvous import Store, meet
from shoal.transports.windows import Board

_NO_WINDOWS = "windows need shared memory, which this run does without. Use a strategy that sends messages."


class SocketTransport(Endpoint):
    """Frames over loopback TCP; large tensors lie in shared memory, and arrive as views on it.

    A thread for each peer reads all the time, so a sender never waits for the receiver's algorithm.
    A peer that takes nothing for `timeout` seconds counts as lost. One that was lost may come back: its
    JOINED notice says so, and what is sent to it before that notice is taken goes nowhere.
    """

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store: Store,
        *,
        limit_bytes: int,
        timeout: float = 60.0,
        meeting_seconds: float | None = None,
        host: str = "127.0.0.1",
        incarnation: int = 0,
        share_memory: bool | None = None,
    ) -> SocketTransport:
        """Join the `size` nodes that meet at `store`; returns when all are connected.

        The store is only the meeting point; use a fresh one, or a PrefixStore, for each run.
        Raises PeerLost naming the ranks that did not come within `meeting_seconds`, by default `timeout`.

        A node that is started again gives an `incarnation` higher than any before. It returns when every
        other has answered or is known to be gone, which it is then told by a LOST notice. Raises PeerLost
        if the others know a later incarnation. `share_memory` defaults to what SHOAL_SHARED_MEMORY says,
        else to whether the system can.
        """
        if not 0 <= incarnation < 1 << 16:
            raise ValueError(f"incarnation={incarnation} must be 0 to 65535")
        share = memory.choose(share_memory)
        patience = timeout if meeting_seconds is None else meeting_seconds
        lobby = meet(rank, size, store, timeout=patience, host=host, incarnation=incarnation, share=share)
        return cls(lobby, store, limit_bytes=limit_bytes, timeout=timeout)

    def __init__(self, lobby: Lobby, store: Store, *, limit_bytes: int, timeout: float) -> None:
        card = lobby.card
        super().__init__(card.rank, card.size, limit_bytes)
        self.incarnation = card.incarnation
        self.shares_memory = card.probe.shares
        self.timeout = timeout
        # Who comes back needs it, and a FileStore removes its file when the last node lets go of it.
        self._store: Store | None = store
        self._buffers = BufferPool()
        self._lender = Lender()
        self._board = Board(self.rank, timeout)
        self._lines: dict[int, Line] = {}  # the latest of each peer
        self._reachable: dict[int, Line] = {}  # those that the algorithm knows of
        self._newcomers: dict[tuple[int, int], Line] = {}  # joined again, but the notice is not taken yet
        for peer, why in lobby.unreachable.items():
            self._announce(peer, ConnectionError(why))
        for peer, contact in lobby.dismiss().items():
            self._reachable[peer] = self._new_line(peer, contact)
        for line in self._reachable.values():
            line.reader.start()
        self._lobby = lobby
        self._porter = threading.Thread(
            target=lobby.serve, args=(self._welcome,), name=f"shoal {self.rank} door", daemon=True
        )
        self._porter.start()

    async def close(self) -> None:
        """Say goodbye, read until every peer has hung up, release sockets, memory and threads.

        Reading on matters: closing a socket with unread bytes resets it, which would destroy what this node
        sent last. Peers answer at once, whatever they compute; those that are frozen cost 5 s together.
        """
        if self._closing:
            return
        deadline = time.monotonic() + CLOSING_SECONDS
        self._lender.reclaim(CLOSING_SECONDS / 2)
        self._closing = True
        self._lobby.end()
        self._porter.join()
        self._say_goodbye(deadline)
        for line in self._lines.values():
            line.reader.join(max(0.0, deadline - time.monotonic()))
        for line in self._lines.values():
            line.cut()  # wakes a reader that still waits
            line.reader.join()
            line.close()
        self._lobby.close()
        self._lender.close()
        self._board.close()
        self._store = None

    def _say_goodbye(self, deadline: float) -> None:
        """Tell every peer, as soon as it has room to hear it: one that is frozen holds up nobody."""
        with selectors.DefaultSelector() as selector:
            for line in self._lines.values():
                selector.register(line.sock, selectors.EVENT_WRITE, line)
            while selector.get_map() and (able := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in able:
                    selector.unregister(key.fileobj)
                    key.data.send(self._goodbye(), ())
                    key.data.finish()

    # -- lending -------------------------------------------------------------------------------

    def share(self, like: Tensor) -> Tensor:
        """A copy of `like` that peers can read in place; an ordinary copy where memory is not shared.

        Raises Unavailable if the system has not that much.
        """
        if not self.shares_memory or like.numel() == 0:
            return like.detach().to("cpu", copy=True)
        if like.nbytes > self.limit_bytes:
            raise ValueError(f"share: {like.nbytes:,} bytes, but limit_bytes is {self.limit_bytes:,}")
        try:
            return self._lender.share(like)
        except OSError as error:
            raise Unavailable(f"no shared memory for {like.nbytes:,} bytes: {error}") from error

    async def lend(self, dst: int, m: Message) -> None:
        """Have `dst` read the only part of `m`, which came from `share`, in place. Does not wait for it.

        It must not be changed before `reclaim` returns. Whoever has copied it and then hears True from
        `release` has copied it whole: see loans.py. Where memory is not shared a copy is sent, and that is
        always whole.
        """
        header, parts = self._checked(dst, m)
        if len(parts) != 1:
            raise ValueError(f"message '{m.tag}' has {len(parts)} parts; exactly one can be lent")
        if dst == self.rank:
            self._arrived.put(replace(m, parts=(parts[0].clone(),), src=self.rank, release=_is_whole))
            return
        line = self._reachable.get(dst)
        if line is None or line.is_over:
            return
        place = None
        if line.mappings is not None and parts[0].numel() > 0:
            place = self._lender.lend(m.parts[0], lambda: line.is_over)
        if place is None:
            line.send_place(header, Place(COPY), parts)
        else:
            line.send_place(header, place)

    async def reclaim(self, timeout: float | None = None) -> None:
        """Wait until nobody reads what was lent. Who takes longer than `timeout` seconds will read in vain.

        The default is the transport's own timeout. Readers that are gone are not waited for.
        """
        self._lender.reclaim(self.timeout if timeout is None else timeout)

    # -- windows -------------------------------------------------------------------------------

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose a copy of the owner's `x` to all nodes; all call this together. One window for each owner.

        Raises Unavailable where memory is not shared, PeerLost if the owner opens none within the timeout
        and ValueError if it has another dtype or length; who is never going to use it may bring an empty
        vector. The owner may read its vector at any time, and changes it by `accumulate` alone.
        """
        if owner == self.rank:
            return self._open_own_window(x)
        line = self._lines.get(owner)
        if not self.shares_memory or (line is not None and line.mappings is None):
            raise Unavailable(_NO_WINDOWS)
        window = self._board.await_window(owner, lambda: self._is_gone(owner))
        if x.numel():
            window.check(x)
        return x

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy the exposed vector into `out`; how many additions were finished when that began.

        Each element is whole, but elements may be of different moments. Raises PeerLost if the owner is gone.
        """
        return self._board.find(owner).fetch(out)

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to the exposed vector; how many additions were finished before. None is ever lost.

        Parts where `v` is zero are neither locked nor written. Raises PeerLost if the owner is gone, or if
        somebody holds a part for the whole timeout; some parts may have been added then.
        """
        return self._board.find(owner).add(v)

    def _open_own_window(self, x: Tensor) -> Tensor:
        if not self.shares_memory:
            raise Unavailable(_NO_WINDOWS)
        if x.nbytes > self.limit_bytes:
            raise ValueError(f"a window of {x.nbytes:,} bytes, but limit_bytes is {self.limit_bytes:,}")
        window = self._board.open_own(x)
        for line in list(self._lines.values()):
            self._tell_of_window(line)
        return window.vector.view(x.shape)

    def _tell_of_window(self, line: Line) -> None:
        own = self._board.own
        if own is not None and line.mappings is not None:
            vector, place = own
            line.send_place(frames.encode(Message("window"), (vector,), self.rank), place)

    # -- coming and going ----------------------------------------------------------------------

    def _welcome(self, peer: int, contact: Contact) -> None:
        """Let a peer that was started again take the place of what it was before."""
        before = self._lines.get(peer)
        if before is not None:
            before.cut()
            before.reader.join()  # it has announced the end by now
            before.close()
        line = self._new_line(peer, contact)
        self._newcomers[peer, contact.incarnation] = line
        self._arrived.put(Message(JOINED, src=peer, incarnation=contact.incarnation))
        line.reader.start()
        self._tell_of_window(line)

    def _taken(self, m: Message) -> Message:
        if m.tag == JOINED:
            # Only now: what the algorithm sent before was meant for the incarnation it knew.
            self._reachable[m.src] = self._newcomers.pop((m.src, m.incarnation))
        return m

    def _new_line(self, peer: int, contact: Contact) -> Line:
        line = Line(contact, self.limit_bytes, self.timeout)
        name = f"shoal {self.rank} from {peer}"
        line.reader = threading.Thread(target=self._read, args=(peer, line), name=name, daemon=True)
        self._lines[peer] = line
        return line

    def _is_gone(self, peer: int) -> bool:
        line = self._lines.get(peer)
        return line is None or line.is_over

    # -- moving bytes --------------------------------------------------------------------------

    def _transmit(self, dst: int, header: bytes, parts: Sequence[Tensor]) -> None:
        line = self._reachable.get(dst)
        if line is not None:
            line.send(header, parts)

    def _read(self, peer: int, line: Line) -> None:
        """Deliver all that comes from `peer`, then the notice that nothing more does."""
        failure: Exception | None = None
        try:
            while self._deliver_next(peer, line):
                pass  # and hold on to nothing: a message in a variable here would keep its buffer
        except Exception as error:  # whatever it was: a silent end would be worse
            failure = ConnectionError(line.complaint or str(error))  # afresh: that one holds on to this frame
        line.is_over = True
        line.forget_memory()
        self._board.remove(peer)
        self.reasons.pop(peer, None)  # of an earlier incarnation
        self._announce(peer, failure)
        if failure is None:
            line.finish()  # the peer is closing and reads until it sees this
        else:
            line.cut()

    def _deliver_next(self, peer: int, line: Line) -> bool:
        """Deliver one message. False for the goodbye, which is none."""
        message = self._read_message(peer, line)
        if message is not None and message.tag == LEFT:
            return False
        if message is not None:
            self._arrived.put(message)
        return True

    def _read_message(self, peer: int, line: Line) -> Message | None:
        """The next message; None for what is between the transports alone."""
        header = line.take(HEADER_BYTES)
        place = None
        if header.startswith(frames.ELSEWHERE):
            place = frames.decode_place(line.take(PLACE_BYTES))
            header[: len(frames.MAGIC)] = frames.MAGIC
        message, shapes = self._decode(peer, header)
        if place is None:
            message.parts = self._read_parts(line, shapes)
        elif place.kind == COPY:
            message.parts, message.release = self._read_parts(line, shapes), _is_whole
        elif line.mappings is None:
            raise WireError(f"node {peer} speaks of shared memory, but shares none with node {self.rank}")
        elif place.kind == PARCEL:
            message.parts = line.mappings.unpack(place, shapes)
        elif place.kind == LOAN:
            message.parts, message.release = borrow(line.mappings.at(place), place, shapes)
        else:
            self._board.post(peer, line.mappings.open(place), shapes)
            return None
        return message

    def _read_parts(self, line: Line, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        parts = []
        for dtype, elements in shapes:
            part, room = self._buffers.empty(dtype, elements)
            line.fill(room)
            parts.append(part)
        return tuple(parts)


def _is_whole() -> bool:
    return True
