"""Whether all workers go through the same data in the same order, of which shard() deals each its share."""

from __future__ import annotations

import json
import warnings

import torch

from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.replicas.passes import PassMark

MARK = "pass"


class SameData:
    """Compares the pass in which this worker takes its first step with worker 0's.

    Worker 0 sends the mark of its pass to the others. Nobody waits for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._own: PassMark | None = None
        self._has_begun = False  # whether this worker has taken its first step
        self._from_start = engine.t == 0  # else the run was resumed, perhaps in different passes
        self.is_over = len(engine.identity.first_workers) == 1 or engine.is_server

    async def look(self, mark: PassMark | None) -> None:
        """Before each step, in a pass with that mark. Raises ValueError if worker 0's is another."""
        if not self._has_begun:
            self._has_begun, self._own = True, mark
        if self._engine.rank == 0:
            await self._tell()
            return
        for m in self._engine.mailbox.poll(MARK):
            self.is_over = True
            theirs = json.loads(bytes(m.body.tolist()))
            if self._own is not None and theirs is not None:
                self._compare(self._own, PassMark(*theirs))

    async def _tell(self) -> None:
        self.is_over = True
        text = json.dumps(self._own).encode()
        for rank in self._engine.identity.first_workers[1:]:
            letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            await self._engine.channel.tell(rank, Message(MARK, (letters,)))

    def _compare(self, own: PassMark, theirs: PassMark) -> None:
        name = self._engine.name
        if own.items is None and theirs.items is None:
            self._compare_streams(name, own, theirs)
            return
        if own[1:4] == theirs[1:4] and self._from_start and own.number != theirs.number:
            raise ValueError(
                f"{name} takes its first step in pass {own.number + 1} over the data, and worker 0 in pass "
                f"{theirs.number + 1}: begin each pass over shoal.shard(loader) at all workers, and take a "
                "batch that one worker alone looks at from the loader itself"
            )
        if (difference := own.difference(theirs)) is not None:
            raise ValueError(
                f"the workers' data differ: {name} {difference}; seed the split, and whatever else chooses "
                "or shuffles samples, alike in every process (data of each worker's own need no shard())"
            )

    def _compare_streams(self, name: str, own: PassMark, theirs: PassMark) -> None:
        """Warn of another first batch. It may be the same one, augmented at random, so it is not refused."""
        if own.number == theirs.number and own.first != theirs.first:
            warnings.warn(
                f"{name} reads another first batch than worker 0. If the order differs, and not only random "
                "augmentation, samples come twice or never: every worker reads this loader whole, and "
                "shard() keeps every N-th batch. Seed the order alike in every process; data of each "
                "worker's own need no shard()",
                stacklevel=6,
            )
