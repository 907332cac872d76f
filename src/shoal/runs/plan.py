"""Plan: all settings of a run, the same in each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.codecs import CODECS
from shoal.core.catalogue import check_word
from shoal.core.codec import Codec
from shoal.core.crew_sizes import CrewSizes
from shoal.core.identity import NodeIdentity
from shoal.core.limits import PATIENCE_SECONDS, above
from shoal.core.task import Data, Task
from shoal.core.vector import named_weights, trainable
from shoal.core.words import DURABILITY, REJOINING, SCALING, TRANSPORTS, check_durability, refuse_mpi
from shoal.engine.engine import Engine
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.launch.join import Access, check_collective, local_threads
from shoal.launch.keeper_process import KeeperPlace
from shoal.launch.recovery import peers_return
from shoal.layouts import LAYOUTS
from shoal.layouts.model_layout import ModelLayout
from shoal.layouts.whole_model import DataParallel
from shoal.replicas.legs import Course, Leg
from shoal.replicas.module import build_model, module_of, steps_of
from shoal.replicas.repeatable import check_nothing_is_drawn
from shoal.replicas.served import check_optimizer
from shoal.runs.curve import POINTS, Curve, holds_solution
from shoal.runs.refusals import (
    bound_to_a_crew,
    check_balance,
    check_crew,
    check_every,
    check_layout,
    check_membership,
    check_native,
    check_places,
    check_portions,
)
from shoal.runs.scaling import lr_factor
from shoal.storage.checkpoint import LEG, Checkpoints
from shoal.storage.leg_edge import LegEdge
from shoal.storage.model_file import save_model
from shoal.strategies import STRATEGIES
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Setting, Strategy


@dataclass(frozen=True)
class Plan:
    """The settings of a run: the task, the strategy, the nodes, and how to handle failures.

    `tests` is how often the model is tested for the learning curve; with 0, at the end alone. Raises
    ValueError for settings that do not fit together.
    """

    task: Task
    strategy: Strategy
    codec: Codec
    workers: int = 1
    servers: int = 1
    epochs: int = 1
    seed: int = 0
    transport: str = "processes"
    collective: str = "auto"
    durability: str = "memory"
    timeout: float = 300.0
    patience: float = PATIENCE_SECONDS
    threads: int | None = None
    checkpoint: str | None = None
    every: int | None = None
    balance: bool = False
    scale_lr: str = "none"
    tests: int = POINTS
    crew: CrewSizes = field(default_factory=CrewSizes)
    layout: ModelLayout = field(default_factory=DataParallel)
    min_workers: int = 1  # with fewer, those who are left wait
    spares: int = 0  # processes that wait to take the place of one that is killed
    max_workers: int | None = None  # places, of which some are open to workers from elsewhere
    access: Access = field(default_factory=Access)  # how these reach the run, over gRPC
    joins: bool = False  # whether this is the worker of a run that was started elsewhere
    leg: Leg | None = None  # of a crew that grows: then these are the settings of that leg

    def __post_init__(self) -> None:
        self._check_numbers()
        check_word("transport", self.transport, TRANSPORTS)
        refuse_mpi(self.transport)
        check_collective(self.collective, self.codec)
        check_word("durability", self.durability, DURABILITY)
        check_word("scale_lr", self.scale_lr, SCALING)
        check_native(self.collective, self.transport, self.codec)
        if self.servers > 1 and not self.strategy.servers:
            word = STRATEGIES.name_of(self.strategy)
            raise ValueError(f"servers={self.servers}: strategy {word!r} has no server")
        for workers in {self.workers, self.places}:
            self.strategy.check(Setting(workers, self.codec, self.durability, shards=self.servers))
        self._check_optimizer()
        check_durability(self.durability, self.transport)
        if self.task.growth and self.strategy.deal.blocks is not None:
            raise ValueError(
                "grow_batch would change the length of blocks; with blocks, lower the learning rate instead"
            )
        if self.balance:
            check_balance(self.strategy, STRATEGIES.name_of(self.strategy))
        if self.crew and self.leg is None:
            self._check_crew()
        if self.strategy.deal.portions:
            check_portions(STRATEGIES.name_of(self.strategy), self.checkpoint, self.task)
            check_nothing_is_drawn(self.task, build_model(self.task, self.seed))
        self._check_layout()
        returns, waits = self.workers_return, self.may_be_elastic
        check_membership(self.min_workers, self.spares, self.workers, elastic=waits, returns=returns)
        if self.max_workers is not None:
            word = STRATEGIES.name_of(self.strategy)
            check_places(self.max_workers, self.workers, self.transport, word, elastic=self.is_elastic)

    def _check_numbers(self) -> None:
        """Raise ValueError for numbers that no run can have."""
        for name in ("workers", "servers", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a run needs at least 1 {name[:-1]}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}: a process computes with at least 1 thread")
        if self.tests < 0:
            raise ValueError(f"tests={self.tests}: a model is tested 0 times while it trains, or more often")
        check_every(self.every, self.checkpoint)
        above(0.0, timeout=self.timeout, patience=self.patience)

    def _check_layout(self) -> None:
        """Raise ValueError for what does not go with workers that are groups of processes."""
        if self.layout.group == 1:
            return
        beside = {"crew": self.crew, "balance": self.balance, "checkpoint": self.checkpoint}
        given = {name for name, value in beside.items() if value} | {self.transport}
        check_layout(self.layout, self.task, self.strategy, self.codec, given)
        self.layout.check(build_model(self.task, self.seed), self.task)

    def _check_optimizer(self) -> None:
        """Raise ValueError for an optimizer that the strategy could not run, tried on a model of 1 matrix.

        Every strategy runs plain SGD. To make one would import torch's compiler, which takes a second.
        """
        steps_itself = self.strategy.servers or self.strategy.own_optimizer
        if self.task.optimizer is not torch.optim.SGD and (self.workers > 1 or steps_itself):
            optimizer = self.task.optimizer([nn.Parameter(torch.zeros(2, 2))], lr=self.task.lr)
            check_optimizer(self.strategy, optimizer, self.workers, self.servers)

    def _check_crew(self) -> None:
        """Raise ValueError for a crew that cannot grow with this strategy."""
        self.crew.size_of(self.workers)
        check_crew(self.strategy, STRATEGIES.name_of(self.strategy))
        for _, workers in self.crew.at:
            self.strategy.check(Setting(workers, self.codec, self.durability, shards=self.servers))

    @property
    def group(self) -> int:
        """Processes of a worker."""
        return self.layout.group or 1

    @property
    def nodes(self) -> int:
        """Workers and servers; each is a process, or a group of them."""
        return self.workers + self.strategy.servers * self.servers

    @property
    def places(self) -> int:
        """Workers that there may be at a time; the first `workers` of them begin."""
        return max(self.workers, self.max_workers or 0)

    def rank_of(self, number: int) -> int:
        """The rank of a node of those that this launcher starts: the keeper comes after all places."""
        return number if number < self.workers else number + self.places - self.workers

    def name_of(self, rank: int) -> str:
        """The name of the node of that rank in messages to the user."""
        return self.identity(rank).name

    def identity(self, rank: int, incarnation: int = 0) -> NodeIdentity:
        """The identity of the node of that rank."""
        place = self.places, self.strategy.servers, self.servers, incarnation
        begins_with = None if self.places == self.workers else self.workers
        ends = {"elastic": self.is_elastic, "restarts": self.workers_return}
        return NodeIdentity(rank, *place, begins_with=begins_with, **ends)

    @property
    def is_elastic(self) -> bool:
        """Whether real workers that come and go have a keeper; see `may_be_elastic`."""
        return self.transport != "sim" and self.may_be_elastic

    @property
    def may_be_elastic(self) -> bool:
        """Whether workers that average among themselves can go on without one that dies and may come back."""
        dealt_anew = self.strategy.is_elastic and not (self.balance or self.crew or self.group > 1)
        return self.places > 1 and dealt_anew

    def keeper_place(self, folder: Path) -> KeeperPlace:
        """Where the keeper meets the workers. Over gRPC it knows the model, too."""
        place = KeeperPlace(
            self.places,
            str(folder),
            self.transport,
            self.timeout,
            self.patience,
            self.min_workers,
            self.access,
            begins_with=self.identity(0).begins_with,
        )
        if self.transport != "grpc":
            return place
        parameters, layout = trainable(build_model(self.task, self.seed))
        size = layout.numel * parameters[0].element_size()
        return replace(place, vector_bytes=size, manifest=layout.manifest(parameters[0].dtype))

    @property
    def workers_return(self) -> bool:
        """Whether a worker that dies is restarted."""
        served = bool(self.strategy.servers) and self.transport in REJOINING
        return self.is_elastic or self._peers_return or served

    @property
    def all_leave_models(self) -> bool:
        """Whether every worker leaves its model at the end: nobody knows who comes too late to have one."""
        return self.is_elastic or self._peers_return

    @property
    def _peers_return(self) -> bool:
        """Whether a worker that dies is taken back by others that have no server and form no average."""
        tied = self.workers == 1 or self.balance or self.crew or self.group > 1
        return not tied and self.transport in REJOINING and peers_return(self.strategy)

    @property
    def servers_return(self) -> bool:
        """Whether a server that dies is restarted."""
        return self.transport in REJOINING and self.strategy.recovers != "none"

    @property
    def threads_each(self) -> int:
        """Torch threads of each process. Default: its share of this host's cores, or 1 in virtual time.

        A server has no more than its share: threads that wait for a core hold up all others of their process.
        """
        shared_out = 1 if self.transport == "sim" else local_threads(self.nodes * self.group)
        return shared_out if self.threads is None else self.threads

    def steps(self, data: Data) -> int:
        """Steps of each worker; in a leg, those of the legs before it included."""
        if self.leg is not None:
            return self.leg.end.step
        if self.crew:
            return self.legs(data)[-1].steps(data)
        return steps_of(self.task, self.strategy, len(data.x), self.workers, self.epochs)

    def legs(self, data: Data) -> list[Plan]:
        """The settings of each leg of a crew that grows; of any other run, its own."""
        if not self.crew:
            return [self]
        course = Course(len(data.x), self.task.batch, self.epochs, self.task.growth)
        return [
            replace(self, workers=leg.workers, leg=leg, checkpoint=self._leg_folder(leg))
            for leg in course.legs(self.crew)
        ]

    def legs_left(self, data: Data, folder: str) -> list[Plan]:
        """The legs that are still to do, which is all of them unless the run is resumed in a later one."""
        if self.crew:
            self.check_checkpoints(data)
        legs = self.legs(data)
        edges = [leg.edge_before(folder) for leg in legs]
        return legs[max(k for k, edge in enumerate(edges) if edge is None or edge.is_sealed) :]

    def edge_before(self, folder: str) -> LegEdge | None:
        """What this leg goes on from, with the checkpoints or else in `folder`; None for the first leg."""
        if self.leg is None or self.leg.number == 0:
            return None
        return self._edge(self.leg.number, self.leg.begin.step, folder)

    def edge_after(self, folder: str) -> LegEdge | None:
        """What this leg hands over to the next; None for the last leg."""
        if self.leg is None or self.leg.number + 1 == len(self.crew.at):
            return None
        return self._edge(self.leg.number + 1, self.leg.end.step, folder)

    def _edge(self, number: int, step: int, folder: str) -> LegEdge:
        parent = Path(folder) if self.checkpoint is None else Path(self.checkpoint).parent
        whole = {**self.same_run(), "workers": self.crew.largest}
        return LegEdge(parent / f"{LEG}{number}", step, whole)

    def _leg_folder(self, leg: Leg) -> str | None:
        return None if self.checkpoint is None else str(Path(self.checkpoint) / f"{LEG}{leg.number + 1}")

    def checkpoints(self, data: Data) -> Checkpoints | None:
        """The checkpoints of this run, or of this leg; None if it writes none."""
        if self.checkpoint is None:
            return None
        same = {**self.same_run(), "data": self.task.data_mark or data.mark}
        return Checkpoints(self.checkpoint, same, self.nodes, bound=self._bound())

    def _bound(self) -> str | None:
        """Why a checkpoint cannot be resumed with another number of workers or servers; None if it can."""
        if self.crew:
            return "its crew grows at steps that are given"
        if self.balance:
            return "balance divides the data by the speeds of these workers"
        return bound_to_a_crew(self.strategy, STRATEGIES.name_of(self.strategy))

    def check_checkpoints(self, data: Data) -> None:
        """Raise CheckpointError if the folder holds the checkpoints of a run with other settings."""
        for plan in (self, *(self.legs(data) if self.crew else ())):
            if (saved := plan.checkpoints(data)) is not None:
                saved.check()
                if (edge := plan.edge_after("")) is not None:
                    edge.check()

    def samples(self, data: Data) -> int:
        """Samples of all workers together."""
        return self.epochs * len(data.x) * (self.workers if self.strategy.deal.whole else 1)

    def curve(self, data: Data) -> Curve:
        """What takes the copies of the model that are tested."""
        return Curve(self.strategy, self.samples(data), self.tests)

    def lr_factor(self, data: Data) -> float:
        """What the task's learning rate is multiplied by."""
        return lr_factor(self.scale_lr, self.strategy, self.workers, self.task, len(data.x))

    def scaled_task(self, data: Data) -> Task:
        """The task with the learning rate that the workers train with."""
        return replace(self.task, lr=self.task.lr * self.lr_factor(data))

    def same_run(self) -> dict[str, Any]:
        """The settings that must not change between a checkpoint and the run that resumes from it."""
        return {
            **self.task.config(),
            "strategy": STRATEGIES.name_of(self.strategy),
            **{f"strategy.{name}": value for name, value in asdict(self.strategy).items()},
            "codec": repr(self.codec),
            "workers": self.workers,
            "servers": self.servers * self.strategy.servers,
            "seed": self.seed,
            **({"balance": True} if self.balance else {}),
            **({"scale_lr": self.scale_lr} if self.scale_lr != "none" else {}),
            **({"crew": str(self.crew)} if self.crew else {}),
            **({} if self.group == 1 else {"layout": LAYOUTS.text_of(self.layout), "group": self.group}),
        }

    def config(self, data: Data | None = None) -> dict[str, Any]:
        """All settings as plain values, for the record of the run; `lr` is the rate that was trained with.

        Without `data`, loads it if the learning rate is scaled: the factor may depend on the data's size.
        """
        scaled = self.scale_lr != "none"
        factor = self.lr_factor(data or self.task.data()) if scaled else 1.0
        return {
            **self.same_run(),
            "lr": self.task.lr * factor,
            "scale_lr": self.scale_lr,
            "lr_factor": factor,
            "steps_per_update": self.strategy.steps_per_update(self.workers),
            "codec": CODECS.text_of(self.codec),
            "epochs": self.epochs,
            "balance": self.balance,
            "crew": str(self.crew) or None,
            "transport": self.transport,
            "collective": self.collective,
            "durability": self.durability,
            "timeout": self.timeout,
            "patience": self.patience,
            "min_workers": self.min_workers,
            "spares": self.spares,
            "max_workers": self.places,
            "threads": self.threads_each,
        }

    def keep_model(self, model: nn.Module) -> None:
        """Save the trained model beside the checkpoints, if there are any."""
        if self.checkpoint is not None:
            save_model(Path(self.checkpoint) / "model.safetensors", model.state_dict())

    def between_steps(self, control: Control, model: nn.Module, data: Data) -> BetweenSteps:
        """The hook that saves checkpoints and stops a node between two steps; `model` names its weights."""
        begin, saved = 0 if self.leg is None else self.leg.begin.step, self.checkpoints(data)
        weights = partial(self._weights, model)
        return BetweenSteps(control, saved, self.every, weights, begin=begin, solution=self._solution)

    def _weights(self, model: nn.Module, engine: Engine) -> Mapping[str, Tensor] | None:
        """The solution by the names of the model's parameters, at a node that holds all of it; else None."""
        if self.servers > 1 or self.strategy.independent or not holds_solution(self.strategy, engine):
            return None
        return named_weights(module_of(engine.replica, model), self._solution(engine))

    def _solution(self, engine: Engine) -> Tensor:
        return self.strategy.solution(Node(engine))
