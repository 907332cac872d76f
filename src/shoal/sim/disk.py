"""Disk: a server's log in virtual time. A crash loses the messages that were not synced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.core.transport import Message
from shoal.sim.faults import Crash

POINTS = ("append", "appended", "sync", "synced", "snapshot", "snapshotted")
"""The points at which a crash can be planned: before and after each operation of the log."""


class Disk:
    """Keeps messages and snapshots.

    `crashes` holds pairs (point, n): the server crashes when it reaches that point after n earlier passes.
    `snapshot_every` is the number of messages after which a snapshot is due.
    """

    replaced: tuple[str, ...] = ("_snapshot", "_safe", "_unsafe", "_since_snapshot")
    """What a snapshot replaces."""

    def __init__(
        self,
        *,
        keeps_every_update: bool = True,
        snapshot_every: int = 8,
        crashes: Iterable[tuple[str, int]] = (),
    ) -> None:
        self.keeps_every_update = keeps_every_update
        self._every = snapshot_every
        self._crashes = set(crashes)
        self._passed = dict.fromkeys(POINTS, 0)
        self._snapshot: dict[str, Any] | None = None
        self._safe: list[Message] = []
        self._unsafe: list[Message] = []
        self._since_snapshot = 0
        self.write: Callable[[], tuple[bool, bool]] = _at_once  # was it busy with an earlier one; is it now?
        self._before: dict[str, Any] = {}  # what is there as long as a snapshot is being written

    def append(self, m: Message) -> None:
        self._pass("append")
        self._since_snapshot += 1
        if self.keeps_every_update:
            self._unsafe.append(replace(m, parts=tuple(p.clone() for p in m.parts)))
        self._pass("appended")

    def sync(self) -> None:
        self._pass("sync")
        self._safe += self._unsafe
        self._unsafe = []
        if not all(self.write()):
            self._before = {}
        self._pass("synced")

    def snapshot_is_due(self) -> bool:
        return self._since_snapshot >= self._every

    def snapshot(self, state: dict[str, Any]) -> None:
        self._pass("snapshot")
        before = {name: getattr(self, name) for name in self.replaced}
        self._snapshot = _copy(state)
        self._safe, self._unsafe = [], []
        self._since_snapshot = 0
        was_busy, is_busy = self.write()
        earlier = self._before if was_busy else {}
        self._before = (earlier or before) if is_busy else {}
        self._pass("snapshotted")

    def recover(self) -> tuple[dict[str, Any] | None, Iterable[Message]]:
        return _copy(self._snapshot), [replace(m) for m in self._safe]

    def close(self) -> None:
        """Do nothing: no file is open."""

    def drop_unsynced(self) -> None:
        """Lose the unsynced messages, as in a crash of the host: a crash of the process loses no more."""
        self._unsafe = []
        self._since_snapshot = len(self._safe)

    def undo_snapshot(self) -> None:
        """The node was killed while its disk was slow: if it wrote a snapshot, there is the one before."""
        self.__dict__.update(self._before)

    def _pass(self, point: str) -> None:
        here = (point, self._passed[point])
        self._passed[point] += 1
        if here in self._crashes:
            raise Crash


def _at_once() -> tuple[bool, bool]:
    """No disk is slow."""
    return False, False


def _copy(value: Any) -> Any:
    """Copy nested dicts and lists of plain values and tensors. Much faster than deepcopy."""
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value
