"""Time to 90 % of a deep belief network against cores, within nodes and between them (Ma 2014)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from shoal.core.errors import Diverged
from shoal.core.task import Task
from shoal.programs.tasks import TASKS
from shoal.replicas.module import steps_per_epoch
from shoal.report.findings import Findings
from shoal.runs.result import Result
from shoal.sim import Compute, Link, Network
from shoal.strategies import STRATEGIES
from shoal.strategies.asgd import ASGD
from shoal.strategies.single import Single
from shoal.studies.belief_stages import Examples, Net, Recipe, Runner
from shoal.studies.calibration import measure_step
from shoal.studies.dbn_figures import (
    FIXED_NODES,
    FIXED_TASKS,
    REAL,
    SERVER,
    charts,
    claims,
    compared,
    tables,
    tabulate,
)
from shoal.studies.study import Lab, Study, numbers
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Place:
    """So many tasks, one a core, on each of so many nodes. A server has a core of its own on the first."""

    nodes: int
    tasks: int

    @property
    def cores(self) -> int:
        """Of all workers."""
        return self.nodes * self.tasks

    def __str__(self) -> str:
        return f"{self.nodes} x {self.tasks}"

    def network(self, within: str, between: str, servers: int = 0) -> Network:
        """Links inside a node, and between two."""
        node = [*(rank // self.tasks for rank in range(self.cores)), *[0] * servers]
        inside = Network.parse(within)
        link = Link(inside.latency, inside.bandwidth)
        ranks = range(len(node))
        links = {(a, b): link for a in ranks for b in ranks if a != b and node[a] == node[b]}
        return replace(Network.parse(between), links=links)


@dataclass(frozen=True)
class DbnSpeedup(Study):
    """Seconds of pretraining, layer by layer, and of fine-tuning until the test accuracy is above `accuracy`.

    `pretrain` epochs a layer with `strategy`, whatever the number of workers. Models are averaged `averages`
    times an epoch; block momentum, if there is any, is 1 - 1/workers, up to `most_block_momentum`. Then
    fine-tuning with `finetune_strategy`, its rate that of one worker times the workers, up to
    `most_finetune_lr`. It may see `labelled` rows, or `labelled_each` times the workers, each row once.
    `server` names numbers of cores for the paper's own way, asynchronous SGD through one server; `real` names
    numbers of processes on this machine. none leaves them out, `virtual=false` the rest.
    """

    source: ClassVar[str] = "Ma, Parallel implementation of deep learning using MPI (2014), tables 1 and 2"

    task: str = "mnist"
    layers: str = "128-128"
    accuracy: float = 90.0
    cores: str = "4/8/12/16/20/24/28/32"
    server: str | None = "4/16/32"
    virtual: bool = True
    real: str | None = None
    strategy: str = "bmuf"
    finetune_strategy: str = "sync"
    averages: int = 24
    most_block_momentum: float = 0.9
    collective: str = "ring"
    batch: int = 10
    pretrain: int = 2
    labelled: int = 5_000
    labelled_each: int = 1_000
    lr: float = 0.05
    momentum: float = 0.5
    finetune_lr: float = 0.1
    most_finetune_lr: float = 0.5
    finetune_momentum: float = 0.9
    jitter: float = 0.05
    within: str = "80Gbit,2us"
    between: str = "10Gbit,50us"
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.virtual or self.real):
            raise ValueError("virtual=false leaves nothing to do; name processes, as real=1/2/4")

    def run(self, lab: Lab) -> Findings:
        with TemporaryDirectory(prefix="shoal-") as folder:
            lab.say("reading the data")
            bench = Bench(self, lab, Examples(TASKS.make(self.task).data(), Path(folder)))
            rows = bench.virtual() if self.virtual else []
            rows += bench.real() if self.real else []
        return Findings(
            study="dbn-speedup",
            title=f"A deep belief network: time to {self.accuracy:g} % against cores",
            source=self.source,
            tables=list(tables(rows, self._ours())),
            charts=list(charts(rows)),
            claims=list(claims(rows)),
            remarks=list(self._remarks()),
            settings={**asdict(self), "step_seconds": bench.step_seconds},
        )

    def recipe(self, workers: int, rows: int) -> Recipe:
        """What each of so many workers does, with so many rows in all."""
        lr, most = self.finetune_lr, max(self.finetune_lr, self.most_finetune_lr)
        steps = steps_per_epoch(rows, self.batch, workers)
        return Recipe(
            strategy=self._chosen(self.strategy, workers, steps),
            finetune_strategy=self._chosen(self.finetune_strategy, workers, steps),
            layers=hidden_layers(self.layers),
            epochs=self.pretrain,
            labelled=max(self.labelled, workers * self.labelled_each),
            batch=self.batch,
            lr=self.lr,
            momentum=self.momentum,
            finetune_lr=min(workers * lr, most),
            finetune_momentum=self.finetune_momentum,
        )

    def papers(self, workers: int, rows: int) -> Recipe:
        """The paper's way: plain gradients to one server, at rates that come to those of one worker."""
        one = self.recipe(1, rows)
        return replace(
            one,
            labelled=self.recipe(workers, rows).labelled,
            strategy=ASGD(),
            finetune_strategy=ASGD(),
            lr=one.lr / (1 - one.momentum),
            momentum=0.0,
            finetune_lr=one.finetune_lr / (1 - one.finetune_momentum),
            finetune_momentum=0.0,
        )

    def _chosen(self, word: str, workers: int, steps: int) -> Strategy:
        """A strategy, with those of our options that it has."""
        if workers == 1:
            return Single()
        momentum = min(1 - 1 / workers, self.most_block_momentum)
        own = {"period": -(-steps // self.averages), "momentum": momentum, "warmup": 0}
        known = STRATEGIES.options(word)
        return STRATEGIES.make(word, **{name: own[name] for name in own if name in known})

    def _ours(self) -> str:
        net = f"{self.task}, layers of {self.layers}, batches of {self.batch}"
        return f"{self.strategy}, then {self.finetune_strategy}; {net}"

    def _remarks(self) -> Iterator[str]:
        yield (
            f"The time is that of pretraining, {self.pretrain} epoch(s) a layer, which is the same work for "
            f"all, and of fine-tuning to {self.accuracy:g} %. The paper does not say how long it pretrained, "
            "nor how large its layers were. Its times are another machine's: compare speed-ups."
        )
        yield (
            "Tuning: fine-tuning. Error: what the first layer loses of a test row on the way up and down, in "
            "nats; where it is above one worker's, the same work has taught many workers less."
        )
        if self.virtual:
            yield (
                "Virtual time on steps measured stage by stage, with a jitter of "
                f"{self.jitter:.0%}; the numbers are computed in full. Links: {self.within} within a node, "
                f"{self.between} between nodes. In a ring one task of a node sends to another node and one "
                "receives, so tasks do not share the node's card. Adding models up takes no time, nor does "
                "feeding the rows up to the next layer, with one worker or many."
            )
            yield (
                "2 tasks a node: where links change no number, as with bmuf and sync, these are the nets of "
                "the first table, on the clock of runs that send as much and compute nothing."
            )
        if self.virtual and self.server:
            yield (
                "One server: each worker fetches the model before every step and pushes every gradient, "
                "which is applied when it comes, at one worker's rates. The server's core is not counted."
            )
        if self.real:
            yield f"Real times are those of processes on {os.cpu_count()} cores, whatever else ran there."


class Bench:
    """Makes the runs of a study, and a row of each net."""

    def __init__(self, study: DbnSpeedup, lab: Lab, examples: Examples) -> None:
        self._study, self._lab, self._examples = study, lab, examples
        self._rows = len(examples.rows.x)
        self._steps: dict[str, Compute] = {}

    @property
    def step_seconds(self) -> dict[str, float]:
        """What a step of each stage took, where it was measured."""
        return {stage: step.mean for stage, step in self._steps.items()}

    def virtual(self) -> list[dict[str, Any]]:
        """One worker, both of the paper's tables, and the paper's own way."""
        counts = even("cores", self._study.cores)
        served = even("server", self._study.server) if self._study.server else []
        alone = Place(1, 1)
        nets = {alone: self._net("one worker", alone, self._recipe(1))}
        rows = [self._row(FIXED_NODES, alone, nets[alone])]
        for cores in counts:
            place = on_two_nodes(cores)
            nets[place] = self._net(str(place), place, self._recipe(cores))
            rows.append(self._row(FIXED_NODES, place, nets[place]))
        rows.append(self._row(FIXED_TASKS, alone, nets[alone]))
        for cores in counts:
            place, known = by_two_tasks(cores), nets[on_two_nodes(cores)]
            if place not in nets:
                nets[place] = known and self._elsewhere(known, place, self._recipe(cores))
            rows.append(self._row(FIXED_TASKS, place, nets[place]))
        rows += [self._row(SERVER, alone, nets[alone])] if served else []
        for place in map(on_two_nodes, served):
            papers = self._study.papers(place.cores, self._rows)
            net = self._net(f"one server, {place}", place, papers)
            rows.append(self._row(SERVER, place, net))
        return compared(rows)

    def real(self) -> list[dict[str, Any]]:
        """Processes on this machine, a thread each."""
        rows = []
        for count in sorted({1, *numbers("real", self._study.real or "")}):
            settings = {"workers": count, "transport": "processes", "threads": 1}
            name = f"{count} processes"
            net = self._train(name, self._recipe(count), self._runner(name, settings))
            rows.append(tabulate(REAL, (1, count), net, self._study.accuracy, "real"))
        return compared(rows)

    def _recipe(self, workers: int) -> Recipe:
        return self._study.recipe(workers, self._rows)

    def _row(self, table: str, place: Place, net: Net | None) -> dict[str, Any]:
        return tabulate(table, (place.nodes, place.tasks), net, self._study.accuracy, "virtual")

    def _net(self, name: str, place: Place, recipe: Recipe) -> Net | None:
        servers = max(recipe.strategy.servers, recipe.finetune_strategy.servers)
        return self._train(name, recipe, self._simulator(name, place, servers))

    def _elsewhere(self, net: Net, place: Place, recipe: Recipe) -> Net | None:
        """What a net would have taken on other nodes."""
        if any(s.servers or s.survives for s in (recipe.strategy, recipe.finetune_strategy)):
            return self._net(str(place), place, recipe)  # who is late may change the numbers
        return net.timed(recipe, self._simulator(f"{place}, the clock", place, 0))

    def _train(self, name: str, recipe: Recipe, run: Runner) -> Net | None:
        """A net, or none where its numbers were no longer finite."""
        try:
            return self._examples.train(recipe, run)
        except Diverged:
            self._lab.keep(name, {"diverged": True})
            return None

    def _simulator(self, name: str, place: Place, servers: int) -> Runner:
        """Makes runs in virtual time."""
        network = place.network(self._study.within, self._study.between, servers)
        settings = {"workers": place.cores, "transport": "sim", "network": network}
        return self._runner(name, {**settings, "collective": self._study.collective})

    def _runner(self, name: str, settings: dict[str, Any]) -> Runner:
        def run(stage: str, task: Task, strategy: Strategy, epochs: int) -> Result:
            own = {**settings, "epochs": epochs, "seed": self._study.seed}
            if settings["transport"] == "sim":
                own["compute"] = self._step(stage, task)
            return self._lab.run(f"{name}, {stage}", task, strategy, **own)

        return run

    def _step(self, stage: str, task: Task) -> Compute:
        """What a step of a stage costs: measured the first time, the same for all numbers of workers."""
        if stage not in self._steps:
            self._lab.say(f"measuring a step of {stage}")
            self._steps[stage] = replace(measure_step(task).compute(), jitter=self._study.jitter)
        return self._steps[stage]


def even(option: str, text: str) -> list[int]:
    """Numbers of cores that both tables have: two tasks or two nodes at least."""
    counts = numbers(option, text)
    if any(count % 2 for count in counts):
        raise ValueError(f"{option}={text!r}: two nodes, or two tasks a node, make even numbers, as 4/8/16")
    return counts


def on_two_nodes(cores: int) -> Place:
    """The paper's first table."""
    return Place(2, cores // 2)


def by_two_tasks(cores: int) -> Place:
    """The paper's second table."""
    return Place(cores // 2, 2)


def hidden_layers(text: str) -> tuple[int, ...]:
    """The sizes of hidden layers from text such as 500-500."""
    words = text.split("-")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"layers={text!r}: write the sizes of the hidden layers with - between, as 200-200")
    return tuple(int(word) for word in words)
