"""How bytes move between real nodes: `sockets` among the processes of one host, `torch_dist` over gloo."""
