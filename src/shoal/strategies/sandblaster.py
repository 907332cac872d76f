"""Sandblaster L-BFGS: a batch method whose vectors stay at the servers (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between
from shoal.engine.protocol import Instruction, Pull, Push
from shoal.lbfgs.coordinator import Coordinator
from shoal.lbfgs.line_search import Wolfe
from shoal.lbfgs.minimizer import Minimizer
from shoal.lbfgs.vector_shard import VectorShard
from shoal.vocabulary.bundle import Bundle
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Deal, Sends, Setting, Strategy


@dataclass(frozen=True)
class Sandblaster(Strategy):
    """L-BFGS on the whole data: workers compute gradients of small portions, servers hold all vectors.

    A coordinator at the first server leads them. It hands portions to whoever is idle, the last ones twice.
    """

    sends = Sends.WHOLE_GRADIENTS
    recovers: ClassVar[str] = "none"  # shards would come back from different moments
    own_optimizer: ClassVar[bool] = True

    history: int = 10  # h: pairs of the recursion; 0: steepest descent
    iterations: int | None = None  # at most; None: until the epochs are used up, each of them a pass
    portions: int | None = None  # of a batch, each of `batch` samples; None: the whole data is one batch
    push_every: int = 8  # portions that a worker adds up before it pushes
    l2: float = 0.0  # lambda: adds lambda/2 |w|^2 to the loss
    tolerance: float = 1e-5  # the length of the gradient at which it ends
    decrease: float = 1e-4  # c1 of the Wolfe conditions
    curvature: float = 0.9  # c2
    lease: float = 60.0  # seconds of silence after which the portions that a worker claimed go to others

    def __post_init__(self) -> None:
        at_least(0, history=self.history, l2=self.l2, tolerance=self.tolerance)
        at_least(1, iterations=self.iterations, portions=self.portions, push_every=self.push_every)
        above(0, decrease=self.decrease, lease=self.lease)
        between(self.decrease, 1, curvature=self.curvature)

    @property
    def servers(self) -> int:
        return 1

    @property
    def deal(self) -> Deal:
        return Deal(portions=True)

    def steps_per_update(self, workers: int) -> float:
        return 1  # there is no learning rate to make up for anything

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.own_loop:
            raise ValueError(
                "Sandblaster evaluates the loss on the same samples several times in a step, and a loop of "
                "your own has data of its own; take shoal.run or shoal.minimize, or strategy 'downpour'"
            )

    async def worker(self, w: Node) -> None:
        bundle = Bundle(w)
        async for turn in bundle.turns():
            if turn.begins:
                await w.pull(SERVER, out=w.x)
            if turn.portion is not None:
                before = w.samples
                g = await w.grad()
                await bundle.claim(turn, g, w.samples - before)
            if turn.portion is None or len(bundle) >= self.push_every:
                await bundle.push()

    async def finish(self, w: Node) -> None:
        await w.take_result()

    async def server(self, s: Node) -> None:
        shard = VectorShard(s)
        coordinator = self._coordinator(s, shard) if s.rank == s.size else None
        if coordinator is not None:
            await coordinator.begin()
        async for m in s.inbox():
            if isinstance(m, Pull):
                await s.reply(m, shard.point)
            elif isinstance(m, Push):
                shard.take_in(m)
            elif isinstance(m, Instruction):
                await (coordinator or shard).obey(m)

    def _coordinator(self, s: Node, shard: VectorShard) -> Coordinator:
        wolfe = Wolfe(self.decrease, self.curvature)
        rotates = self.portions is not None
        minimizer = Minimizer(self.history, wolfe, self.tolerance, self.iterations, rotates)
        return Coordinator(s, shard, minimizer, portions=self.portions, l2=self.l2, lease=self.lease)
