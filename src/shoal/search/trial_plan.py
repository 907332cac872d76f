"""TrialSettings: how the values of a trial become the plan of a Shoal run, and which names there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from shoal.core.catalogue import nearest
from shoal.core.errors import ShoalError
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.seeds import stream
from shoal.core.task import Data, Task
from shoal.launch.join import choose_codec, local_threads
from shoal.runs.plan import Plan
from shoal.search.architecture_models import Shapes, build_architecture
from shoal.search.space import ARCHITECTURE, Space, Values
from shoal.strategies import STRATEGIES

INTERNAL = {"foreach", "fused", "capturable", "differentiable", "maximize", "params", "lr"}
"""Arguments of torch's optimizers that are no hyper-parameters."""

STRATEGY = "strategy."


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a search share: each is a run of `task` with its own values.

    `held_out` is the share of the training set that trials are scored on; the test set is left alone.
    """

    task: Task
    strategy: str = "single"
    options: tuple[tuple[str, Any], ...] = ()  # of the strategy
    codec: str | None = None
    workers: int = 1
    servers: int = 1
    transport: str = "processes"
    held_out: float = 0.2
    seed: int = 0
    threads: int | None = None
    timeout: float = 300.0
    patience: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} is a share of the training set, above 0 and below 1")

    def known(self) -> dict[str, str]:
        """Every hyper-parameter that a space may name, with where it belongs."""
        names = {"lr": "the task", "batch": "the task", "codec": "the run", ARCHITECTURE: "the task's model"}
        names |= dict.fromkeys(optimizer_options(self.task.optimizer), "the optimizer")
        return names | {f"{STRATEGY}{name}": "the strategy" for name in STRATEGIES.options(self.strategy)}

    def check(self, space: Space) -> None:
        """Raise ValueError for a name that is not known, or a value with which no run could begin."""
        if self.task.growth:
            raise ValueError(
                f"the batch of task {self.task.name!r} grows, and a trial could not go on where another one "
                "ended; search without growth"
            )
        if STRATEGIES.make(self.strategy, **dict(self.options)).deal.portions:
            raise ValueError(
                f"strategy {self.strategy!r} writes no checkpoints, which trials end with; search with "
                "another strategy"
            )
        known = self.known()
        for name in space:
            if name not in known:
                raise ValueError(f"there is no hyper-parameter {name!r}. {nearest(name, known)}")
        some = {name: found.ends()[0] for name, found in space.items()}
        if space.architecture is not None:
            self.trial_task(some).model()
        for name, found in space.items():
            for value in found.ends():
                try:
                    task = self.plan({**some, name: value}, checkpoint="trial").task
                    task.optimizer([nn.Parameter(torch.zeros(1))], lr=task.lr)
                except (ValueError, TypeError, ShoalError) as error:
                    raise ValueError(f"{name} = {value}: {error}") from None

    def fixed(self, space: Space) -> frozenset[str]:
        """The names that cannot change while a trial trains: its state depends on them."""
        free = {"lr", *optimizer_options(self.task.optimizer)}
        nodes = self.plan({}).nodes
        return frozenset(space) - free - ({"batch"} if nodes == 1 else set())

    def fitting(self) -> int:
        """How many trials fit on this host at once: as many as there are cores for their nodes."""
        return local_threads(self.plan({}).nodes)

    def sharing(self, at_once: int) -> TrialSettings:
        """The same with the torch threads of each process, unless told: its share of this host's cores."""
        return replace(self, threads=self.threads or local_threads(at_once * self.plan({}).nodes))

    def plan(self, values: Values, epochs: int = 1, checkpoint: str | None = None) -> Plan:
        """The run of a trial with these values."""
        task = self.trial_task(values)
        options = dict(self.options) | {
            name.removeprefix(STRATEGY): value for name, value in values.items() if name.startswith(STRATEGY)
        }
        strategy = STRATEGIES.make(self.strategy, **options)
        return Plan(
            task=task,
            strategy=strategy,
            codec=choose_codec(values.get("codec", self.codec), strategy),
            workers=self.workers,
            servers=self.servers,
            epochs=epochs,
            seed=self.seed,
            transport=self.transport,
            timeout=self.timeout,
            patience=self.patience,
            threads=self.threads,
            checkpoint=checkpoint,
            tests=0,
        )

    def trial_task(self, values: Values, whole: bool = False) -> Task:
        """The task of a trial, tested on the examples held out; with `whole`, the user's own split."""
        task = self.task.but(values.get("batch"), values.get("lr"))
        own = {name: values[name] for name in optimizer_options(task.optimizer) if name in values}
        if own:
            own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
            task = replace(task, optimizer=partial(task.optimizer, **own))
        if ARCHITECTURE in values:
            task = replace(task, model=partial(_architecture, self.task, values[ARCHITECTURE]))
        if whole:
            return task
        return replace(task, data=partial(held_out_data, self.task.data, self.held_out, self.seed))

    def samples(self, epochs: int) -> int:
        """Samples that `epochs` epochs of a trial take."""
        return replace(self.plan({}), epochs=epochs).samples(self.trial_task({}).data()) if epochs else 0


def optimizer_options(optimizer: Callable[..., Any]) -> list[str]:
    """The numbers and flags that an optimizer takes beside the learning rate."""
    found = []
    for name, parameter in inspect.signature(optimizer).parameters.items():
        plain = isinstance(parameter.default, (bool, int, float, tuple))
        if plain and name not in INTERNAL:
            found.append(name)
    return found


@lru_cache(maxsize=2)
def held_out_data(data: Callable[[], Data], share: float, seed: int) -> Data:
    """The training set without a share of it, which takes the place of the test set."""
    whole = data()
    order = torch.randperm(len(whole.x), generator=stream(seed, "held out"))
    count = max(1, round(share * len(order)))
    if count >= len(order):
        raise ValueError(f"{len(order)} training examples are too few to hold some of them out")
    scored, trained = order[:count], order[count:]
    return Data(whole.x[trained], whole.y[trained], whole.x[scored], whole.y[scored])


def _architecture(task: Task, genotype: Mapping[str, Any]) -> nn.Module:
    return build_architecture(genotype, _shapes(task.model, task.data))


@lru_cache(maxsize=2)
def _shapes(model: Callable[[], nn.Module], data: Callable[[], Data]) -> Shapes:
    """The shapes between which an architecture fits, from an example and the task's own model."""
    example = data().x[:1]
    was = torch.get_rng_state()
    with torch.no_grad():
        outputs = model().eval()(example).shape[-1]
    torch.set_rng_state(was)
    return Shapes(tuple(example.shape[1:]), int(outputs))
