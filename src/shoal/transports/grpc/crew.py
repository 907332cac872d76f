"""Crew: the threads that answer a hub's calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Crew:
    """What gRPC asks of a thread pool. Its threads start when they are needed, and are daemons.

    A ThreadPoolExecutor stops before exit handlers run, and a hub may still have to say goodbye in one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Have a thread do this."""
        future: Future[Any] = Future()
        self._tasks.put((future, work, args))
        if not self._idle.acquire(blocking=False):
            name = f"{self._name} {len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self) -> None:
        """Let the threads finish what they do, and go."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work, args = task
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, work, args  # an idle thread holds on to nothing
            self._idle.release()
