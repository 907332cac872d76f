"""Log: what outlives a server's process, so that its successor goes on where it was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core.transport import Message


class Log(Protocol):
    """A snapshot of the server's state and, where every update is to be kept, the messages since."""

    @property
    def keeps_every_update(self) -> bool:
        """Whether messages are kept too. Else what came after the last snapshot is lost with the process."""
        ...

    def append(self, m: Message) -> None:
        """Add a message, as it arrived, to those since the snapshot."""
        ...

    def sync(self) -> None:
        """Return when everything appended would survive a crash."""
        ...

    def snapshot_is_due(self) -> bool:
        """Whether it is time for a snapshot."""
        ...

    def snapshot(self, state: dict[str, Any]) -> None:
        """Keep this state instead of what was there before."""
        ...

    def recover(self) -> tuple[dict[str, Any] | None, Iterable[Message]]:
        """The newest whole snapshot, if any, and the whole messages after it, in order."""
        ...

    def close(self) -> None:
        """Let go of what is held open: nothing more comes."""
        ...


@dataclass(frozen=True)
class Keeping:
    """How a server keeps its whole node: what a snapshot holds, and what a checkpoint of all nodes does."""

    state: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]
    checkpoint: Callable[[], Awaitable[None]] | None = None
    log: Log | None = None


def describe_return(log: Log, name: str, version: int) -> str:
    """What is said when a server goes on from its predecessor's log."""
    lost = "nothing" if log.keeps_every_update else "every update after that one"
    return f"{name} died and came back at version {version}; {lost} was lost"
