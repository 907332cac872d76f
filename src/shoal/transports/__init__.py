"""How bytes move between real nodes: `sockets` on one host, `grpc` and `torch_dist` between hosts, `mpi`."""
