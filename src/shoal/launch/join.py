"""Joining a run: the transport and the averaging that its settings ask for."""

from __future__ import annotations

import faulthandler
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import distributed as dist

from shoal.collectives import native, stripes
from shoal.core.catalogue import nearest
from shoal.core.codec import Codec
from shoal.core.errors import Unavailable
from shoal.core.node import Mean
from shoal.core.transport import AllReduces, Transport
from shoal.launch.seat import Seat
from shoal.transports.alone import Alone
from shoal.transports.rendezvous import Store
from shoal.transports.sockets import SocketTransport
from shoal.transports.torch_dist import TorchTransport

TRANSPORTS = {
    "processes": "shared memory and sockets between the processes of this host",
    "gloo": "torch.distributed's gloo backend, with its own all-reduce",
    "grpc": "gRPC, between hosts: encrypted if told, only servers need to be reachable",
    "mpi": "the ranks of a job that mpiexec started",
    "sim": "virtual time in this process",
}

RUN_KEY = "shoal/run"
"""Where the meeting point holds the number of the run, which no other run has."""

REJOIN_SECONDS = 10.0
"""How long a server that was started again waits for the others, of whom some may have gone meanwhile."""

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


@dataclass(frozen=True)
class Access:
    """How a node is reached over gRPC, and who may reach it: host or host and port, and PEM files.

    The default is this host alone. A token comes from `token_file` or from SHOAL_TOKEN.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | None = None  # the name that other hosts know this one by
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    mutual: bool = False
    token_file: str | None = None
    insecure: bool = False


def connect(
    kind: str,
    seat: Seat,
    store: Store | None,
    *,
    vector_bytes: int,
    timeout: float,
    manifest: str = "",
    access: Access | None = None,
) -> Transport:
    """This node's end of the network, once all nodes are there; a single node needs no store.

    `manifest` says which model it is, so that nodes with another one are refused.
    """
    rank, nodes, workers, incarnation = seat.rank, seat.nodes, seat.workers, seat.incarnation
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
    if kind == "grpc":
        return connect_grpc(seat, store, access or Access(), limit, timeout, manifest)
    return TorchTransport.connect(rank, nodes, store, workers=workers, limit_bytes=limit, timeout=timeout)


def connect_grpc(
    seat: Seat, store: Store, access: Access, limit_bytes: int, timeout: float, manifest: str
) -> Transport:
    """Servers are the hubs that everybody calls; where there is none, worker 0 is."""
    from shoal.transports.grpc import GrpcTransport, Security

    if seat.rank == 0 and not store.check([RUN_KEY]):
        store.set(RUN_KEY, secrets.token_hex(16))
    settings = asdict(access)
    listen, advertise = settings.pop("listen"), settings.pop("advertise")
    return GrpcTransport.connect(
        seat.rank,
        seat.nodes,
        hubs=tuple(range(seat.workers, seat.nodes)) or (0,),
        run_id=store.get(RUN_KEY).decode(),
        manifest=manifest,
        limit_bytes=limit_bytes,
        security=Security(**settings),
        store=store,
        listen=listen if ":" in listen else f"{listen}:0",
        advertise=advertise,
        timeout=min(timeout, REJOIN_SECONDS) if seat.incarnation else timeout,
        incarnation=seat.incarnation,
    )


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
