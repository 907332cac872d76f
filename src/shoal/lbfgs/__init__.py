"""L-BFGS whose vectors lie at servers: recursion, line search, the iterations, a shard, and who leads them."""
