"""A process of pytest-xdist sends what it has to say of a test in one message instead of six.

Nothing is left out: there are as many reports, with the same outcomes and times. Only what passed waits, so a
failure is known at once. Where a test ends its whole process, what waits is lost: that its setup passed.
With `-v` nothing waits, for then the name of a test is shown when it begins.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from typing import Any

import pytest

WAIT = ("logstart", "testreport", "logfinish")
NAME = "together"

Event = tuple[str, dict[str, Any]]


def send_together(config: pytest.Config) -> None:
    """Let this process, if it is one of pytest-xdist, send the events of a test in one message."""
    if hasattr(config, "workerinput") and config.get_verbosity() <= 0:
        for plugin in config.pluginmanager.get_plugins():
            if hasattr(plugin, "sendevent"):
                plugin.sendevent = Together(plugin.sendevent)


def take_apart(node: Any) -> None:
    """Let the controller handle each event of a message of this process as if it had come alone."""
    handle = node.process_from_remote

    def handle_each(message: Event | Any) -> None:
        if isinstance(message, tuple) and message[0] == NAME:
            for event in marshal.loads(message[1]["events"]):
                handle(event)
        else:
            handle(message)

    node.process_from_remote = handle_each


class Together:
    """Events of a test wait for one that must not; then all of them are sent."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._waiting: list[Event] = []

    def __call__(self, name: str, **content: Any) -> None:
        self._waiting.append((name, content))
        if name not in WAIT or (name == "testreport" and content["data"]["outcome"] != "passed"):
            events, self._waiting = self._waiting, []
            if len(events) == 1:
                self._send(name, **content)
            else:
                self._send(NAME, events=marshal.dumps(events))  # execnet's own way to write is in Python
