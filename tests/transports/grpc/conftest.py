"""What the tests of the gRPC transport share for as long as one file of them runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from harness import in_process

if TYPE_CHECKING:
    from grpc_nodes import Puppet


@pytest.fixture(scope="module")
def grpc_core() -> Iterator[None]:
    """While a channel is open, gRPC keeps the descriptors that it opened for itself."""
    import grpc

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/nowhere/at-all")(b"", timeout=10)
        yield


@pytest.fixture(scope="module")
def puppet() -> Iterator[Puppet]:
    """A process that plays a node, to be stopped and let go again."""
    from grpc_nodes import Puppet

    with in_process("for line in sys.stdin: exec(eval(line), globals())") as child:
        yield Puppet(child)
