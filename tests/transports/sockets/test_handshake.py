"""A handshake whose other end does not go on as it began."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from shoal.core.errors import PeerLost
from shoal.transports.shared_memory.memory import MemoryProbe
from shoal.transports.sockets.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    WELCOME,
    Credentials,
    Handshaker,
    listen,
)

TOKEN, NONCE = b"t" * 16, b"n" * NONCE_BYTES


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("disconnects", [True, False])
def test_a_peer_that_dies_after_its_answer_is_gone_and_one_that_lives_shares_no_memory(disconnects):
    me = Credentials(1, 2, TOKEN, incarnation=1, probe=MemoryProbe(share=True))
    if not me.probe.shares:
        pytest.skip("processes share no memory here")
    gone = SimpleNamespace(location=(dead_pid(), 3, 1))  # its memory went with it
    callee = Credentials(0, 2, TOKEN, probe=gone)  # type: ignore[arg-type]
    handshaker = Handshaker(me, listen("127.0.0.1", 2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        handshaker.dial(0, f"127.0.0.1 {port}")
        connection, _ = server.accept()
        with connection:
            connection.sendall(NONCE)
            handshaker.await_all(time.monotonic() + 0.2)
            hello = callee.read(connection.recv(HELLO_BYTES, socket.MSG_WAITALL), port, NONCE)
            assert hello is not None
            connection.sendall(callee.hello(port, hello.nonce, NONCE, WELCOME))
            if disconnects:
                connection.shutdown(socket.SHUT_WR)
                handshaker.await_all(time.monotonic() + 10)
                assert "disconnected from node 1" in handshaker.unreachable[0]
            else:
                with pytest.raises(PeerLost, match="can map memory of node 1, but not vice versa"):
                    handshaker.await_all(time.monotonic() + 10)
        handshaker.close()
