"""Place: this process's rank and settings in a run, read from the environment variables of its launcher."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shoal.core.identity import NodeIdentity
from shoal.launch.control import Control
from shoal.launch.join import file_store
from shoal.launch.recovery import Recovery
from shoal.launch.relayed_store import RelayedStore
from shoal.launch.script_process import VARIABLE
from shoal.transports.rendezvous import Store
from shoal.vocabulary.strategy import Strategy

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPIEXEC = (
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and its kin, also under Slurm
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
)
LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """One of the `nodes` processes of a run, and the settings that its launcher passed on.

    `strategy` and `codec` are names as on the command line, the codec with its options.
    """

    rank: int = 0
    nodes: int = 1
    launched: str = ""  # by "shoal", "torchrun", "mpi", or "" if the process was started by hand
    transport: str = "processes"
    servers: int = 1  # nodes that share each server of the strategy
    durability: str = "memory"
    access: dict[str, Any] = field(default_factory=dict)  # fields of Access, for transport "grpc"
    incarnation: int = 0
    store: str = ""  # folder of the run's FileStore and journals, if `shoal run` started the process
    store_connection: int | None = None  # file descriptor of the pipe to the store, on several hosts
    on_host: int | None = None  # nodes on this host, if `shoal run` started the process
    control: int | None = None  # file descriptor of the connection to the launcher
    strategy: str | None = None
    strategy_options: dict[str, str] = field(default_factory=dict)
    codec: str | None = None
    collective: str = "auto"
    checkpoint: str | None = None
    every: int | None = None
    timeout: float = 300.0

    def identity(self, strategy: Strategy) -> NodeIdentity:
        """The identity of this node under `strategy`. The last nodes are its servers."""
        workers = self.nodes - strategy.servers * self.servers
        return NodeIdentity(self.rank, workers, strategy.servers, self.servers, self.incarnation)

    @property
    def recovery(self) -> Recovery:
        """How nodes of this run recover from a crash."""
        return Recovery(self.transport, self.durability, self.store)

    def to_environment(self) -> dict[str, str]:
        """The environment variable from which `find` reads this place in a child process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def find(cls) -> Place:
        """Read the place of this process, started by Shoal, torchrun or the like, mpiexec, or by hand."""
        if VARIABLE in os.environ:
            fields: dict[str, Any] = json.loads(os.environ[VARIABLE])
            return cls(**fields)
        if all(name in os.environ for name in TORCHRUN):
            rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return cls(rank, nodes, launched="torchrun", transport="gloo")
        for names in MPIEXEC:
            if all(name in os.environ for name in names):
                rank, nodes = (int(os.environ[name]) for name in names)
                if (
                    nodes > 1
                ):  # a single process counts as started by hand: it may be in a shell under mpiexec
                    return cls(rank, nodes, launched="mpi", transport="mpi")
        return cls()

    @property
    def is_joined(self) -> bool:
        """Whether torchrun or mpiexec started the processes, so that Shoal must not."""
        return self.launched in ("torchrun", "mpi")

    @property
    def local_nodes(self) -> int:
        """Nodes on this host if the launcher says so, else all nodes."""
        if self.on_host is not None:
            return self.on_host
        told = (os.environ.get(name) for name in LOCAL_RANKS)
        return next((int(nodes) for nodes in told if nodes), self.nodes)

    def open_control(self) -> Control:
        """The connection to the launcher, if there is one. Every call returns the same object."""
        return _control(self.control)

    def open_store(self) -> Store | None:
        """The store through which the nodes find each other. None for a single process, and under MPI."""
        if self.store_connection is not None:
            return _relayed_store(self.store_connection)
        if self.store:
            return file_store(self.store, self.nodes)
        if self.launched == "torchrun":
            if self.transport == "gloo":
                _check_interface(self.nodes)
            store, _, _ = next(iter(rendezvous("env://", self.rank, self.nodes)))
            shared: Store = PrefixStore("shoal", store)
            return shared
        return None


def _check_interface(nodes: int) -> None:
    """Raise ValueError if the run spans hosts and Gloo, which defaults to loopback, has no interface set."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", nodes)) < nodes and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise ValueError(
            f"this run has {nodes} processes on several hosts: set GLOO_SOCKET_IFNAME to the network "
            "interface that connects them, such as eth0. Gloo neither encrypts nor authenticates, so use a "
            "trusted network."
        )


@lru_cache
def _control(descriptor: int | None) -> Control:
    return Control(None if descriptor is None else Connection(descriptor))


@lru_cache
def _relayed_store(descriptor: int) -> Store:
    return RelayedStore(Connection(descriptor))
