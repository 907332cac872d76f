"""Spares: processes that have loaded everything and wait to take the place of one that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeAlias

from shoal.launch.member import Member
from shoal.launch.process_handle import ProcessHandle

StartSpare: TypeAlias = Callable[[], tuple[ProcessHandle, Connection]]


class Spares:
    """So many processes in waiting. Each says when it is ready, and waits for the order to be somebody.

    `on_taken` is called with one that is, and its name.
    """

    def __init__(
        self,
        number: int = 0,
        start: StartSpare | None = None,
        on_taken: Callable[[ProcessHandle, str], None] = lambda process, name: None,
    ) -> None:
        self._number = number
        self._start = start
        self._on_taken = on_taken
        self._waiting: list[tuple[ProcessHandle, Connection]] = []

    def fill(self) -> None:
        """Start processes until there are as many as wanted."""
        while self._start is not None and len(self._waiting) < self._number:
            self._waiting.append(self._start())

    def take(self, name: str, number: int, incarnation: int) -> Member | None:
        """A spare, now the member of that number; None if none is ready. Another is started in its place."""
        for spare in self._waiting:
            process, connection = spare
            if not connection.poll():
                continue
            self._waiting.remove(spare)
            try:
                connection.recv_bytes()  # it is ready
                order = {"order": "become", "number": number, "incarnation": incarnation}
                connection.send_bytes(json.dumps(order).encode())
            except (OSError, EOFError):  # it has died while it waited
                _end(process, connection)
                return self.take(name, number, incarnation)
            self.fill()
            self._on_taken(process, name)
            return Member(number, name, process, connection, incarnation)
        self.fill()
        return None

    def end_all(self) -> None:
        """Kill those that wait."""
        while self._waiting:
            _end(*self._waiting.pop())


def _end(process: ProcessHandle, connection: Connection) -> None:
    process.kill()
    process.join()
    process.close()
    connection.close()
