"""Coordinator: leads L-BFGS with small instructions, and hands out portions of the data. It has no vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isfinite

from shoal.engine.portions import Portions
from shoal.engine.protocol import Instruction
from shoal.lbfgs.minimizer import Measurement, Minimizer, TrialPoint
from shoal.lbfgs.operations import ClosePass, Dots, DropPass, EndTraining, OpenPass, Operation, encoded
from shoal.lbfgs.vector_shard import VectorShard
from shoal.vocabulary.bundle import CLAIM
from shoal.vocabulary.node import Node


class Coordinator:
    """Drives a Minimizer at the first server, whose own shard is `shard`.

    A pass has as many portions as all workers have batches in an epoch; a batch of the minimizer is one
    pass, or `portions` of it in turn.
    """

    def __init__(
        self,
        s: Node,
        shard: VectorShard,
        minimizer: Minimizer,
        *,
        portions: int | None,
        l2: float,
        lease: float,
    ) -> None:
        engine = s.engine
        me, steps, passes = engine.identity, engine.work.last_step or 0, engine.passes or 0
        self._node = s
        self._shard = shard
        self._others = me.server_ranks[1 : me.shards]
        self._minimizer = minimizer
        self._program = minimizer.program()
        self._l2 = l2
        self._whole = me.workers * (steps // passes) if passes else 0  # portions of the whole data
        self._size = min(portions or self._whole, self._whole)  # of a batch
        self._left = me.workers * steps  # portions that may still be handed out
        self._first = 0  # portion of the batch
        self._portions = Portions(me.workers, lease, engine.channel.now)
        engine.service.hand_out(self._portions)

    async def begin(self) -> None:
        """Ask for the first trial."""
        await self._lead(None)

    async def obey(self, m: Instruction) -> None:
        """Answer a worker's instruction, and go on with the program if that completes a pass."""
        kind, number, *rest = m.body.tolist()
        if kind == CLAIM:
            portion, bundle, loss, samples = rest
            said = self._portions.claim(m.src, int(number), int(portion), int(bundle), loss, samples)
        else:
            said = self._portions.deliver(m.src, int(number), int(rest[0]))
        self._node.engine.service.answer(m, said)
        if self._portions.is_complete:
            await self._lead(await self._measure())

    # -- inside --------------------------------------------------------------------------------

    async def _lead(self, answer: Measurement | list[float] | None) -> None:
        """Tell the program what it asked for, and have done what it asks for next.

        Returns when it wants a pass over the data, which workers do, or has ended.
        """
        try:
            while True:
                asked = self._program.send(answer)
                self._note_iterations()
                if not isinstance(asked, TrialPoint):
                    answer = await self._have_done(asked)
                elif self._left >= self._size > 0:
                    await self._open(asked)
                    return
                else:
                    await self._have_done(asked.before)
                    answer = None
        except StopIteration:
            self._note_iterations()
            await self._have_done([*self._minimizer.last_operations, EndTraining()])
            self._portions.end()

    async def _open(self, trial: TrialPoint) -> None:
        """Hand out the portions of a pass, once every shard has the point."""
        if trial.fresh:
            self._first = (self._first + self._size) % self._whole
        self._left -= self._size
        number = self._portions.number + 1
        await self._have_done([*trial.operations, OpenPass(number)])
        around = [*range(self._first, self._whole), *range(self._first)]
        self._portions.open(islice(around, self._size))

    async def _measure(self) -> Measurement:
        """Loss and gradient of the pass that is complete."""
        loss, samples = self._portions.loss, self._portions.samples
        if not isfinite(loss):
            await self._have_done([DropPass(samples)])
            return Measurement(loss)
        close = ClosePass(samples, self._portions.deliveries, self._l2)
        wanted = Dots((("new", "d"), ("new", "new"), ("new", "g"), ("point", "point")))
        slope, square, across, size = await self._have_done([close, wanted])
        return Measurement(loss + self._l2 / 2 * size, slope, square, across)

    async def _have_done(self, operations: Sequence[Operation]) -> list[float]:
        """Have all shards do these, and return the sums of what they answer."""
        asked = self._node.engine.client.instruct(self._others, encoded(operations))
        answers = [answer.tolist() for answer in await asked]
        return [sum(values) for values in zip(self._shard.run(operations), *answers, strict=True)]

    def _note_iterations(self) -> None:
        """Count iterations as the steps of this node, with their loss, for whoever watches."""
        engine = self._node.engine
        engine.meter.loss = self._minimizer.loss
        while engine.t < self._minimizer.iteration:
            engine.work.finish_step()
