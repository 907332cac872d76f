"""GroupPace: no process of a group goes on before all of them have ended the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica


class GroupPace:
    """Keeps the processes of one worker at the same step, where other workers may ask them for something.

    One that went on alone would wait for its group in the next forward pass, and answer nobody meanwhile. The
    rest of its group may wait for a worker which waits for that answer: for ever. `groups` are torch's, one
    for each dimension of the worker's mesh.
    """

    def __init__(self, engine: Engine, replica: AttachedReplica, groups: Sequence[Any]) -> None:
        self._rounds = engine.rounds
        self._replica = replica
        self._groups = groups

    def end_step(self) -> None:
        """Wait for the group, answering other workers; then go on with the same replicated values."""
        for group in self._groups if self._rounds.answers else ():
            all_came = dist.barrier(group=group, async_op=True)
            drive(self._rounds.answer_until(all_came.is_completed))
            all_came.wait()  # raises what went wrong
        self._replica.agree()
