"""GlooAllReduce: gloo's all-reduce, with errors that name the missing worker and report wrong lengths."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.transports.all_reduce import GRACE_SECONDS, CollectiveSchedule, Position, TransportAllReduce
from shoal.transports.gloo.nccl import finish_on_gpu, join_gpus, leave_gpus
from shoal.transports.rendezvous import Store, await_keys

NO_TIMEOUT = timedelta(days=3650)
"""For waits inside gloo: one that times out there closes every connection of its group."""

LOOK_UP = timedelta(milliseconds=100)
"""While we wait for an all-reduce, how often we look whether a worker was lost."""

JOINING_SECONDS = 60.0
"""How long the other workers may take to publish their GPU: they are at the same all-reduce."""

STORE_SECONDS = 5.0
"""How long the rendezvous store may take to answer, beyond the time for which the others are waited for."""

CUT_OFF_SECONDS = 15.0
"""How long the store may say nothing after a failure: its host may be the one that cannot be reached."""

BREAK_TAG = 2
"""Tag of a receive that is never answered."""


class GlooGroup(Protocol):
    """The part of ProcessGroupGloo that Shoal uses."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Start to send."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Start to receive."""
        ...

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, timeout: timedelta, /) -> dist.Work:
        """Start to sum in place, after earlier calls."""
        ...


class GlooAllReduce(TransportAllReduce):
    """All-reduce in a group of the workers. A thread of gloo sums the parts in the order they started."""

    def __init__(self, ring: GlooGroup | None, schedule: StoreSchedule, lost: Set[int]) -> None:
        super().__init__(schedule)
        schedule.stop = self.stop
        self._lost = lost
        self._ring = ring
        self._store = schedule.store
        self._gpus: Any = None  # a ProcessGroupNCCL
        self._asked_for_gpus = False

    def stop(self) -> None:
        """Make every worker fail that is in an all-reduce of this group, or starts one.

        Otherwise neighbours in the ring that have lost nobody would wait for us until their own timeout. One
        receive closes all connections, unless it is from a worker whose connection is closed already.
        """
        if self._ring is not None:
            for place in range(self.schedule.workers):
                if place != self.schedule.place:
                    break_group(self._ring, place)

    def close(self) -> None:
        """Release the group, even during an all-reduce, which then fails at the other workers."""
        super().close()
        if self._held:
            self.stop()
        if self._gpus is not None:
            leave_gpus(self._gpus)
            self._gpus = None
        self._ring = None  # waits for its thread, which then writes to no vector
        self._held.clear()

    def staged(self, piece: Tensor) -> Tensor:
        """Also `piece` itself if it is on a GPU and every worker has its own."""
        if not piece.is_cuda or self.schedule.workers == 1:
            return super().staged(piece)
        if not self._asked_for_gpus:  # all workers are at this all-reduce, so all ask
            rank, ranks, gone = self.schedule.rank, self.schedule.ranks, self.schedule.gone
            self._gpus = join_gpus(self._store, rank, ranks, piece.device, JOINING_SECONDS, gone)
            self._asked_for_gpus = True
        return super().staged(piece) if self._gpus is None else piece

    def _post(self, staged: Tensor) -> list[dist.Work]:
        assert self._ring is not None
        if staged.is_cuda:
            return [self._gpus.allreduce([staged])]
        return [self._ring.allreduce(staged, dist.ReduceOp.SUM, NO_TIMEOUT)]

    def _wait(self, works: list[dist.Work], deadline: float) -> None:
        # whoever leaves breaks gloo's connections, but not NCCL's
        away = self._lost if self._gpus is None else self.schedule.gone
        patience = _Patience(deadline, away, self.schedule.ranks)
        try:
            self._finish(works, patience.is_over, LOOK_UP)
        except RuntimeError as error:
            raise self.schedule.failure(deadline) from error

    def _finish(self, works: list[dist.Work], give_up: Callable[[], bool], look_up: timedelta) -> None:
        """Wait until all is done. Raises RuntimeError on failure, or when `give_up` says so."""
        if self._gpus is None:
            finish_on_cpu(works, give_up, look_up)
        else:
            finish_on_gpu(works, give_up)


class StoreSchedule(CollectiveSchedule):
    """Compares positions through the rendezvous store. After a failure it has all others `stop`."""

    stop: Callable[[], None]

    def __init__(self, rank: int, ranks: Sequence[int], gone: Set[int], store: Store) -> None:
        super().__init__(rank, ranks, gone)
        self.store = store

    def _compare(self, deadline: float) -> dict[int, Position]:
        try:
            found = self._exchange("signature", deadline - time.monotonic())
        except RuntimeError:  # the store does not answer
            found = {}
        if len(found) < self.workers:
            raise self.failure(deadline)
        return found

    def _survivors(self, deadline: float) -> dict[int, Position]:
        self.stop()
        try:
            seconds = max(GRACE_SECONDS, deadline - time.monotonic())
            return self._exchange("failed", seconds, CUT_OFF_SECONDS)
        except RuntimeError as gone:
            raise PeerLost(
                f"{self._broken}, and the store that could tell who is missing does not answer: {gone}"
            ) from gone

    def _exchange(self, what: str, seconds: float, answers_in: float = math.inf) -> dict[int, Position]:
        """Publish this worker's signature; return those of the workers that come in time.

        In a thread: a store on a host that cannot be reached any more would block for ever, whatever its own
        time-out. Raises RuntimeError then, or if it says nothing at all for `answers_in` seconds.
        """
        asked: Future[dict[int, Position]] = Future()
        answers = threading.Event()
        asking = threading.Thread(target=self._ask, args=(asked, answers, what, seconds), daemon=True)
        asking.start()
        limit = min(answers_in, max(0.0, seconds) + STORE_SECONDS)
        if not answers.wait(limit):
            raise RuntimeError(f"no answer for {limit:.0f} s")
        try:
            return asked.result(max(0.0, seconds) + STORE_SECONDS)
        except FutureTimeout:  # in Python 3.10 not yet the builtin TimeoutError
            raise RuntimeError(f"no answer for {max(0.0, seconds) + STORE_SECONDS:.0f} s") from None

    def _ask(
        self, asked: Future[dict[int, Position]], answers: threading.Event, what: str, seconds: float
    ) -> None:
        try:
            self.store.check([f"shoal/here/{self.rank}"])
            answers.set()
            asked.set_result(self._ask_store(what, seconds))
        except Exception as error:
            asked.set_exception(error)
            answers.set()

    def _ask_store(self, what: str, seconds: float) -> dict[int, Position]:
        number = self.here.number
        keys = {rank: f"shoal/{what}/{number}/{rank}" for rank in self.ranks}
        self.store.set(keys[self.rank], self.here.signature)
        absent = await_keys(self.store, keys, seconds, self.gone)
        return {
            rank: Position(number, self.store.get(key).decode())
            for rank, key in keys.items()
            if rank not in absent
        }


class _Patience:
    """How long to wait for an all-reduce: until the deadline, or GRACE_SECONDS after a worker is `away`.

    Gloo itself may wait forever for a worker that was killed. The grace is for one that had sent all that
    the others need.
    """

    def __init__(self, deadline: float, away: Set[int], ranks: Sequence[int]) -> None:
        self._deadline, self._away, self._ranks = deadline, away, ranks

    def is_over(self) -> bool:
        """Whether to give up."""
        now = time.monotonic()
        if not self._away.isdisjoint(self._ranks):
            self._deadline = min(self._deadline, now + GRACE_SECONDS)
        return now > self._deadline


def finish_on_cpu(works: Sequence[dist.Work], give_up: Callable[[], bool], look_up: timedelta) -> None:
    """Wait until all is done. Raises RuntimeError on failure, or when `give_up` says so at a `look_up`."""
    for work in works:
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not done yet; or failed, which the last wait raises
                work.wait(look_up)
            if not work.is_completed() and give_up():
                raise RuntimeError("an all-reduce was not done in time, or a worker was lost")
        work.wait()


def finish(works: Sequence[dist.Work], deadline: float) -> None:
    """Wait until all is done. Raises RuntimeError on failure or after the deadline."""
    for work in works:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))  # 0 means no timeout


def break_group(group: GlooGroup, peer: int) -> None:
    """Wake every thread, here and at the peers, that waits in the group.

    Gloo's own abort leaves a pending receive waiting; a receive that times out closes all connections.
    """
    scrap = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        group.recv([scrap], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
