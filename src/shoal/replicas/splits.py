"""Splits: the data cut into M blocks, and each block into one split per worker, "N x M" (Chen & Huo 2016)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.seeds import stream
from shoal.replicas.batches import part_of


def split_steps(samples: int, batch: int, workers: int, blocks: int) -> int:
    """Steps of one pass over a split, the same for all workers. Raises ValueError if samples are too few."""
    smallest = samples // blocks
    if smallest < workers:
        raise ValueError(
            f"{samples} samples cannot be cut into {workers} x {blocks} splits; every one needs at least 1"
        )
    return max(1, -(-(smallest - workers + 1) // (batch * workers)))


@dataclass(frozen=True)
class Coming:
    """The split of the next visit, which a thread gathers."""

    number: int  # of the visit, counted from the beginning of the run
    rows: Future[tuple[Tensor, Tensor]]


class Splits:
    """One worker's part of the data: one split of every block, visited one after the other.

    A sweep visits all blocks in a random order, the same for all workers. A visit is one pass over the split,
    in a random order, in batches of about the same size. With `ahead` a thread gathers the next split during
    the steps of the current one; `close` joins the thread.
    """

    rate = 1.0  # factor of the learning rate

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch: int,
        rank: int,
        workers: int,
        blocks: int,
        seed: int,
        ahead: bool = False,
    ) -> None:
        self._x, self._y = x, y
        self._rank, self._workers, self._blocks, self._seed = rank, workers, blocks, seed
        self.split_steps = split_steps(len(x), batch, workers, blocks)
        self.steps_per_epoch = blocks * self.split_steps
        self.position = 0  # batches taken so far
        self.coming: Coming | None = None
        self._order = torch.randperm(len(x), generator=stream(seed, "blocks"))
        self._here: tuple[int, tuple[Tensor, Tensor]] | None = None  # number of the visit, and its rows
        self._detour: tuple[int, int] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal gathers") if ahead else None

    def seek(self, owner: int, place: int) -> None:
        """Continue from batch `place` of this worker's splits, or take that one batch of another worker's."""
        if owner == self._rank:
            self.position, self._detour = place, None
        else:
            self._detour = owner, place

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; never ends."""
        if self._detour is not None:
            (rank, position), self._detour = self._detour, None
            visit, step = divmod(position, self.split_steps)
            rows = self._gather(rank, visit)
        else:
            visit, step = divmod(self.position, self.split_steps)
            self.position += 1
            rows = self._visit(visit)
        x, y = (part_of(part, step, self.split_steps) for part in rows)
        return x, y

    def split(self, rank: int, block: int) -> Tensor:
        """The indices of the samples in a worker's split of a block."""
        ends = [len(self._x) * (block + k) // self._blocks for k in (0, 1)]
        return self._order[ends[0] : ends[1]][rank :: self._workers]

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _visit(self, number: int) -> tuple[Tensor, Tensor]:
        """The rows of this visit. On its first batch the thread starts to gather those of the next visit."""
        if self._here is None or self._here[0] != number:
            coming = self.coming if self.coming is not None and self.coming.number == number else None
            self._here = number, self._gather(self._rank, number) if coming is None else coming.rows.result()
            if self._thread is not None:
                self.coming = Coming(number + 1, self._thread.submit(self._gather, self._rank, number + 1))
        return self._here[1]

    def _gather(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        """Copy the rows of a worker's split, in the order of this visit."""
        sweep, turn = divmod(number, self._blocks)
        block = int(torch.randperm(self._blocks, generator=stream(self._seed, "sweep", sweep))[turn])
        mine = self.split(rank, block)
        draw = stream(self._seed, "split", rank, block, sweep)
        index = mine[torch.randperm(len(mine), generator=draw)]
        return self._x[index], self._y[index]
