"""Attending: a node that computes answers its peers all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from shoal.core.transport import Message

if TYPE_CHECKING:
    from shoal.engine.mailbox import Mailbox

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)

Handlers: TypeAlias = Mapping[str, Callable[[Message], Awaitable[None]]]
"""What to do about messages, by tag. A handler may send, and change what the gradient does not depend on."""

LOOK_SECONDS = 0.001
"""How often a node that waits for a message looks whether its gradient is there."""


class Underway(Protocol[Result]):
    """Work that another thread does."""

    def done(self) -> bool:
        """Whether it is finished; never waits."""
        ...

    def result(self) -> Result:
        """What came of it, or the exception that it raised."""
        ...


class Background(Protocol):
    """Starts work in another thread."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Underway[T]:
        """Begin it, and return at once."""
        ...


async def attentively(
    work: Coroutine[Any, Any, T],
    background: Background | None,
    mailbox: Mailbox,
    meanwhile: Handlers | None,
) -> T:
    """What the work gives, while messages are attended to; without a background, when it is done."""
    if meanwhile is None:
        return await work
    if background is None:
        result = await work
        await mailbox.attend(meanwhile, 0.0)
        return result
    job = background(work)
    while not job.done():
        await mailbox.attend(meanwhile, LOOK_SECONDS)
    return job.result()
