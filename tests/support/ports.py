"""Free ports below those that the system gives to whoever names none: nobody takes them meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket

LOWEST, SYSTEM_S = 16_000, 32_768


def free_port() -> int:
    """A port on which this host can listen, drawn at random: other tests draw another."""
    while True:
        port = random.SystemRandom().randrange(LOWEST, SYSTEM_S)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
