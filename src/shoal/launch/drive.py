"""Driving a coroutine whose awaits block instead of suspending: no event loop is needed."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a real transport to its end."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError(
        "a verb suspended although its transport blocks; only virtual time and attach() suspend"
    )
