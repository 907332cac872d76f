"""OwnPlace: where the loop of a worker goes on that was started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from shoal.api.agreement import as_sent, how_it_came, take_start
from shoal.api.loop_data import LoopData
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.protocol import BatchesRead, Look, Where
from shoal.engine.reached import UNKNOWN
from shoal.launch.control import Control
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica


async def find_place(engine: Engine, replica: AttachedReplica, control: Control) -> None:
    """Go on where this worker's predecessor was, as the first server knows it.

    What that had not pushed yet is done again. Tensors that are not trained are those that worker 0 began
    with. Raises RunIsOver where nobody knows the place.
    """
    clock, batches, beside = (await _answer(engine, Where())).tolist()
    if batches == UNKNOWN:
        leave_unknown(engine, control, "its loop has left a pass over its data before the end")
    engine.progress.go_to(clock)
    engine.meter.steps = clock
    replica.passes.skip(batches)
    untrained = replica.untrained
    if len(untrained) > beside:
        control.announce(
            f"{engine.name} was started again, and a server before it: frozen parameters and buffers of "
            f"{engine.name} are as its script has made them"
        )
    with torch.no_grad():
        for number, mine in enumerate(untrained[:beside], start=1):
            take_start(engine.identity, mine, await _answer(engine, Look(count=float(number))))


def leave_unknown(engine: Engine, control: Control, why: str) -> NoReturn:
    """Say why this worker cannot go on, and raise RunIsOver."""
    control.announce(
        f"{engine.name} was started again and leaves, because {why}: nobody knows which batches it has done. "
        "The others go on"
    )
    raise RunIsOver


class LoopAmongPeers:
    """The loop of a worker without a server, for one that is back to find its place in."""

    def __init__(self, engine: Engine, replica: AttachedReplica, control: Control) -> None:
        self._engine = engine
        self._replica = replica
        self._control = control

    def beside(self) -> Sequence[Tensor]:
        """Frozen parameters and buffers."""
        return [as_sent(tensor) for tensor in self._replica.untrained]

    def go_on(self, batches: int, beside: Sequence[Tensor]) -> None:
        """Leave out what this worker's predecessor has done. Raises RunIsOver where that is not known."""
        if batches == UNKNOWN:
            why = "its steps take several batches, or it has left a pass over its data before the end"
            leave_unknown(self._engine, self._control, why)
        self._replica.passes.skip(batches)
        with torch.no_grad():
            for mine, theirs in zip(self._replica.untrained, beside, strict=True):
                take_start(self._engine.identity, mine, theirs)


async def _answer(engine: Engine, m: Message) -> torch.Tensor:
    question = await engine.mailbox.ask(engine.identity.workers, m)
    return (await engine.mailbox.answer(question)).body


def describe_undone(engine: Engine) -> str | None:
    """At the end of the first server's run: what of lost workers nobody has done, if they were awaited."""
    me, reached = engine.identity, engine.service.reached
    if not (reached.undone and reached.awaits_seconds):
        return None
    lost = [f"{me.name_of(rank)} from its step {reached.clock(rank)} on" for rank in reached.undone]
    names = " and ".join(lost)
    return f"nobody has done what was left of the data of {names}: it did not come back in time"


class OwnPlace:
    """Whether a loop goes on where it should, and what others must know for its successor to do so.

    `leave` has this worker leave the run.
    """

    def __init__(
        self,
        engine: Engine,
        replica: AttachedReplica,
        data: LoopData,
        control: Control,
        leave: Callable[[], None],
    ) -> None:
        self.is_back = engine.incarnation > 0  # and has taken no step yet
        self._began = 0  # how many steps of this worker its predecessor had done
        self.was_asked = False  # for the step to go on at
        self._engine = engine
        self._data = data
        self._control = control
        self._leave = leave
        self._read = 0  # batches, before the present step
        self._tells = False  # since a step has taken another number of batches than one
        self._left_before: set[int] | None = None  # workers that had left before this loop ended
        engine.returns.loop = LoopAmongPeers(engine, replica, control)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that are there, where no average says who is."""
        return not self.is_back and all(map(self._is_gone, range(self._engine.rank)))

    @property
    def part_done(self) -> float:
        """Which part of this worker's steps this process has done: the rest was its predecessor's."""
        return 1.0 - self._began / self._own_steps if self._began else 1.0

    @property
    def _own_steps(self) -> int:
        """The steps of this worker's share: one that was back among peers is in a later round."""
        return self._engine.t - self._engine.rounds.shift

    def start(self, resumed_from: int | None) -> int | None:
        """The strategy has begun: at which step the loop goes on if it does not begin with the first."""
        self._read = self._data.passes.behind
        if self._read and self._read != self._own_steps:
            drive(self._tell_others())
        if not self.is_back:
            return None if resumed_from is None else self._own_steps
        self._began = self._own_steps
        return self._began

    def _is_gone(self, rank: int) -> bool:
        """Whether a worker was lost or, where there is a server, has left before the end."""
        mailbox, servers = self._engine.mailbox, self._engine.identity.servers
        early = mailbox.has_left(rank) if self._left_before is None else rank in self._left_before
        return mailbox.has_lost(rank) or (servers > 0 and early)

    def end_loop(self) -> None:
        """The loop has ended, with or without a step of this process."""
        self.is_back = False
        if self._left_before is None:
            self._left_before = set(filter(self._engine.mailbox.has_left, range(self._engine.rank)))

    def check(self) -> None:
        """Before the first step of a worker that is back: raise an error if its loop began anew.

        That is a ValueError where workers average, else RunIsOver: then the others go on without it.
        """
        self.is_back, engine = False, self._engine
        if self.was_asked or self._data.has_begun or not engine.t:
            return
        came = f"{engine.name} {how_it_came(engine.identity, engine.rank)}"
        advice = "Read the data through shoal.shard(loader), or begin with step training.resumed_from"
        if engine.membership is not None:
            raise ValueError(
                f"{came} while the others are before step {engine.t}, and its loop would do its first steps "
                f"again. {advice}"
            )
        self._control.announce(
            f"{came} at step {self._own_steps} and leaves, because its loop would do its first steps again; "
            f"the others go on. {advice}"
        )
        self._leave()
        raise RunIsOver

    async def note_step(self) -> None:
        """Before a step: have those know how far the loop has read who tell a successor, if needed."""
        passes, engine = self._data.passes, self._engine
        batches = UNKNOWN if passes.leaves_early else passes.batches
        begins = not self._tells
        self._tells = self._tells or (self._data.has_begun and batches != self._own_steps + 1)
        if self._tells and engine.identity.servers:
            first, clock = engine.identity.workers, engine.t
            await engine.channel.send(first, BatchesRead(seq=batches, clock=clock))
        elif self._tells and engine.returns.share is not None:
            if begins:
                await self._tell_others()
            await engine.returns.tell_batches(batches, self._own_steps + 1)
        self._read = batches

    async def _tell_others(self) -> None:
        """Have workers without a server know how far the loop has read for the steps that are done."""
        if self._engine.returns.share is not None:
            await self._engine.returns.tell_batches(self._read, self._own_steps)
