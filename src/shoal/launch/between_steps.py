"""Boundary: what happens between two steps, when a checkpoint is due or the launcher asks to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.core.errors import Interrupted
from shoal.core.transport import Message
from shoal.engine.service import CHECKPOINT
from shoal.launch.control import Control
from shoal.storage.checkpoint import Checkpoints
from shoal.vocabulary.node import Node

LOOK_SECONDS = 0.02
"""How often a node that pauses, and answers others meanwhile, looks for an order."""


class Boundary:
    """Saves and stops. `model` gives the weights to save as well, at the node that holds them, else None."""

    def __init__(
        self,
        control: Control,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        model: Callable[[Node], Mapping[str, Tensor] | None] = lambda node: None,
    ) -> None:
        self._control = control
        self._checkpoints = checkpoints
        self._every = every
        self._model = model
        self._run_to: int | None = None
        self._final = False
        self._resumed_at: int | None = None

    def resume(self, node: Node) -> int | None:
        """Put `node` where the newest checkpoint left it; the step, or None where there is no checkpoint."""
        if self._checkpoints is None:
            return None
        step = self._checkpoints.latest()
        if step is not None:
            self._checkpoints.load(step, node)
            node.service.resume()
            self._resumed_at = step
        return step

    async def __call__(self, node: Node) -> None:
        """Raises Interrupted at the step where all were told to stop, after saving."""
        if node.is_server:
            self._save(node)
            return
        stopping = await self._stops_here(node)
        at_end = node.t == node.last_step
        due = at_end or (self._every is not None and node.t % self._every == 0)
        due = due and node.t not in (0, self._resumed_at) and not node.peers.helping.is_helping
        due = due and not (at_end and node.peers.may_help)  # what it takes over is to be in it
        if self._checkpoints is not None and (due or stopping):
            self._save(node)
            for server in range(node.size, node.size + node.servers * node.shards):
                await node.send(server, Message(CHECKPOINT, seq=node.t))
        if stopping:
            raise Interrupted(f"stopped before step {node.t}")

    async def _stops_here(self, node: Node) -> bool:
        """Pause when the launcher asks to stop, until it knows where all can; whether that is here."""
        order = self._control.heard()
        if order is not None and order["order"] == "stop":
            if self._checkpoints is None and node.servers:
                return True  # there is nothing to save, and servers do without those who leave
            self._run_to, self._final = node.t, False
        if node.is_last(node.t - 1):
            self._control.tell("idle")  # it may wait long for others now, and could not pause
            return False
        while node.t == self._run_to and not self._final:
            self._control.tell("paused", step=node.t)
            order = await self._next_order(node)
            self._run_to, self._final = order["step"], order["final"]
        return node.t == self._run_to

    async def _next_order(self, node: Node) -> dict[str, Any]:
        """What the launcher says next; questions of others are answered while it is silent."""
        while node.peers.answers:
            if (order := self._control.heard()) is not None:
                return order
            await node.mailbox.attend(node.peers.answers, LOOK_SECONDS)
        return self._control.await_order()

    def _save(self, node: Node) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(node, self._model(node))
