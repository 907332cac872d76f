"""The processes of one host: a loopback TCP connection for each pair of nodes, and shared memory.

transport    SocketTransport: send, receive, zero-copy reads, windows, rejoining
connections  one TCP connection; connecting all nodes to each other
handshake    both ends prove that they know the run's token
"""

from shoal.transports.sockets.transport import SocketTransport

__all__ = ["SocketTransport"]
