"""Underway: work in another thread or process. The node handles messages until that is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from shoal.engine.mailbox import Mailbox
from shoal.engine.protocol import Handlers

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)

LOOK_SECONDS = 0.001
"""How often a node that waits for a message looks whether the work is done."""


class Underway(Protocol[Result]):
    """Work in another thread."""

    def done(self) -> bool:
        """Whether it is finished; never waits."""
        ...

    def result(self) -> Result:
        """Its result, or the exception that it raised."""
        ...


class Background(Protocol):
    """Starts work in another thread."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Underway[T]:
        """Begin it, and return at once."""
        ...


async def attend_until(is_done: Callable[[], bool], mailbox: Mailbox, handlers: Handlers) -> None:
    """Hand the messages that arrive to these handlers until the work is done."""
    while not is_done():
        await mailbox.attend(handlers, LOOK_SECONDS)
