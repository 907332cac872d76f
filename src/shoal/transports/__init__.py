"""How bytes move between real nodes: `sockets` on one host, `torch_dist` over gloo, `mpi` under mpiexec."""
