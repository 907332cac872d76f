"""Joining a run: the transport and the averaging that its settings ask for."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

from torch import distributed as dist

from shoal.collectives import native, stripes
from shoal.core.catalogue import nearest
from shoal.core.codec import Codec
from shoal.core.errors import Unavailable
from shoal.core.node import Mean
from shoal.core.transport import AllReduces, Transport
from shoal.transports.alone import Alone
from shoal.transports.rendezvous import Store
from shoal.transports.sockets import SocketTransport
from shoal.transports.torch_dist import TorchTransport

TRANSPORTS = {
    "processes": "sockets between the processes of this host",
    "gloo": "torch.distributed's gloo backend, with its own all-reduce",
    "mpi": "the ranks of a job that mpiexec started",
    "sim": "virtual time in this process",
}

COLLECTIVES = {
    "auto": "the transport's own all-reduce where it has one and the codec is exact, else stripes",
    "native": "the transport's own all-reduce",
    "stripes": "point to point: every worker averages one part of the vector",
}


def check_word(kind: str, word: str, known: dict[str, str]) -> None:
    """Raise ValueError with the nearest name unless the word is known."""
    if word not in known:
        raise ValueError(f"unknown {kind} {word!r}. {nearest(word, known)}")


def file_store(folder: str | Path, nodes: int) -> Store:
    """A meeting point for the processes of one host in a folder of their own."""
    store: Store = dist.FileStore(str(Path(folder) / "store"), nodes)  # type: ignore[attr-defined]
    return store


def connect(
    kind: str,
    rank: int,
    nodes: int,
    store: Store | None,
    *,
    workers: int,
    vector_bytes: int,
    timeout: float,
    incarnation: int = 0,
) -> Transport:
    """This node's end of the network, once all nodes are there; a single node needs no store."""
    limit = 2 * vector_bytes + 2**20  # a codec may need more than the vector itself, but not much more
    if kind == "mpi" and nodes > 1:
        start_mpi(timeout)
        from shoal.transports.mpi import MpiTransport

        return MpiTransport.connect(
            limit_bytes=limit, timeout=timeout, workers=workers, expected=(rank, nodes)
        )
    if store is None:
        return Alone()
    if kind == "processes":
        return SocketTransport.connect(
            rank, nodes, store, limit_bytes=limit, timeout=timeout, incarnation=incarnation
        )
    return TorchTransport.connect(rank, nodes, store, workers=workers, limit_bytes=limit, timeout=timeout)


def refuse_mpi(transport: str) -> None:
    """Raise ValueError for transport 'mpi' where processes are to be started: only mpiexec can do that."""
    if transport == "mpi":
        raise ValueError(
            "transport 'mpi' joins the processes that mpiexec has started. Call shoal.attach() in a script, "
            "and start it with: mpiexec -n 4 shoal run train.py"
        )


def start_mpi(timeout: float) -> None:
    """Wait for all ranks of the job in MPI's own start; from then on a process that fails ends the job.

    MPI cannot be told to give up, and holds Python's lock: a rank that ended before it came would be waited
    for without end. After `timeout` seconds this process ends with a traceback that leads here.
    """
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        import shoal.transports.mpi  # noqa: F401
    finally:
        faulthandler.cancel_dump_traceback_later()


def choose_mean(collective: str, transport: Transport, codec: Codec) -> Mean:
    """How averages are formed in this run."""
    fits = isinstance(transport, AllReduces) and codec.exact
    if collective == "native" and not fits:
        why = "this transport has none" if codec.exact else f"{codec} is not exact"
        raise Unavailable(f"collective 'native' needs an all-reduce that fits, but {why}; take 'stripes'")
    return native if fits and collective != "stripes" else stripes


def local_threads(nodes: int) -> int:
    """Threads for each of so many processes on this host, so that they do not fight for its cores."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // max(1, nodes))
