"""Between hosts: messages over gRPC. Importing this without grpcio installed raises Unavailable.

transport  GrpcTransport: one node's end of the network
hub        a node that others call: membership, receiving, forwarding
sessions   a hub's clients: send queues, flow control
server     the gRPC server of a hub
client     a node's session at a hub, renewed when the hub is lost
calls      the gRPC calls of one session
redial     new connections for a session when the old ones are silent
protocol   settings to agree on, calls, records, slices, deadlines
security   certificates and tokens
control    control messages, in protobuf (control_pb2 is generated)
"""

from __future__ import annotations

import os
from importlib import import_module

from shoal.core.errors import Unavailable

os.environ.setdefault(
    "GRPC_ENABLE_FORK_SUPPORT", "0"
)  # gRPC must not run fork handlers in DataLoader workers

try:
    import_module("grpc")
    import_module("shoal.transports.grpc.control_pb2")
except Exception as error:  # protobuf raises its own error if it is too old
    raise Unavailable("transport 'grpc' needs grpcio. Install it with: pip install 'shoal[grpc]'") from error

from shoal.transports.grpc.security import Security
from shoal.transports.grpc.transport import GrpcTransport

__all__ = ["GrpcTransport", "Security"]
