"""Time to 90 % of a deep belief network against cores, within nodes and between them (Ma 2014)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from shoal.core.errors import Diverged
from shoal.core.strategy import Strategy
from shoal.core.task import Task
from shoal.report.findings import Findings
from shoal.result import Result
from shoal.sim import Compute, Link, Network
from shoal.strategies import STRATEGIES
from shoal.strategies.asgd import ASGD
from shoal.strategies.single import Single
from shoal.studies.belief_stages import Examples, Net, Recipe
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
from shoal.tasks import TASKS

JITTER = 0.1


@dataclass(frozen=True)
class Place:
    """So many tasks, one a core, on each of so many nodes. A server has a core of its own on the first."""

    nodes: int
    tasks: int

    @property
    def cores(self) -> int:
        """Of all workers."""
        return self.nodes * self.tasks

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes, and tasks of each."""
        return self.nodes, self.tasks

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

    `pretrain` epochs a layer, whatever the number of workers; then fine-tuning, which may see `labelled`
    rows, each once. Rates are those of one worker times the number of workers, up to `most_lr` and
    `most_finetune_lr`. `server` names numbers of cores for the paper's own way, asynchronous SGD through one
    server; `real` names numbers of processes on this machine. none leaves them out, `virtual=false` the rest.
    """

    source: ClassVar[str] = "Ma, Parallel implementation of deep learning using MPI (2014), tables 1 and 2"

    task: str = "mnist"
    layers: str = "200-200"
    accuracy: float = 90.0
    cores: str = "4/8/12/16/20/24/28/32"
    server: str | None = "4/16/32"
    virtual: bool = True
    real: str | None = None
    strategy: str = "local"
    period: int = 8
    reset_momentum: bool = False
    collective: str = "ring"
    batch: int = 10
    pretrain: int = 1
    labelled: int = 20_000
    lr: float = 0.01
    most_lr: float = 0.1
    momentum: float = 0.9
    finetune_lr: float = 0.1
    most_finetune_lr: float = 0.5
    within: str = "80Gbit,2us"
    between: str = "10Gbit,50us"
    seed: int = 0

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
            remarks=self._remarks(),
            settings={**asdict(self), "step_seconds": bench.step_seconds},
        )

    def chosen(self) -> Strategy:
        """The strategy, with those of our options that it has."""
        own = {"period": self.period, "reset_momentum": self.reset_momentum}
        known = STRATEGIES.options(self.strategy)
        return STRATEGIES.make(self.strategy, **{name: own[name] for name in own if name in known})

    def recipe(self, workers: int, plain: bool = False) -> Recipe:
        """What each of so many workers does; `plain` without momentum, at rates that come to the same."""
        gain = 1 / (1 - self.momentum) if plain else 1.0
        return Recipe(
            layers=hidden_layers(self.layers),
            epochs=self.pretrain,
            labelled=self.labelled,
            batch=self.batch,
            lr=gain * min(workers * self.lr, max(self.lr, self.most_lr)),
            momentum=0.0 if plain else self.momentum,
            finetune_lr=gain * min(workers * self.finetune_lr, max(self.finetune_lr, self.most_finetune_lr)),
            finetune_momentum=0.0 if plain else self.momentum,
        )

    def _ours(self) -> str:
        return f"{self.strategy}, {self.task}, layers of {self.layers}, batches of {self.batch}"

    def _remarks(self) -> list[str]:
        return [
            f"The time is that of {self.pretrain} epoch(s) of pretraining for each layer, which is the same "
            f"work for all, and of fine-tuning to {self.accuracy:g} %. What the paper held fixed it does not "
            "say; nor the sizes of its layers. Its times are those of another machine: compare speed-ups.",
            "Virtual time on steps measured stage by stage, with a jitter of 10 %; the numbers are computed "
            f"in full. Links: {self.within} within a node, {self.between} between nodes. By a ring, one task "
            "sends from a node and one receives, so that the tasks of a node never share its card. Adding "
            "models up, and feeding the rows up to the next layer, take no time here, nor at one worker.",
            "Tuning: fine-tuning. Error: what the first layer loses of a test row on the way up and down, in "
            "nats; it is above one worker's where averaging costs pretraining something.",
            "One server: each worker fetches the model before every step and pushes every gradient, which "
            "is applied when it comes, at one worker's rates. The server's core is not counted.",
        ]


class Bench:
    """Makes the runs of a study, and a row of each net."""

    def __init__(self, study: DbnSpeedup, lab: Lab, examples: Examples) -> None:
        self._study, self._lab, self._examples = study, lab, examples
        self._steps: dict[str, Compute] = {}

    @property
    def step_seconds(self) -> dict[str, float]:
        """What a step of each stage took, where it was measured."""
        return {stage: step.mean for stage, step in self._steps.items()}

    def virtual(self) -> list[dict[str, Any]]:
        """One worker, both of the paper's tables, and the paper's own way."""
        counts = places("cores", self._study.cores)
        slow = places("server", self._study.server) if self._study.server else []
        alone = self._net("one worker", Place(1, 1), Single(), self._study.recipe(1))
        strategy, rows, known = self._study.chosen(), [], {Place(1, 1): alone}
        for table, of in ((FIXED_NODES, on_two_nodes), (FIXED_TASKS, by_two_tasks)):
            for place in [Place(1, 1), *map(of, counts)]:
                if place not in known:
                    name = f"{place.nodes} nodes x {place.tasks} tasks"
                    known[place] = self._net(name, place, strategy, self._study.recipe(place.cores))
                rows.append(tabulate(table, place.shape, known[place], self._study.accuracy, "virtual"))
        if slow:
            rows.append(tabulate(SERVER, (1, 1), alone, self._study.accuracy, "virtual"))
        for place in map(on_two_nodes, slow):
            net = self._net(f"one server, {place.cores} cores", place, ASGD(), self._study.recipe(1, True))
            rows.append(tabulate(SERVER, place.shape, net, self._study.accuracy, "virtual"))
        return compared(rows)

    def real(self) -> list[dict[str, Any]]:
        """Processes on this machine, a thread each."""
        rows = []
        for count in sorted({1, *numbers("real", self._study.real or "")}):
            strategy = Single() if count == 1 else self._study.chosen()
            settings = {"workers": count, "transport": "processes", "threads": 1}
            net = self._train(f"{count} processes", strategy, self._study.recipe(count), settings)
            rows.append(tabulate(REAL, (1, count), net, self._study.accuracy, "real"))
        return compared(rows)

    def _net(self, name: str, place: Place, strategy: Strategy, recipe: Recipe) -> Net | None:
        network = place.network(self._study.within, self._study.between, strategy.servers)
        settings = {"workers": place.cores, "transport": "sim", "network": network}
        settings["collective"] = self._study.collective
        return self._train(name, strategy, recipe, settings)

    def _train(self, name: str, strategy: Strategy, recipe: Recipe, settings: dict[str, Any]) -> Net | None:
        """A net, or none where its numbers were no longer finite."""

        def run(stage: str, task: Task, epochs: int) -> Result:
            own = {**settings, "epochs": epochs, "seed": self._study.seed}
            if settings["transport"] == "sim":
                own["compute"] = self._step(stage, task)
            return self._lab.run(f"{name}, {stage}", task, strategy, **own)

        try:
            return self._examples.train(recipe, run)
        except Diverged:
            self._lab.keep(name, {"diverged": True})
            return None

    def _step(self, stage: str, task: Task) -> Compute:
        """What a step of a stage costs: measured the first time, the same for all numbers of workers."""
        if stage not in self._steps:
            self._lab.say(f"measuring a step of {stage}")
            self._steps[stage] = replace(measure_step(task).compute(), jitter=JITTER)
        return self._steps[stage]


def places(option: str, text: str) -> list[int]:
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
