"""Memory that the processes of one host share; used by the sockets and gRPC transports.

memory          SharedMemory: a memfd that peers can map
large_messages  messages written once into a shared buffer
shared_reads    zero-copy reads of another node's tensor
windows         vectors that all nodes read and add to
"""
