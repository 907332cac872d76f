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
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.words import may_rejoin
from shoal.launch.control import Control
from shoal.launch.join import Access, file_store, local_threads
from shoal.launch.meeting_place import choose_interface, meet
from shoal.launch.recovery import Recovery, peers_return
from shoal.launch.relayed_store import RelayedStore
from shoal.launch.script_process import VARIABLE
from shoal.launch.slurm_step import SlurmStep
from shoal.launch.stop_agreement import StopAgreement
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
    """One of the `nodes` nodes of a run, and the settings that its launcher passed on.

    `strategy` and `codec` are names as on the command line, the codec with its options.
    """

    rank: int = 0
    nodes: int = 1  # with the places that others may take
    begins_with: int | None = None  # workers that the run is started with; None for all
    group: int = 1  # processes of each node, of which every one is in a run with those of its position
    position: int = 0  # in the group
    launched: str = ""  # by "shoal", "torchrun", "slurm", "mpi", or "" if the process was started by hand
    transport: str = "processes"
    servers: int = 1  # nodes that share each server of the strategy
    durability: str = "memory"
    access: dict[str, Any] = field(default_factory=dict)  # fields of Access, for transport "grpc"
    incarnation: int = 0
    store: str = ""  # folder of the run's FileStore and journals, if `shoal run` started the process
    store_connection: int | None = None  # file descriptor of the pipe to the store, on several hosts
    keeper: bool = False  # whether `shoal run` started one, so that workers may come and go
    returns: bool = True  # whether a killed worker is started again, and finds its place in its loop
    relayed: bool = False  # whether not all hosts can call each other
    joins: bool = False  # whether this is a worker of a run that was started elsewhere
    spare: bool = False  # whether this process waits to take the place of a worker that is killed
    on_host: int | None = None  # nodes on this host, if `shoal run` started the process
    control: int | None = None  # file descriptor of the connection to the launcher
    gpus: list[str] | None = None  # of which each worker of a script sees one, or no GPU if there are none
    strategy: str | None = None
    strategy_options: dict[str, str] = field(default_factory=dict)
    codec: str | None = None
    collective: str = "auto"
    checkpoint: str | None = None
    every: int | None = None
    timeout: float = 300.0
    patience: float = PATIENCE_SECONDS

    def identity(self, strategy: Strategy) -> NodeIdentity:
        """The identity of this node under `strategy`. The last nodes are its servers."""
        workers = self.nodes - strategy.servers * self.servers
        place = self.rank, workers, strategy.servers, self.servers, self.incarnation
        returns = self.launched == "shoal" and self.returns
        elastic = self.keeper and returns and strategy.is_elastic
        peers = returns and peers_return(strategy) and not self.relayed
        restarts = peers or (bool(strategy.servers) and self._may_restart)
        return NodeIdentity(
            *place,
            elastic=elastic,
            begins_with=self.begins_with,
            restarts=restarts,
            relayed=self.relayed,
        )

    @property
    def first_nodes(self) -> int:
        """The nodes that the run is started with."""
        return self.nodes if self.begins_with is None else self.begins_with

    @property
    def connection(self) -> dict[str, Any]:
        """What `connect` must know of the network."""
        return {
            "timeout": self.timeout,
            "patience": self.patience,
            "access": Access(**self.access),
            "store_is_public": self.is_joined,
        }

    @property
    def recovery(self) -> Recovery:
        """How nodes of this run recover from a crash."""
        return Recovery(self.durability, self.store if self._may_restart else "")

    @property
    def _may_restart(self) -> bool:
        """Whether Shoal starts a node again that dies; a process of a group cannot come back."""
        between_hosts = self.store_connection is not None
        here = self.launched == "shoal" and self.group == 1
        return here and may_rejoin(self.transport, between_hosts=between_hosts)

    def to_environment(self) -> dict[str, str]:
        """The environment variable from which `find` reads this place in a child process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def find(cls, transport: str | None = None) -> Place:
        """Read the place of this process, started by Shoal, torchrun or the like, mpiexec, srun, or by hand.

        Tasks of srun may also be ranks of MPI. They are, if srun has prepared MPI or `transport` is "mpi";
        they are not, if `transport` is another.
        """
        if VARIABLE in os.environ:
            fields: dict[str, Any] = json.loads(os.environ[VARIABLE])
            return cls(**fields)
        if all(name in os.environ for name in TORCHRUN):
            rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return cls(rank, nodes, launched="torchrun", transport="gloo")
        step = SlurmStep.find()
        ranks = None if step is not None and transport in ("gloo", "grpc") else _mpi_rank()
        if ranks is None and step is not None:
            ranks = step.rank, step.tasks
            if ranks[1] > 1 and transport != "mpi":
                return cls(*ranks, launched="slurm", transport="gloo")
        # a single process counts as started by hand: it may be in a shell under mpiexec or srun
        if ranks is None or ranks[1] == 1:
            return cls()
        return cls(*ranks, launched="mpi", transport="mpi")

    @property
    def is_joined(self) -> bool:
        """Whether torchrun, srun or mpiexec started the processes, so that Shoal must not."""
        return self.launched in ("torchrun", "slurm", "mpi")

    @property
    def local_nodes(self) -> int:
        """Nodes on this host if the launcher says so, else all nodes."""
        if self.on_host is not None:
            return self.on_host
        if self.launched == "slurm":
            return _slurm_step().local_tasks
        told = (os.environ.get(name) for name in LOCAL_RANKS)
        return next((int(nodes) for nodes in told if nodes), self.nodes)

    @property
    def threads(self) -> int:
        """Torch threads for this process: the cores that Slurm gives a task, else its share of the host's."""
        own = os.environ.get("SLURM_CPUS_PER_TASK", "") if self.launched == "slurm" else ""
        return int(own) if own.isdecimal() else local_threads(self.local_nodes)

    def open_control(self, me: NodeIdentity | None = None) -> Control:
        """What gives this node its orders. Every call in a process that Shoal has started returns the same.

        In a run that another program has started, the nodes agree among themselves when to stop, if there are
        checkpoints to be saved then.
        """
        if self.is_joined and self.checkpoint is not None and me is not None:
            store = self.open_store()
            if store is not None and me.nodes > 1:
                return StopAgreement(store, me)
        return _control(self.control)

    def open_store(self) -> Store | None:
        """The store through which the nodes find each other. None for a single process, and under MPI.

        In groups, those of each position have one of their own.
        """
        store = self.open_common_store()
        if store is None or self.group == 1:
            return store
        own: Store = PrefixStore(f"position/{self.position}", store)  # type: ignore[arg-type]
        return own

    def open_common_store(self) -> Store | None:
        """The store of all processes, whatever their position."""
        if self.store_connection is not None:
            return _relayed_store(self.store_connection)
        if self.store:
            return file_store(self.store, self.nodes * self.group + self.keeper)
        if self.launched not in ("torchrun", "slurm"):
            return None
        return _shared_store(self.launched, self.transport, self.timeout)


@lru_cache
def _shared_store(launched: str, transport: str, timeout: float) -> Store:
    """The store of a run that another program has started. Opened once: one process keeps it."""
    if launched == "slurm":
        step = _slurm_step()
        rank, nodes = step.rank, step.tasks
        host, port, spans_hosts = step.address, step.port, len(step.hosts) > 1
        store = meet(host, port, rank, timeout)
    else:
        rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        spans_hosts = int(os.environ.get("LOCAL_WORLD_SIZE", nodes)) < nodes
        opened, _, _ = next(iter(rendezvous("env://", rank, nodes)))
        store = PrefixStore("shoal", opened)
    if spans_hosts and transport == "gloo":
        choose_interface(store, host, port, rank, nodes, timeout)
    return store


def _slurm_step() -> SlurmStep:
    step = SlurmStep.find()
    if step is None:
        raise ValueError("the variables of srun, such as SLURM_STEP_ID, are gone from the environment")
    return step


def _mpi_rank() -> tuple[int, int] | None:
    """Rank and size as mpiexec says them, or srun where it starts MPI."""
    for names in MPIEXEC:
        if all(name in os.environ for name in names):
            return int(os.environ[names[0]]), int(os.environ[names[1]])
    return None


@lru_cache
def _control(descriptor: int | None) -> Control:
    return Control(None if descriptor is None else Connection(descriptor))


@lru_cache
def _relayed_store(descriptor: int) -> Store:
    return RelayedStore(Connection(descriptor))
