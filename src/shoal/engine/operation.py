"""Operation: a verb that may take its time. Await it to do all of it, or begin it now and await it later."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Completion: TypeAlias = Callable[[], Coroutine[Any, Any, T]]


class Operation(Generic[T]):
    """What `push`, `pull` and `mean` return.

    `start` does the first half and returns the second. `whole`, where it is given, does both at once in a
    cheaper way. Await an operation once.
    """

    __slots__ = ("_complete", "_start", "_whole")

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, Completion[T]]],
        whole: Callable[[], Coroutine[Any, Any, T]] | None = None,
    ) -> None:
        self._start = start
        self._whole = whole
        self._complete: Completion[T] | None = None

    async def begin(self) -> None:
        """Do the first half now."""
        self._complete = await self._start()

    def __await__(self) -> Generator[Any, Any, T]:
        if self._complete is not None:
            return self._complete().__await__()
        if self._whole is not None:
            return self._whole().__await__()
        return self._both().__await__()

    async def _both(self) -> T:
        return await (await self._start())()
