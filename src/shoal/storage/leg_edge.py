"""LegEdge: what the nodes of one leg of a run leave for those of the next, when its crew grows.

    DIR/leg-1/edge/step-00000500/worker-0.safetensors, worker-0.json, …     as a checkpoint

The nodes write to `edge.part`; the launcher renames it when the last one is done, so an edge is there whole
or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointError
from shoal.core.identity import NodeIdentity
from shoal.engine.engine import Engine
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.whole_files import sync_folder

EDGE, UNSEALED = "edge", "edge.part"


class LegEdge:
    """The edge at the end of the leg whose files are in `folder`, before `step`.

    `config` is what must be the same for a run to be resumed.
    """

    def __init__(self, folder: str | Path, step: int, config: Mapping[str, Any]) -> None:
        self._folder, self._step, self._config = Path(folder), step, config

    @property
    def is_sealed(self) -> bool:
        """Whether every node has left its state there."""
        return (self._folder / EDGE).is_dir()

    def leave(self, engine: Engine) -> None:
        """Write what this node hands over, after its strategy's `finish`."""
        self._files(UNSEALED).write(self._step, engine.identity, engine.hand_over())

    def seal(self) -> None:
        """All nodes are done."""
        (self._folder / UNSEALED).replace(self._folder / EDGE)
        sync_folder(self._folder)

    def check(self) -> None:
        """Raise CheckpointError if the edge is that of a run with other settings."""
        self._files(EDGE).check()

    def enter(self, engine: Engine) -> None:
        """Have a node of the next leg go on from here; every node begins with the same model.

        One that was not there, or was killed, takes over from the first worker that came to the end.
        """
        files, me = self._files(EDGE), engine.identity
        workers = (files.find(self._step, NodeIdentity(rank, me.workers)) for rank in range(me.workers))
        first = next((left for left in workers if left is not None), None)
        own = files.find(self._step, me)
        if first is None or (own is None and me.is_server):
            raise CheckpointError(f"what {engine.name} goes on from in {self._folder} is missing or damaged")
        left = first if own is None else own
        x = first["x"][me.own_slice(first["x"].numel())] if me.is_server else first["x"]
        engine.take_over({**left, "x": x}, self._step, own=own is not None)

    def _files(self, name: str) -> Checkpoints:
        return Checkpoints(self._folder / name, self._config, processes=1)
