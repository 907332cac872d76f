"""BetweenSteps: writes the checkpoint that is due, and stops where the launcher asks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.core.errors import Interrupted
from shoal.engine.engine import Engine
from shoal.engine.protocol import Checkpointed
from shoal.launch.control import Control
from shoal.storage.checkpoint import Checkpoints

LOOK_SECONDS = 0.02
"""How often a paused node, which answers others meanwhile, looks for an order."""


class BetweenSteps:
    """Saves and stops. `model` gives the weights to save as well, at the node that holds them, else None."""

    def __init__(
        self,
        control: Control,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        model: Callable[[Engine], Mapping[str, Tensor] | None] = lambda engine: None,
    ) -> None:
        self._control = control
        self._checkpoints = checkpoints
        self._every = every
        self._model = model
        self._run_to: int | None = None
        self._final = False
        self._resumed_at: int | None = None

    def resume(self, engine: Engine) -> int | None:
        """Put the node where the newest checkpoint left it; its step, or None if there is none."""
        if self._checkpoints is None:
            return None
        step = self._checkpoints.latest()
        if step is not None:
            self._checkpoints.load(step, engine)
            engine.service.resume()
            self._resumed_at = step
        return step

    async def __call__(self, engine: Engine) -> None:
        """Raises Interrupted at the step where all were told to stop, after saving."""
        if engine.is_server:
            self._save(engine)
            return
        stopping = await self._stops_here(engine)
        t, work = engine.progress.t, engine.work
        at_end = t == work.last_step
        due = at_end or (self._every is not None and t % self._every == 0)
        due = due and t not in (0, self._resumed_at) and not work.is_helping
        due = due and not (at_end and work.may_help)  # batches that it takes over belong into it
        if self._checkpoints is not None and (due or stopping):
            self._save(engine)
            for server in engine.identity.server_ranks:
                await engine.channel.send(server, Checkpointed(seq=t))
        if stopping:
            raise Interrupted(f"stopped before step {t}")

    async def _stops_here(self, engine: Engine) -> bool:
        """Pause when the launcher asks to stop, until it knows where all can; whether that is here."""
        order, t = self._control.heard(), engine.progress.t
        if order is not None and order["order"] == "stop":
            if self._checkpoints is None and engine.identity.servers:
                return True  # there is nothing to save, and servers go on without those who leave
            self._run_to, self._final = t, False
        if engine.work.is_last(t - 1):
            self._control.tell("idle")  # it may wait long for others now, and could not pause
            return False
        while t == self._run_to and not self._final:
            self._control.tell("paused", step=t)
            order = await self._next_order(engine)
            self._run_to, self._final = order["step"], order["final"]
        return t == self._run_to

    async def _next_order(self, engine: Engine) -> dict[str, Any]:
        """What the launcher says next; questions of others are answered while it is silent."""
        while engine.rounds.answers:
            if (order := self._control.heard()) is not None:
                return order
            await engine.mailbox.attend(engine.rounds.answers, LOOK_SECONDS)
        return self._control.await_order()

    def _save(self, engine: Engine) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(engine, self._model(engine))
