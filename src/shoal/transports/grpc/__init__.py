"""Between hosts: messages over gRPC. Importing this without grpcio installed raises Unavailable.

terms      what the nodes of a run agree on        security   certificates and tokens
wire       calls, records, slices and deadlines    control    the control messages, in protobuf
hub        who is here, and what waits for them    guest      one of those, its outbox, the gates
door       the server in front of a hub            crew       the threads that answer its calls
spoke      a node's way to a hub, kept up          line       the calls of one stay there
sharing    memory of the two ends, on one host
transport  GrpcTransport: all of it, as one node's end of the network
"""

from __future__ import annotations

import os
from importlib import import_module

from shoal.core.errors import Unavailable

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # a data loader that forks must not stir it up

try:
    import_module("grpc")
    import_module("shoal.transports.grpc.control_pb2")
except Exception as error:  # protobuf has one of its own for being too old
    raise Unavailable("transport 'grpc' needs grpcio. Install it with: pip install 'shoal[grpc]'") from error

from shoal.transports.grpc.security import Security
from shoal.transports.grpc.transport import GrpcTransport

__all__ = ["GrpcTransport", "Security"]
