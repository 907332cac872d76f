"""MessageLines: messages between the launcher and the agent of a host, one JSON object a line.

launcher -> agent   prepare (settings, files) | start (rank) | order | answer | signal | forget | pulse
agent -> launcher   hello | prepared | refused (why) | event | ask | line (of output) | hung up | ended (code)

`order` and `event` are what the launcher and a node tell each other on a control connection; `ask` and
`answer` are a node's questions to the store at the launcher.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

READ_BYTES = 1 << 16

MOST_BYTES = 1 << 26
"""The longest line, so that a peer which ends none cannot fill the memory."""


class MessageLines:
    """Both directions of such a conversation, on two file descriptors that this object owns."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor that becomes readable when messages arrive."""
        return self._reading

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._writing, data) :]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; waits for some bytes. Raises EOFError at the end.

        Other lines are passed over: the start-up files of a shell may print what they like.
        """
        data = os.read(self._reading, READ_BYTES)
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise EOFError
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def close_writing(self) -> None:
        """Tell the other end that nothing more will come."""
        with self._lock:
            if self._writing >= 0:
                os.close(self._writing)
                self._writing = -1

    def close(self) -> None:
        """Close both directions."""
        self.close_writing()
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1
