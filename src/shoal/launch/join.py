"""Joining a run: connects the transport and chooses the collective that the settings ask for."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import distributed as dist

from shoal.codecs import CODECS
from shoal.codecs.sparse.codec import Sparse
from shoal.collectives import (
    ALGORITHMS,
    Cheapest,
    InFlight,
    LinkCost,
    Mapped,
    Native,
    SparseCheapest,
    SparseDoubling,
    Sum,
    automatic,
    averaging,
    native,
    stripes,
)
from shoal.core.catalogue import check_word
from shoal.core.codec import Codec, Identity
from shoal.core.errors import Unavailable
from shoal.core.identity import NodeIdentity
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.sparse_vectors import SparseCodec
from shoal.core.transport import AllReduces, Shows, Transport
from shoal.core.words import COLLECTIVES, SPARSE
from shoal.engine.group import Mean
from shoal.launch.open_places import OpenPlaces
from shoal.launch.recovery import message_limit
from shoal.launch.run_token import run_token
from shoal.transports.alone import Alone
from shoal.transports.gloo import ElasticGloo, GlooTransport
from shoal.transports.rendezvous import Store, await_keys, hub_key, is_loopback, missing
from shoal.transports.sockets import SocketTransport
from shoal.vocabulary.strategy import Strategy

LOG = logging.getLogger("shoal")

RUN_KEY = "shoal/run"
"""The key under which the store holds the run's unique id."""

LOOPBACK = "127.0.0.1:0"

REJOIN_SECONDS = 10.0
"""How long a restarted server waits for the other nodes, some of which may have gone meanwhile."""


def file_store(folder: str | Path, nodes: int) -> Store:
    """The store for the processes of one host, in a folder of their own."""
    store: Store = dist.FileStore(str(Path(folder) / "store"), nodes)  # type: ignore[attr-defined]
    return store


@dataclass(frozen=True)
class Access:
    """At which address a node listens for gRPC, and how it authenticates its peers.

    Addresses are "host" or "host:port"; `certificate`, `key` and `authority` are PEM files. By default only
    this host can connect. The token comes from `token_file` or from SHOAL_TOKEN.
    """

    listen: str = LOOPBACK
    advertise: str | None = None  # the address at which other hosts reach this one
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    mutual: bool = False
    token_file: str | None = None
    insecure: bool = False


def connect(
    kind: str,
    me: NodeIdentity,
    store: Store | None,
    *,
    vector_bytes: int,
    timeout: float,
    patience: float = PATIENCE_SECONDS,
    manifest: str = "",
    access: Access | None = None,
    store_is_public: bool = False,
    places: OpenPlaces | None = None,
) -> Transport:
    """Wait for all nodes, and return this node's transport, of the given kind. A single node needs no store.

    `manifest` describes the model: over gRPC, nodes with a different one are refused. Over gRPC and gloo a
    peer that is silent for `patience` seconds is lost; a hub grants `places` to workers from elsewhere. In a
    public store, as torchrun's, any user of the host can read.
    """
    rank, nodes, workers, incarnation = me.rank, me.processes, me.workers, me.incarnation
    limit = message_limit(vector_bytes)
    meeting = min(timeout, REJOIN_SECONDS) if incarnation else timeout
    if kind == "mpi" and nodes > 1:
        start_mpi(timeout)
        from shoal.transports.mpi import MpiTransport

        return MpiTransport.connect(
            limit_bytes=limit, timeout=timeout, workers=workers, expected=(rank, nodes)
        )
    if store is None:
        return Alone()
    if kind == "processes" or (kind == "gloo" and (me.elastic or me.restarts)):
        sockets = SocketTransport if kind == "processes" else ElasticGloo
        return sockets.connect(
            rank,
            nodes,
            store,
            limit_bytes=limit,
            timeout=timeout,
            meeting_seconds=meeting,
            incarnation=incarnation,
        )
    if kind == "grpc":
        return connect_grpc(
            me, store, access or Access(), limit, meeting, patience, manifest, store_is_public, places
        )
    return GlooTransport.connect(
        rank,
        nodes,
        store,
        workers=workers,
        limit_bytes=limit,
        timeout=timeout,
        patience=patience,
        address=None if access is None or access.listen == LOOPBACK else access.listen.rpartition(":")[0],
    )


def connect_grpc(
    me: NodeIdentity,
    store: Store,
    access: Access,
    limit_bytes: int,
    timeout: float,
    patience: float,
    manifest: str,
    store_is_public: bool = False,
    places: OpenPlaces | None = None,
) -> Transport:
    """Connect over gRPC; `NodeIdentity.hubs` are those who listen, at the port of `access` and the next ones.

    Without a token, the run's id in the store admits a node. Where the store is public, there is always one.
    """
    from shoal.transports.grpc import GrpcTransport, Security
    from shoal.transports.grpc.security import join_address, split_address, with_port

    if me.rank == 0 and not store.check([RUN_KEY]):
        store.set(RUN_KEY, secrets.token_hex(16))
    if await_keys(store, {0: RUN_KEY}, timeout):
        raise missing(me.rank, (0,), timeout, "come to the meeting point")
    settings = asdict(access)
    listen, advertise = with_port(settings.pop("listen")), settings.pop("advertise")
    host, port = split_address(listen)
    if port and not store_is_public and me.rank in me.hubs:  # Shoal has given all nodes the same
        listen = join_address(host, port + me.hubs.index(me.rank))
    if me.incarnation and places is not None and store.check([hub_key(me.rank)]):
        _, port = split_address(store.get(hub_key(me.rank)).decode())
        listen = join_address(split_address(listen)[0], port)  # those from elsewhere look for it there
    security = Security(**settings)
    with ExitStack() as closing:
        if store_is_public and not security.mutual and not security.secrets():
            if is_loopback(split_address(listen)[0]):
                token = closing.enter_context(run_token(store, me.rank, timeout))
                security = replace(security, token_file=token)
            elif me.rank == 0:  # only --insecure lets it listen there
                LOG.warning("gRPC has no token: whoever reaches the rendezvous store can join this run")
        return GrpcTransport.connect(
            me.rank,
            me.processes,
            hubs=me.hubs,
            run_id=store.get(RUN_KEY).decode(),
            manifest=manifest,
            limit_bytes=limit_bytes,
            security=security,
            store=store,
            listen=listen,
            advertise=advertise,
            timeout=timeout,
            patience=patience,
            incarnation=me.incarnation,
            late={*range(me.workers)} - {*me.first_workers} - (places.taken if places else set()),
            places=places,
        )


def start_mpi(timeout: float) -> None:
    """Initialise MPI, which waits for all ranks of the job. From then on a process that fails ends the job.

    MPI_Init has no time-out and holds the GIL, so it would wait for ever for a rank that has died. After
    `timeout` seconds this process therefore exits with a traceback that leads here.
    """
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        import shoal.transports.mpi  # noqa: F401
    finally:
        faulthandler.cancel_dump_traceback_later()


def choose_codec(named: Codec | str | None, strategy: Strategy | None) -> Codec:
    """The codec with that name, or the strategy's own where none is named."""
    if isinstance(named, Codec):
        return named
    default = "none" if strategy is None else strategy.default_codec
    return CODECS.read(default if named is None else named)


def check_collective(collective: str, codec: Codec) -> None:
    """Raise ValueError unless `collective` is a known word and fits the codec."""
    check_word("collective", collective, COLLECTIVES)
    if collective in (*ALGORITHMS, "mapped") and not codec.in_flight:
        raise ValueError(
            f"collective {collective!r} sums messages without decoding them, and {codec} is not exact; "
            "take 'stripes'"
        )
    if collective == "stripes" and codec.needs_all:
        raise ValueError(
            f"collective 'stripes' averages each stripe at one worker, and {codec} needs all workers at "
            "once; take 'auto'"
        )
    if collective == SPARSE and not isinstance(codec, SparseCodec):
        raise ValueError(
            f"collective {SPARSE!r} sums sparse vectors, and {codec} sends dense ones; "
            "take 'stripes', or top_k"
        )
    if collective == SPARSE and codec.feedback == "double":
        raise ValueError(
            f"collective {SPARSE!r} sends sums uncompressed, and {codec} compresses them; "
            "take 'stripes', or feedback='residual'"
        )


def choose_sum(collective: str, transport: Transport | None, link: LinkCost | None) -> Sum:
    """Choose how a codec that averages in flight sums its integers in this run."""
    if collective in ALGORITHMS:
        return ALGORITHMS[collective].sum
    if transport is not None and isinstance(transport, AllReduces) and collective != "stripes":
        return native
    if collective == "native":
        raise Unavailable("collective 'native' needs an all-reduce, but this transport has none; take 'auto'")
    return Cheapest(link)


def choose_mean(
    collective: str,
    transport: Transport | None,
    codec: Codec,
    workers: int,
    link: LinkCost | None = None,
    maps_memory: bool = False,
) -> Mean:
    """Choose how this run forms averages over all workers.

    `link` is what a message costs, and `maps_memory` whether all workers map each other's memory. Both are
    known in virtual time, where `transport` is None; elsewhere the workers find out.
    """
    check_collective(collective, codec)
    if codec.in_flight and not codec.exact and collective != SPARSE:  # its reductions compress no further
        add_up = choose_sum(collective, transport, link)
        exact = choose_mean(collective, transport, Identity(), workers, link, maps_memory)
        return InFlight(exact, add_up)
    fits = transport is not None and isinstance(transport, AllReduces) and codec.exact
    if collective == "native" and not fits:
        why = "this transport has none" if codec.exact else f"{codec} is not exact"
        raise Unavailable(f"collective 'native' needs an all-reduce that fits, but {why}; take 'stripes'")
    shows = maps_memory or isinstance(transport, Shows)
    if collective == "mapped" and not shows:
        raise Unavailable("collective 'mapped' needs transport 'processes'; take 'stripes'")
    if collective == "mapped":
        return Mapped(required=True)
    if collective in ALGORITHMS:
        return averaging(ALGORITHMS[collective].sum)
    if fits and collective != "stripes":
        return Native()
    if collective == SPARSE:
        return SparseDoubling(Sparse())
    if collective == "stripes":
        return stripes
    if isinstance(codec, SparseCodec) and codec.share is not None and codec.feedback != "double":
        return SparseCheapest(codec, codec.share, Sparse(), link)
    if not codec.exact:
        return stripes
    return Mapped(automatic(workers, link)) if shows else automatic(workers, link)


def local_threads(nodes: int) -> int:
    """Torch threads for each of `nodes` processes on this host, so that they share its cores evenly."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // max(1, nodes))
