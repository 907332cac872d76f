"""Audience: whoever listens to the progress of a run."""

from __future__ import annotations

from typing import Any

from shoal.launch.crew import Listener

NEWS = ("fault", "lost", "test_accuracy")
"""Fields that an event has only when something happened, once."""


class Audience:
    """Passes the nodes' progress to a listener, if there is one, and at the end that of the evaluation."""

    def __init__(self, listener: Listener | None) -> None:
        self.workers_to_come = 0  # where the crew grows: servers have the ranks after all workers
        self._listener = listener
        self._last: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        """Pass on a progress event of a node."""
        if self.workers_to_come and event["role"] == "server":
            event = {**event, "rank": event["rank"] + self.workers_to_come}
        self._last = event
        if self._listener is not None:
            self._listener(event)

    def tested(self, number: int, copies: int, point: dict[str, Any] | None = None) -> None:
        """Report that `number` of `copies` snapshots are tested; the last gave this point of the curve.

        The event also has the fields of the last progress event, so that listeners can rely on its keys.
        """
        if self._last and self._listener is not None:
            last = {key: value for key, value in self._last.items() if key not in NEWS}
            self._listener({**last, "tested": number, "copies": copies, "point": point})
