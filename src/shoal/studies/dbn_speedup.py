"""Time to 90 % accuracy of a deep belief network on many cores of several nodes (Ma 2014)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from shoal.core.errors import Diverged
from shoal.core.task import Task
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.replicas.batches import steps_per_epoch
from shoal.report.findings import Findings
from shoal.runs.result import Result
from shoal.sim import Compute, Link, Network
from shoal.strategies import STRATEGIES
from shoal.strategies.asgd import ASGD
from shoal.strategies.single import Single
from shoal.studies.belief_stages import Examples, Net, Recipe, Runner
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
class Cluster:
    """A number of nodes with `tasks` workers each, one per core. A server has its own core on node 0."""

    nodes: int
    tasks: int

    @property
    def cores(self) -> int:
        """The number of cores of all workers."""
        return self.nodes * self.tasks

    def __str__(self) -> str:
        return f"{self.nodes} x {self.tasks}"

    def network(self, within: str, between: str, servers: int = 0) -> Network:
        """A network with one kind of link within a node and another between nodes."""
        node = [*(rank // self.tasks for rank in range(self.cores)), *[0] * servers]
        inside = Network.parse(within)
        link = Link(inside.latency, inside.bandwidth)
        ranks = range(len(node))
        links = {(a, b): link for a in ranks for b in ranks if a != b and node[a] == node[b]}
        return replace(Network.parse(between), links=links)


@dataclass(frozen=True)
class DbnSpeedup(Study):
    """Seconds of pretraining, layer by layer, and of fine-tuning until the test accuracy exceeds `accuracy`.

    Pretraining takes `pretrain` epochs per layer with `strategy` for any number of workers. Models are
    averaged `averages` times per epoch; block momentum is 1 - 1/workers, at most `most_block_momentum`.
    Fine-tuning takes `finetune_strategy` and the learning rate of one worker times the number of workers, at
    most `most_finetune_lr`. It sees `labelled` rows, or `labelled_each` per worker if that is more, once.
    `server` gives numbers of cores for the paper's method, asynchronous SGD with one server; `real` gives
    numbers of processes on this machine; none skips them. `virtual=false` skips virtual time.
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
            raise ValueError("virtual=false leaves nothing to do; add numbers of processes, as in real=1/2/4")

    def run(self, lab: Lab) -> Findings:
        with TemporaryDirectory(prefix="shoal-") as folder:
            lab.say("reading the data")
            runs = ClusterRuns(self, lab, Examples(TASKS.make(self.task).data(), Path(folder)))
            rows = runs.virtual() if self.virtual else []
            rows += runs.real() if self.real else []
        return Findings(
            study="dbn-speedup",
            title=f"A deep belief network: time to {self.accuracy:g} % against cores",
            source=self.source,
            tables=list(tables(rows, self._ours())),
            charts=list(charts(rows)),
            claims=list(claims(rows)),
            remarks=list(self._remarks()),
            settings={**asdict(self), "step_seconds": runs.step_seconds},
        )

    def recipe(self, workers: int, rows: int) -> Recipe:
        """The settings for a number of workers and of training rows."""
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
        """The paper's method: gradients without momentum to one server, at equivalent learning rates."""
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
        """A strategy by name, with those of our options that it accepts."""
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
            f"The time is that of pretraining, {self.pretrain} epoch(s) per layer, the same work for all, "
            f"and of fine-tuning to {self.accuracy:g} %. The paper does not give the length of "
            "pretraining or the sizes of its layers. Its times are of another machine: compare speed-ups."
        )
        yield (
            "Tuning: fine-tuning. Error: reconstruction error of the first layer on test rows, in nats; if "
            "it exceeds that of one worker, many workers learnt less from the same work."
        )
        if self.virtual:
            yield (
                "Virtual time with steps measured for each stage and a jitter of "
                f"{self.jitter:.0%}; the models are trained in full. Links: {self.within} within a node, "
                f"{self.between} between nodes. In a ring one task of a node sends to another node and one "
                "receives, so tasks do not share the network card. Averaging models and computing the inputs "
                "of the next layer take no virtual time."
            )
            yield (
                "2 tasks a node: if links do not change results, as with bmuf and sync, these are the "
                "networks of the first table, timed by runs that send the same messages and compute nothing."
            )
        if self.virtual and self.server:
            yield (
                "One server: each worker pulls the model before every step and pushes every gradient, which "
                "the server applies on arrival at the rates of one worker. Its core is not counted."
            )
        if self.real:
            yield f"Real times are of processes on {os.cpu_count()} cores that other programs may have used."


class ClusterRuns:
    """Makes the runs of the study, and a row for each network."""

    def __init__(self, study: DbnSpeedup, lab: Lab, examples: Examples) -> None:
        self._study, self._lab, self._examples = study, lab, examples
        self._rows = len(examples.rows.x)
        self._steps: dict[str, Compute] = {}

    @property
    def step_seconds(self) -> dict[str, float]:
        """The measured seconds of a step, by stage."""
        return {stage: step.mean for stage, step in self._steps.items()}

    def virtual(self) -> list[dict[str, Any]]:
        """The rows of one worker, of both tables of the paper, and of its own method."""
        counts = even("cores", self._study.cores)
        served = even("server", self._study.server) if self._study.server else []
        alone = Cluster(1, 1)
        nets = {alone: self._net("one worker", alone, self._recipe(1))}
        rows = [self._row(FIXED_NODES, alone, nets[alone])]
        for cores in counts:
            cluster = on_two_nodes(cores)
            nets[cluster] = self._net(str(cluster), cluster, self._recipe(cores))
            rows.append(self._row(FIXED_NODES, cluster, nets[cluster]))
        rows.append(self._row(FIXED_TASKS, alone, nets[alone]))
        for cores in counts:
            cluster, known = by_two_tasks(cores), nets[on_two_nodes(cores)]
            if cluster not in nets:
                nets[cluster] = known and self._elsewhere(known, cluster, self._recipe(cores))
            rows.append(self._row(FIXED_TASKS, cluster, nets[cluster]))
        rows += [self._row(SERVER, alone, nets[alone])] if served else []
        for cluster in map(on_two_nodes, served):
            papers = self._study.papers(cluster.cores, self._rows)
            net = self._net(f"one server, {cluster}", cluster, papers)
            rows.append(self._row(SERVER, cluster, net))
        return compared(rows)

    def real(self) -> list[dict[str, Any]]:
        """The rows of processes on this machine, one thread each."""
        rows = []
        for count in sorted({1, *numbers("real", self._study.real or "")}):
            settings = {"workers": count, "transport": "processes", "threads": 1}
            name = f"{count} processes"
            net = self._train(name, self._recipe(count), self._runner(name, settings))
            rows.append(tabulate(REAL, (1, count), net, self._study.accuracy, "real"))
        return compared(rows)

    def _recipe(self, workers: int) -> Recipe:
        return self._study.recipe(workers, self._rows)

    def _row(self, table: str, cluster: Cluster, net: Net | None) -> dict[str, Any]:
        return tabulate(table, (cluster.nodes, cluster.tasks), net, self._study.accuracy, "virtual")

    def _net(self, name: str, cluster: Cluster, recipe: Recipe) -> Net | None:
        servers = max(recipe.strategy.servers, recipe.finetune_strategy.servers)
        return self._train(name, recipe, self._simulator(name, cluster, servers))

    def _elsewhere(self, net: Net, cluster: Cluster, recipe: Recipe) -> Net | None:
        """The same network on other nodes; trained again if links may change its results."""
        if any(s.servers or s.survives for s in (recipe.strategy, recipe.finetune_strategy)):
            return self._net(str(cluster), cluster, recipe)  # the order of arrival may change results
        return net.timed(recipe, self._simulator(f"{cluster}, the clock", cluster, 0))

    def _train(self, name: str, recipe: Recipe, run: Runner) -> Net | None:
        """Train a network; None if it diverged."""
        try:
            return self._examples.train(recipe, run)
        except Diverged:
            self._lab.keep(name, {"diverged": True})
            return None

    def _simulator(self, name: str, cluster: Cluster, servers: int) -> Runner:
        """A runner in virtual time."""
        network = cluster.network(self._study.within, self._study.between, servers)
        settings = {"workers": cluster.cores, "transport": "sim", "network": network}
        return self._runner(name, {**settings, "collective": self._study.collective})

    def _runner(self, name: str, settings: dict[str, Any]) -> Runner:
        def run(stage: str, task: Task, strategy: Strategy, epochs: int) -> Result:
            own = {**settings, "epochs": epochs, "seed": self._study.seed}
            if settings["transport"] == "sim":
                own["compute"] = self._step(stage, task)
            return self._lab.run(f"{name}, {stage}", task, strategy, **own)

        return run

    def _step(self, stage: str, task: Task) -> Compute:
        """The cost of a step of a stage: measured once, the same for all numbers of workers."""
        if stage not in self._steps:
            self._lab.say(f"measuring a step of {stage}")
            self._steps[stage] = replace(measure_step(task).compute(), jitter=self._study.jitter)
        return self._steps[stage]


def even(option: str, text: str) -> list[int]:
    """Numbers of cores for both tables; they must be even."""
    counts = numbers(option, text)
    if any(count % 2 for count in counts):
        raise ValueError(
            f"{option}={text!r}: two nodes, or two tasks a node, need even numbers, as in 4/8/16"
        )
    return counts


def on_two_nodes(cores: int) -> Cluster:
    """The layout of the first table of the paper."""
    return Cluster(2, cores // 2)


def by_two_tasks(cores: int) -> Cluster:
    """The layout of the second table of the paper."""
    return Cluster(cores // 2, 2)


def hidden_layers(text: str) -> tuple[int, ...]:
    """Read the sizes of hidden layers from text such as 500-500."""
    words = text.split("-")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(
            f"layers={text!r}: write the sizes of the hidden layers with - between, as in 200-200"
        )
    return tuple(int(word) for word in words)
