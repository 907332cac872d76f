"""drive: runs a coroutine on a transport whose awaits block instead of suspending, without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Raises RuntimeError if it suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError(
        "a verb suspended although its transport blocks; only virtual time and attach() suspend"
    )
