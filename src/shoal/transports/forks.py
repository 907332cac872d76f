"""Forks: closes this process's sockets and shared memory in every child that it forks.

Peers detect that a process died by its sockets closing. A forked child that kept copies would hide that.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closes(Protocol):
    """An object that holds an open file."""

    def close(self) -> None:
        """Close the file. Must neither block nor send anything to the other end."""
        ...


Thing = TypeVar("Thing", bound=Closes)

_registered: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_on_fork(thing: Thing) -> Thing:
    """Register `thing` and return it; a forked child closes its copy at once.

    O_CLOEXEC is not enough: it acts when a child calls exec, and DataLoader workers never do.
    """
    _registered.add(thing)
    return thing


def _close_copies() -> None:
    for thing in list(_registered):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_copies)
