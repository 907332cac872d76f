"""Forks: what a forked child must not keep, for others notice by its closing that this process is gone."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closes(Protocol):
    """Something that holds an open file."""

    def close(self) -> None:
        """Close it. Must not wait, nor say anything to the other end."""
        ...


Thing = TypeVar("Thing", bound=Closes)

_owned: weakref.WeakSet[Closes] = weakref.WeakSet()


def own(thing: Thing) -> Thing:
    """The same thing; whoever this process forks closes its copy of it at once.

    That files close when a child runs another program is not enough: the workers of a DataLoader run none.
    """
    _owned.add(thing)
    return thing


def _close_copies() -> None:
    for thing in list(_owned):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_copies)
