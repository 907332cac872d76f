"""The kernel of virtual time: one heap of events drives all coroutines in one thread."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol

from shoal.core.errors import Deadlock

OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Objects that Python allocates between two garbage collections while a simulation runs."""


class Kernel:
    """A clock that jumps to the next event. Events of one instant happen in the order they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._running: list[Process] = []
        self._alive = 0

    @property
    def events(self) -> int:
        """Events that have happened."""
        return self._planned - len(self._heap)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan `action` for virtual second `time`, which must not be past."""
        self._planned += 1
        heappush(self._heap, (time, self._planned, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan `action` for `seconds` from now."""
        self.at(self.now + seconds, action)

    def expect(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan `action` for `seconds` from now, and keep `run` going until then even without processes."""
        self._alive += 1

        def act() -> None:
            self._one_less()
            action()

        self.after(seconds, act)

    def spawn(self, coroutine: Resumable, describe: Callable[[], str]) -> Process:
        """Start a coroutine at this instant. `describe` says what it waits for: the text of a Deadlock."""
        process = Process(coroutine, describe, self._one_less)
        self._running.append(process)
        self._alive += 1
        self.after(0.0, process.resume)
        return process

    def run(self) -> None:
        """Advance time until every process has ended.

        Raises what a process raises, and Deadlock if processes wait while no event is left.
        """
        heap = self._heap
        with rare_collections():
            while self._alive and heap:
                self.now, _, action = heappop(heap)
                action()
        stuck = [p for p in self._running if not p.ended]
        if stuck:
            raise Deadlock(self._explain(stuck))

    def close(self) -> None:
        """End the processes that are still alive, without resuming them."""
        for process in self._running:
            process.end()

    def _one_less(self) -> None:
        self._alive -= 1

    def _explain(self, stuck: list[Process]) -> str:
        shown = "; ".join(p.describe() for p in stuck[:8])
        more = f"; and {len(stuck) - 8} more" if len(stuck) > 8 else ""
        return f"nothing can happen any more at {self.now:g} s of virtual time: {shown}{more}."


class Resumable(Protocol):
    """A coroutine, or what stands for one."""

    def send(self, value: None, /) -> Any:
        """Run it until it next waits. Raises StopIteration at its end."""
        ...

    def close(self) -> None:
        """End it where it is."""
        ...


class Process:
    """A coroutine in virtual time."""

    __slots__ = ("_coroutine", "_on_end", "describe", "ended")

    def __init__(self, coroutine: Resumable, describe: Callable[[], str], on_end: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self.describe = describe
        self.ended = False

    def resume(self) -> None:
        """Run the coroutine until it next waits."""
        if self.ended:
            return
        try:
            self._coroutine.send(None)
        except StopIteration:
            self._end()
        except BaseException:
            self._end()
            raise

    def end(self) -> None:
        """End the coroutine where it is."""
        if not self.ended:
            self._end()
            self._coroutine.close()

    def _end(self) -> None:
        self.ended = True
        self._on_end()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make garbage collections rare: nodes live until the end, and each collection visits all of them."""
    often, *others = gc.get_threshold()
    gc.set_threshold(often and max(often, OBJECTS_BETWEEN_COLLECTIONS), *others)
    try:
        yield
    finally:
        gc.set_threshold(often, *others)


@types.coroutine
def suspended() -> Generator[None, None, None]:
    """Wait until someone calls `Process.resume`."""
    yield
