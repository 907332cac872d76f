"""The words for transports, collectives, durability and learning rates, with a line about each."""

from __future__ import annotations

TRANSPORTS = {
    "processes": "shared memory and sockets between the processes of this host",
    "gloo": "torch.distributed's gloo backend, with its own all-reduce",
    "grpc": "gRPC between hosts: TLS is optional, and only servers must be reachable",
    "mpi": "the ranks of a job that mpiexec started",
    "sim": "virtual time in this process",
}

REJOINING = ("processes", "grpc", "gloo")
"""Transports that let a node which died come back, on one host; see `may_rejoin`."""

SPARSE = "sparse_doubling"

COLLECTIVES = {
    "auto": "the transport's own all-reduce if it suits the codec, else the cheapest of the others",
    "native": "the transport's own all-reduce",
    "stripes": "point to point: each worker averages one part of the vector; for every codec",
    "mapped": "each worker averages one part, straight from the memory of the others; on one host",
    "tree": "point to point: sums go up a binomial tree, the result comes down",
    "butterfly": "point to point: pairs swap whole vectors; fewest rounds",
    "ring": "point to point: parts of the vector go round; fewest bytes, most rounds",
    "rabenseifner": "point to point: pairs swap halves, then sums; fewest bytes, few rounds",
    SPARSE: "point to point: pairs swap sparse sums; for sparse codecs such as top_k",
}

DURABILITY = {
    "memory": "a restarted server resumes from its last snapshot and reports the updates it lost",
    "journal": "every update is on disk before it is acknowledged; a restarted server loses none",
}

DEVICES = {
    "cpu": "the processor",
    "cuda": "a GPU: of several, worker k takes the k-th, beginning again after the last",
    "auto": "a GPU if torch finds one, else the processor",
}

SCALING = {
    "none": "the task's own learning rate, however many workers",
    "linear": "times the workers",
    "sqrt": "times the square root of the workers",
    "auto": "as far as the strategy's averages shorten a step",
}
"""How the learning rate grows with the number of workers."""

FEEDBACK = ("none", "residual", "double")
"""Error-feedback modes of a codec. none: the compression error is lost. residual: every node that compresses
adds it to its next vector. double: so too, and codecs that send averages exactly compress them as well."""


def may_rejoin(transport: str, *, between_hosts: bool) -> bool:
    """Whether a node that dies can come back. A group of gloo between hosts cannot go on without it."""
    return transport in REJOINING and not (between_hosts and transport == "gloo")


def check_durability(durability: str, transport: str, *, between_hosts: bool = False) -> None:
    """Raise ValueError for a journal on a transport where a dead server cannot come back to read it."""
    if durability == "journal" and not may_rejoin(transport, between_hosts=between_hosts):
        others = "'grpc'" if between_hosts else "'processes' or 'grpc'"
        raise ValueError(
            f"transport {transport!r} keeps no journal here; take {others}, or durability 'memory'"
        )


def refuse_mpi(transport: str) -> None:
    """Raise ValueError for transport 'mpi' where Shoal would start the processes: only mpiexec can."""
    if transport == "mpi":
        raise ValueError(
            "transport 'mpi' joins the processes that mpiexec has started. Call shoal.attach() in a script, "
            "and start it with: mpiexec -n 4 shoal run train.py"
        )
