"""Real transports: `sockets` within one host, `gloo` and `grpc` between hosts, `mpi` inside an MPI job.

endpoint       base class: clock, inbox, checks          frames         message headers, receive buffers
rendezvous     how nodes find each other                 all_reduce     base class of gloo's and MPI's
shared_memory  large messages, zero-copy reads, windows  forks          what a forked child must close
alone          the transport of a run with one node
"""
