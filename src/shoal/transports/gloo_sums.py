"""GlooSums: gloo's all-reduce, but one that says who is missing and survives a wrong length."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.transports.agreement import GRACE_SECONDS, Agreement, Position
from shoal.transports.nccl import finish_on_gpu, join_gpus, leave_gpus
from shoal.transports.rendezvous import Store, await_keys
from shoal.transports.sums import Sums

FOR_EVER = timedelta(days=3650)
"""For what waits in gloo itself: a wait that times out there closes every connection of its group."""

JOINING_SECONDS = 60.0
"""How long the others may take to say which GPU is theirs: they are at the same sum."""

BREAK_TAG = 2
"""Of a receive that nobody ever answers."""


class Gloo(Protocol):
    """What is asked of a ProcessGroupGloo."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Begin to send."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Begin to receive."""
        ...

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, timeout: timedelta, /) -> dist.Work:
        """Begin to sum, in place; what was begun earlier comes first."""
        ...


class GlooSums(Sums):
    """A group of the workers, where a thread of gloo's own adds up the parts in the order they started."""

    def __init__(self, ring: Gloo, rank: int, workers: int, store: Store, gone: Set[int]) -> None:
        super().__init__(_StoreAgreement(rank, workers, gone, store, self))
        self._ring: Gloo | None = ring
        self._store = store
        self._gpus: Any = None  # a group of NCCL's
        self._asked_for_gpus = False

    def stop(self) -> None:
        """Make everyone give up who is in a sum, or comes to one.

        Or neighbours in the ring, who have lost nobody, would wait for us until their own timeout.
        """
        if self._ring is not None:
            break_group(self._ring, (self.agreement.rank + 1) % self.agreement.workers)

    def close(self) -> None:
        """Release the group, also in the middle of a sum; those of others fail then."""
        super().close()
        if self._held:
            self.stop()
        if self._gpus is not None:
            leave_gpus(self._gpus)
            self._gpus = None
        self._ring = None  # waits for its thread: after this nobody writes to the vectors
        self._held.clear()

    def carried(self, piece: Tensor) -> Tensor:
        """Itself on a GPU too, where every worker has one of its own."""
        if not piece.is_cuda or self.agreement.workers == 1:
            return super().carried(piece)
        if not self._asked_for_gpus:  # all come to the same sum: so all ask
            rank, workers = self.agreement.rank, self.agreement.workers
            gone = self.agreement.gone
            self._gpus = join_gpus(self._store, rank, workers, piece.device, JOINING_SECONDS, gone)
            self._asked_for_gpus = True
        return super().carried(piece) if self._gpus is None else piece

    def _post(self, carried: Tensor) -> list[dist.Work]:
        assert self._ring is not None
        if carried.is_cuda:
            return [self._gpus.allreduce([carried])]
        return [self._ring.allreduce(carried, dist.ReduceOp.SUM, FOR_EVER)]

    def _wait(self, works: list[dist.Work], deadline: float) -> None:
        try:
            if self._gpus is None:
                finish(works, deadline)
            else:
                finish_on_gpu(works, deadline, self.agreement.gone)
        except RuntimeError as error:
            raise self.agreement.failure(deadline) from error


class _StoreAgreement(Agreement):
    """Workers who compare notes in the store they met at."""

    def __init__(self, rank: int, workers: int, gone: Set[int], store: Store, sums: GlooSums) -> None:
        super().__init__(rank, workers, gone)
        self._store, self._sums = store, sums

    def _compare(self, deadline: float) -> dict[int, Position]:
        found = self._exchange("brings", deadline - time.monotonic())
        if len(found) < self.workers:
            raise self.failure(deadline)
        return found

    def _roll_call(self, deadline: float) -> dict[int, Position]:
        self._sums.stop()
        try:
            return self._exchange("failed", max(GRACE_SECONDS, deadline - time.monotonic()))
        except RuntimeError as gone:
            raise PeerLost(
                f"{self._broken}, and the store that could tell who is missing does not answer: {gone}"
            ) from gone

    def _exchange(self, what: str, seconds: float) -> dict[int, Position]:
        """Write down what I bring, and read what those brought who come to the same sum in time."""
        number = self.here.number
        keys = {rank: f"shoal/{what}/{number}/{rank}" for rank in range(self.workers)}
        self._store.set(keys[self.rank], self.here.brings)
        absent = await_keys(self._store, keys, seconds, self.gone)
        return {
            rank: Position(number, self._store.get(key).decode())
            for rank, key in keys.items()
            if rank not in absent
        }


def finish(works: Sequence[dist.Work], deadline: float) -> None:
    """Wait until all is done. Raises RuntimeError if it fails, or not all is done in time."""
    for work in works:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))  # 0 would be for ever


def break_group(group: Gloo, peer: int) -> None:
    """Wake every thread, here and at the peers, that waits in the group.

    Gloo's own abort leaves a pending receive waiting; a wait that times out closes all connections.
    """
    scrap = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        group.recv([scrap], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
