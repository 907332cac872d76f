"""Simulation: a strategy on many nodes in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.collectives import stripes
from shoal.core.codec import Codec, Identity
from shoal.core.instrument import Instrument
from shoal.core.node import Hook, Mean, Node
from shoal.core.replica import Parameters, Replica
from shoal.core.strategy import Strategy
from shoal.sim.faults import Crash, Faults
from shoal.sim.kernel import Kernel
from shoal.sim.models import Compute, Network, Pace
from shoal.sim.transport import SimTransport, Switch


class Simulation:
    """The nodes of a run in virtual time.

    `replica(rank)` makes each worker's replica; servers start at `centre`, or where worker 0 does.
    The same arguments give the same run, bit for bit: see `digest`.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Callable[[int], Replica],
        *,
        workers: int,
        steps: int,
        centre: Tensor | None = None,
        network: Network | None = None,
        compute: Compute | None = None,
        faults: Faults | None = None,
        codec: Codec | None = None,
        mean: Mean = stripes,
        seed: int = 0,
        boundary: Hook | None = None,
        observers: Sequence[Instrument] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: a run needs at least 1 worker")
        strategy.check(workers)
        self.strategy = strategy
        self.workers = workers
        self.kernel = Kernel()
        self.nodes: list[Node] = []
        self._faults = faults or Faults()
        self._faults.check(workers)
        for rank in compute.slow if compute else ():
            if not 0 <= rank < workers:
                raise ValueError(f"there is no worker {rank} to slow down: workers are 0 to {workers - 1}")
        self._switch = Switch(self.kernel, network or Network(), seed)
        self._ends = [self._switch.add() for _ in range(workers + strategy.servers)]
        for rank, end in enumerate(self._ends):
            is_worker = rank < workers
            own = replica(rank) if is_worker else Parameters(self._start(centre))
            pace = self._pace(Pace(compute or Compute(), rank, seed), end) if is_worker else None
            node = Node(
                end,
                own,
                workers=workers,
                mean=mean,
                codec=codec or Identity(),
                seed=seed,
                steps=steps if is_worker else None,
                pace=pace,
                boundary=boundary,
                observers=observers,
            )
            self.nodes.append(node)
        for server in self._ends[workers:]:
            for end in self._ends[:workers]:
                end.acquaint(server)

    def run(self) -> Simulation:
        """Let virtual time pass until every node is done, and return the simulation itself."""
        for node, end in zip(self.nodes, self._ends, strict=True):
            end.process = self.kernel.spawn(self._life(node, end), self._describe(node))
        try:
            self.kernel.run()
        finally:
            self.kernel.close()
        return self

    def worker(self, rank: int) -> Node:
        """The worker of that rank."""
        return self.nodes[rank]

    @property
    def server(self) -> Node:
        """The (first) server."""
        return self.nodes[self.workers]

    @property
    def seconds(self) -> float:
        """Virtual time that has passed."""
        return self.kernel.now

    def digest(self) -> str:
        """A fingerprint of every message and of the final parameters of every node."""
        total = hashlib.blake2b(self._switch.digest().encode(), digest_size=16)
        for node in self.nodes:
            total.update(node.x.detach().cpu().numpy().tobytes())
        return total.hexdigest()

    def _start(self, centre: Tensor | None) -> Tensor:
        return (self.nodes[0].x if centre is None else centre).detach().clone()

    def _pace(self, pace: Pace, end: SimTransport) -> Hook:
        async def let_time_pass(node: Node) -> None:
            duration = pace.next() + self._faults.delay(node.rank, node.t)
            if duration:
                await end.sleep(duration)

        return let_time_pass

    async def _life(self, node: Node, end: SimTransport) -> None:
        try:
            await self.strategy.live(node)
            await end.close()
        except Crash:
            end.vanish(self._faults.noticed_after)

    def _describe(self, node: Node) -> Callable[[], str]:
        def text() -> str:
            absent = "".join(f" ({node.name_of(r)} {how})" for r, how in node.gone.items())
            return f"{node.name} waits for {node.waiting or 'its turn'} at step {node.t}{absent}"

        return text
