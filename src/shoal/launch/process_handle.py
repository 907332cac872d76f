"""ProcessHandle: what a crew needs of a node's process, of whatever kind and on whichever host."""

from __future__ import annotations

from typing import Protocol


class ProcessHandle(Protocol):
    """A process of `multiprocessing`, of `subprocess`, or on another host."""

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        ...

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        ...

    def kill(self) -> None:
        """Send the process SIGKILL."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        ...

    def close(self) -> None:
        """Release the resources of a process that has ended."""
        ...
