"""RelayedStore: a node's store when its launcher is on another host.

The values lie at the launcher. Questions travel on the pipe to the agent that started the node, and from
there through ssh; so nodes find each other without an open port, and nobody else can ask.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch import distributed as dist

LONGEST_PAUSE = 0.05
"""Seconds between two questions for a value that is not there yet."""

GET_TIMEOUT = timedelta(seconds=300)


class RelayedStore(dist.Store):  # type: ignore[name-defined, misc]
    """The part of torch.distributed.Store that Shoal and gloo use. Safe to use from several threads."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value."""
        data = value if isinstance(value, bytes) else value.encode()
        self._ask({"set": key, "value": data.hex()})

    def get(self, key: str) -> bytes:
        """The value; waits until somebody has set it."""
        self.wait([key], GET_TIMEOUT)
        return bytes.fromhex(self._ask({"get": key})["value"])

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are set."""
        return bool(self._ask({"check": keys})["there"])

    def wait(self, keys: list[str], timeout: timedelta = GET_TIMEOUT) -> None:
        """Wait until all these keys are set. Raises RuntimeError after `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds()
        pause = 0.001
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody set {', '.join(keys)} within {timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(question).encode())
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RuntimeError("the store is gone, and with it the launcher") from error
        return answer


class StoreValues:
    """The values of a run's store, at the launcher."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question of a RelayedStore."""
        with self._lock:
            if "set" in question:
                self._values[question["set"]] = question["value"]
                return {}
            if "get" in question:
                return {"value": self._values[question["get"]]}
            return {"there": all(key in self._values for key in question["check"])}
