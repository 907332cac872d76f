"""L-BFGS whose vectors are at servers: recursion, line search, iterations, a shard, and who leads them."""
