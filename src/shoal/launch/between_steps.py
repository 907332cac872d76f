"""BetweenSteps: writes checkpoints when they are due, and stops the node at the step the launcher chooses."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import CheckpointError, Interrupted
from shoal.core.identity import NodeIdentity
from shoal.core.state_tree import harvest, plant
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.engine.protocol import Checkpointed, ResumesFrom
from shoal.launch.control import Control
from shoal.storage.changed_crew import ChangedCrew
from shoal.storage.checkpoint import NO_STEP, Checkpoints

ATTEMPT = "attempt"

LOOK_SECONDS = 0.02
"""How often a paused node, which keeps answering its peers, checks for an order."""


class BetweenSteps:
    """Saves checkpoints and stops the node.

    `every` is the number of steps between two checkpoints. `model` returns the weights to save beside the
    node's state, or None at a node that does not hold all of them. `in_group` tells the other processes of
    this node, if it has several, a step, and returns those of all. `begin` is the first step, which needs no
    checkpoint. `solution` finds the common model at a worker, for one that begins with that of another.
    `may_deal` says whether the rest of the data can be dealt to others.
    """

    def __init__(
        self,
        control: Control,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        model: Callable[[Engine], Mapping[str, Tensor] | None] = lambda engine: None,
        in_group: Callable[[int], Sequence[int]] | None = None,
        begin: int = 0,
        solution: Callable[[Engine], Tensor] = lambda engine: engine.x,
        may_deal: Callable[[], bool] = lambda: True,
    ) -> None:
        self._control = control
        self._checkpoints = checkpoints
        self._every = every
        self._model = model
        self._in_group = in_group
        self._begin = begin
        self._solution = solution
        self._may_deal = may_deal
        self._run_to: int | None = None
        self._final = False
        self._resumed_at: int | None = None

    async def resume(self, engine: Engine) -> int | None:
        """Load the newest checkpoint that all nodes can read, each its own files.

        Waits for all nodes. Returns the step, or None if there is no checkpoint.
        """
        if self._checkpoints is None:
            return None
        self._checkpoints.check()
        step = await self._common_step(self._checkpoints, engine)
        self._checkpoints.attempt.begin(await self._common_mark(engine))
        self._set_aside(self._checkpoints, step, [engine])
        resumed = self._load(self._checkpoints, step, engine)
        if resumed is not None:
            await _tell_end(engine)
        engine.meter.reset()  # do not count the messages so far
        engine.meter.steps = engine.progress.t
        return resumed

    async def _common_step(self, checkpoints: Checkpoints, engine: Engine) -> int:
        """The newest step that all processes of all nodes can read; NO_STEP if there is none."""
        limit = None
        while True:
            step = await _agreed_step(checkpoints, engine, limit)
            steps = [step] if self._in_group is None else self._in_group(step)
            if min(steps) == max(steps):
                return step
            limit = min(steps)

    async def _common_mark(self, engine: Engine) -> str:
        """A mark of this attempt, which worker 0 draws for all."""
        mark = await _told_by_first(engine, secrets.randbits(32))
        return f"{mark if self._in_group is None else min(self._in_group(mark)):08x}"

    def resume_all(self, engines: Sequence[Engine]) -> None:
        """The same for all nodes of a simulation, before it runs."""
        if self._checkpoints is not None:
            self._checkpoints.check()
            there = [engine for engine in engines if _is_there_first(engine.identity)]
            step = self._checkpoints.latest(engine.identity for engine in there)
            self._checkpoints.attempt.begin(f"{secrets.randbits(32):08x}")
            self._set_aside(self._checkpoints, step, there)
            for engine in there:
                self._load(self._checkpoints, step, engine)
            if step != NO_STEP and (end := engines[0].work.last_step) is not None:
                for engine in engines:
                    engine.service.lengthen(end)

    async def __call__(self, engine: Engine) -> None:
        """Save a checkpoint if one is due. Raises Interrupted, after saving, at the step where all stop."""
        if engine.is_server:
            is_full = len(engine.members) == engine.identity.workers
            if is_full or not (self._checkpoints and self._checkpoints.is_bound):
                self._save(engine)  # else nobody could go on from it
            return
        stopping = await self._stops_here(engine)
        t, work = engine.progress.t, engine.work
        at_end = t == work.last_step and not work.is_ahead
        due = at_end or (self._every is not None and t % self._every == 0)
        due = due and t not in (self._begin, self._resumed_at) and not work.is_helping
        due = due and not (at_end and work.may_help)  # the checkpoint must include batches it takes over
        if self._checkpoints is not None and (due or stopping) and self._may_count(engine):
            me = engine.identity
            if not (me.incarnation and me.servers and self._checkpoints.has(t, me)):
                self._save(engine)  # else it would replace what a server has saved with, before a death
            for server in engine.identity.server_ranks:
                await engine.channel.send(server, Checkpointed(seq=t))
        if stopping:
            raise Interrupted(f"stopped before step {t}")

    def _may_count(self, engine: Engine) -> bool:
        """Whether anybody could go on from what is saved now: a loop of the user's needs all workers."""
        me = engine.identity
        if me.servers or self._checkpoints is None:
            return True
        if not self._checkpoints.is_bound and self._may_deal():
            return True
        away = sorted(set(me.first_workers) - set(engine.members))
        lost = [k for k in away if engine.membership is not None or engine.mailbox.has_lost(k)]
        if lost:
            names = " and ".join(map(me.name_of, lost))
            self._control.announce(f"no checkpoint is written while {names} is away")
        return not away

    async def _stops_here(self, engine: Engine) -> bool:
        """Whether this node stops here. After the order to stop, pauses until the launcher knows the step."""
        t = engine.progress.t
        order = self._control.heard(t)
        if order is not None and order["order"] == "run to":
            self._run_to, self._final = order["step"], order["final"]
        elif order is not None and order["order"] == "stop":
            if self._checkpoints is None and self._in_group is None and engine.identity.servers:
                return True  # there is nothing to save, and servers continue when workers leave
            self._run_to, self._final = t, False
        if engine.work.is_last(t - 1):
            self._control.tell("idle")  # from here on it may block on other workers, and could not pause
            return False
        while self._is_there(t) and not self._final:
            self._control.tell("paused", step=t)
            order = await self._next_order(engine)
            self._run_to, self._final = order["step"], order["final"]
        return self._is_there(t)

    def _is_there(self, t: int) -> bool:
        """Whether this node has come to the step to run to. Where workers come and go, it may be past it."""
        return self._run_to is not None and t >= self._run_to

    async def _next_order(self, engine: Engine) -> dict[str, Any]:
        """Wait for the launcher's next order, and answer the requests of other nodes meanwhile."""
        while engine.rounds.answers:
            if (order := self._control.heard(engine.progress.t)) is not None:
                return order
            await engine.mailbox.attend(engine.rounds.answers, LOOK_SECONDS)
        return self._control.await_order()

    def _save(self, engine: Engine) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(engine, self._model(engine))
            self._control.tell("saved", step=engine.progress.t)

    def _set_aside(self, checkpoints: Checkpoints, step: int, engines: Sequence[Engine]) -> None:
        """Have what earlier attempts saved after this step not be mixed with what this one saves there."""
        moved = [checkpoints.set_aside_after(step, engine.identity) for engine in engines]
        if aside := sorted({*chain(*moved)}):
            self._control.announce(_has_moved(step, checkpoints.folder, aside))

    def _load(self, checkpoints: Checkpoints, step: int, engine: Engine) -> int | None:
        if step == NO_STEP:
            return None
        me = engine.identity
        crew = checkpoints.crew_at(step, me)
        places: list[int] = []
        if crew is None or crew.is_that_of(me):
            checkpoints.load(step, engine)
            if crew is not None and crew.places:
                places = (
                    crew.places
                )  # of a user's loop: one that was back may be some rounds ahead of its own
                engine.rounds.shift = step - places[me.rank]
        else:
            ChangedCrew(checkpoints, step, crew, me).enter(engine, self._solution)
            if me.rank == 0:
                self._control.announce(crew.describe_change(step, me))
        engine.service.resume()
        for rank in range(me.workers):
            engine.progress.note_place(rank, places[rank] if places else step)
        self._resumed_at = step
        self._control.tell("saved", step=step)
        if me.rank == 0 and engine.membership is None and (deal := engine.deal()) is not None:
            self._control.tell("dealt", deal=_as_json(deal))
        return step

    def begin_at(self, step: int) -> None:
        """The loop of a worker that was started again goes on here: its predecessor has saved this step."""
        self._begin = step

    def rejoin(self, engine: Engine, deal: Any) -> None:
        """Have a worker that was started again know how the data is dealt, if the run was resumed."""
        if deal is not None and not engine.is_server and engine.membership is None:
            engine.go_by(_from_json(deal))


def _is_there_first(me: NodeIdentity) -> bool:
    """Whether the run begins with this node."""
    return me.is_server or me.rank in me.first_workers


def _as_json(deal: dict[str, Any]) -> Any:
    """A deal, whose tensors are numbers of samples, for the launcher."""
    tensors: dict[str, Tensor] = {}
    tree = plant(deal, tensors, "deal")
    return [tree, {name: tensor.tolist() for name, tensor in tensors.items()}]


def _from_json(told: Any) -> dict[str, Any]:
    """The deal of which `_as_json` was told."""
    tree, samples = told
    tensors = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in samples.items()}
    deal: dict[str, Any] = harvest(tree, tensors)
    return deal


def _has_moved(step: int, folder: Path, aside: Sequence[Path]) -> str:
    where = f"{' and '.join(map(str, aside))}, until this run has saved two steps"
    if step != NO_STEP:
        return f"resuming step {step}; what was saved after it cannot be resumed, and is now in {where}"
    return (
        f"not all nodes can resume from the checkpoint in {folder}: the run starts from the beginning. The "
        f"checkpoint is now in {where}. To resume from it, stop, move it back, and bring the files of every "
        "node to its host."
    )


async def _tell_end(engine: Engine) -> None:
    """Have the servers know how many steps a worker takes, which follows from how the data was dealt."""
    me, end = engine.identity, engine.work.last_step
    if end is None or (me.rank and not me.is_server):
        return
    if me.is_server:
        engine.service.lengthen((await engine.mailbox.find("resumes", 0)).seq)
    else:
        for rank in me.server_ranks:
            await engine.channel.send(rank, ResumesFrom(seq=end))


async def _agreed_step(checkpoints: Checkpoints, engine: Engine, limit: int | None = None) -> int:
    """The newest step, up to `limit`, that all nodes can read; NO_STEP if there is none.

    Every node names the newest it can read. While they differ, nobody goes on from a newer one than the
    lowest, so each names another; most often the first answers are the same.
    """
    me = engine.identity
    while True:
        own = checkpoints.newest(me, limit)
        crew = None if own == NO_STEP else checkpoints.crew_at(own, me)
        is_changed = crew is not None and not crew.is_that_of(me)
        answer = await _compared(engine, own, is_changed)
        if answer.count and answer.version and not is_changed:
            raise CheckpointError(
                f"step {own} in {checkpoints.folder} was written after a worker had died, and {engine.name} "
                "does not find the files of all nodes there; take a folder that all hosts can reach"
            )
        if answer.count:
            return own
        limit = answer.seq


async def _told_by_first(engine: Engine, number: int) -> int:
    """The number that worker 0 tells all nodes that are there at first."""
    me = engine.identity
    if me.rank:
        return int((await engine.mailbox.find(ATTEMPT, 0)).body[0])
    for rank in me.others_at_first:
        await engine.channel.send(rank, Message(ATTEMPT, (torch.tensor([number]),)))
    return number


async def _compared(engine: Engine, own: int, is_changed: bool) -> Message:
    """Worker 0's answer when all nodes have named a step; its version says if other nodes had written it."""
    me, channel, mailbox = engine.identity, engine.channel, engine.mailbox
    if me.rank:
        await channel.send(0, ResumesFrom(seq=own, version=int(is_changed)))
        return await mailbox.find("resumes", 0)
    others = me.others_at_first
    heard = [await mailbox.find("resumes", rank) for rank in others]
    steps, changed = [own, *[m.seq for m in heard]], [int(is_changed), *[m.version for m in heard]]
    answer = ResumesFrom(seq=min(steps), count=float(min(steps) == max(steps)), version=max(changed))
    for rank in others:
        await channel.send(rank, answer)
    return answer
