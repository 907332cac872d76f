"""Strategy: what an algorithm answers. It says how workers are kept together, and holds no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.core.codec import Codec
from shoal.core.limits import above as above
from shoal.core.limits import at_least as at_least
from shoal.core.limits import between as between
from shoal.core.replica import NoMoreSteps
from shoal.vocabulary.node import SERVER, Node


@dataclass(frozen=True)
class Strategy(ABC):
    """One way of training on many workers. Frozen: hyper-parameters only; all state lives in the node."""

    most_workers: ClassVar[int | None] = None
    compresses: ClassVar[bool] = True  # whether what it sends goes through the codec
    sends_gradients: ClassVar[bool] = True  # or differences of models
    averages_gradients: ClassVar[bool] = False  # whether workers average them, and nothing else
    survives: ClassVar[bool] = False  # whether workers that die are done without, though there is no server
    independent: ClassVar[bool] = False  # whether workers have models of their own, and all predict together
    recovers: ClassVar[str] = "journal"  # the most that a server of its can come back with: memory, or none

    @property
    def servers(self) -> int:
        """How many servers it needs beside the workers. Each may be several nodes that own a slice each."""
        return 0

    @property
    def fixed_shares(self) -> bool:
        """Whether every worker sees the same share of the data in every epoch."""
        return False

    @property
    def shares_out(self) -> bool:
        """Whether the data is shared out among the workers; else each takes all of it, in its own order."""
        return True

    @property
    def data_blocks(self) -> int | None:
        """In how many blocks the data is cut, each a split for every worker; None deals it out by steps."""
        return None

    def check(self, workers: int) -> None:
        """Raise ValueError where the options do not suit that many workers."""
        if self.most_workers is not None and workers > self.most_workers:
            raise ValueError(f"{type(self).__name__} runs on {self.most_workers} worker, not on {workers}")

    def check_loop(self) -> None:
        """Raise ValueError where it cannot be had in a loop of one's own."""
        return

    def check_durability(self, durability: str) -> None:
        """Raise ValueError for a promise that its servers cannot keep."""
        if durability == "journal" and self.recovers != "journal":
            raise ValueError(
                f"a server of {type(self).__name__} cannot be put together again from a journal; "
                "take durability 'memory', and checkpoints"
            )

    def check_codec(self, codec: Codec) -> None:
        """Raise ValueError for a codec that would never be used, or does not suit what is sent."""
        if not (self.compresses or codec.exact):
            raise ValueError(f"{type(self).__name__} adds to memory as it is, so {codec} would do nothing")
        self.check_suits(codec)

    def check_suits(self, codec: Codec) -> None:
        """Raise ValueError for a codec that needs something else than what is sent, or how."""
        if codec.for_gradients and not self.sends_gradients:
            raise ValueError(
                f"{codec} is made for gradients, and {type(self).__name__} sends differences of models; "
                "take 'top_k' or 'one_bit'"
            )
        if codec.for_averages and not self.averages_gradients:
            raise ValueError(
                f"{codec} is for gradients that workers average among themselves at every step, and "
                f"{type(self).__name__} does something else; take strategy 'sync', or codec 'low_rank'"
            )
        if codec.needs_all and (self.servers or self.survives):
            raise ValueError(
                f"{codec} needs an average over all workers, and {type(self).__name__} forms none; take "
                "strategy 'sync', or leave out shared=true"
            )

    @abstractmethod
    async def worker(self, w: Node) -> None:
        """What each worker does, step by step."""

    async def finish(self, w: Node) -> None:
        """What a worker does when no step is left: hand over what it still holds, take the trained model."""
        return

    async def server(self, s: Node) -> None:
        """What the server does, if the strategy has one."""
        raise NotImplementedError(f"{type(self).__name__} has no server")

    async def live(self, node: Node) -> None:
        """A node's whole life, worker or server."""
        if node.is_server:
            node.service.begin()
            await self.server(node)
            return
        with suppress(NoMoreSteps):
            await self.worker(node)
        await node.meeting.agree(self.solution(node))
        await self.finish(node)

    def solution(self, node: Node) -> Tensor:
        """The model to evaluate and save, read from the node that holds it."""
        return node.x


class Blockwise(Strategy):
    """Local steps in blocks: `period` of them, or with `blocks` one pass over a split of the data."""

    period: int
    warmup: int | None
    blocks: int | None

    def check_blocks(self) -> None:
        """Raise ValueError for lengths that cannot be."""
        at_least(1, period=self.period, blocks=self.blocks)
        if self.blocks is not None and self.period != type(self).period:
            raise ValueError(
                f"blocks={self.blocks} and period={self.period}: with blocks, the local steps between two "
                "averages are one pass over a split; leave period out"
            )

    @property
    def data_blocks(self) -> int | None:
        """As its option says."""
        return self.blocks

    def check_loop(self) -> None:
        """Raise ValueError if the data is to be cut up: there it is not ours."""
        if self.blocks is not None:
            raise ValueError(
                f"blocks={self.blocks} cuts up the data of run() and compare; in a loop of your own, shard "
                "deals it out: take period"
            )

    def block_steps(self, w: Node) -> int:
        """Local steps in a block."""
        steps = self.period if self.blocks is None else getattr(w.replica, "split_steps", None)
        if steps is None:
            raise ValueError(f"blocks={self.blocks}: the data is not cut into splits here")
        if self.blocks is not None and (self.warmup or 0) % steps:
            raise ValueError(f"warmup={self.warmup} ends within a split, which has {steps} steps")
        return steps


@dataclass(frozen=True)
class Central(Strategy):
    """Workers pull the model, take one gradient and push it; the server decides what becomes of it."""

    @property
    def servers(self) -> int:
        """One, which may be several nodes that own a slice each."""
        return 1

    async def worker(self, w: Node) -> None:
        """Pull, compute, push; each waits for the one before."""
        async for _ in w.steps():
            await w.pull(SERVER, out=w.x)
            await w.push(SERVER, await w.grad())

    async def finish(self, w: Node) -> None:
        """Take the trained model."""
        await w.pull(SERVER, out=w.x)


@dataclass(frozen=True)
class Decentral(Strategy):
    """Workers talk to each other, without a server; whoever dies is done without."""

    compresses: ClassVar[bool] = False
    survives: ClassVar[bool] = True

    def check_codec(self, codec: Codec) -> None:
        """Raise ValueError for a codec that would never be used: models travel exactly."""
        if not (self.compresses or codec.exact):
            raise ValueError(
                f"{type(self).__name__} sends models as they are, so {codec} would do nothing; take 'choco'"
            )
        self.check_suits(codec)

    async def finish(self, w: Node) -> None:
        """Wait until all are done, answering them; then take the mean of all models."""
        await w.peers.part()
        await self.meet(w)

    async def meet(self, w: Node) -> None:
        """Replace the solution, and the model, by the mean over all workers of the solution."""
        solution = self.solution(w)
        solution.copy_(await w.peers.average(solution))
        w.x.copy_(solution)
