"""Act 2: eight machines on an office link, in virtual time with this machine's measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shoal.core.task import Task
from shoal.planning.contenders import Contender
from shoal.planning.probing import probe
from shoal.planning.run_time import run_cost
from shoal.planning.workload import Site
from shoal.profiling.step import measure_step
from shoal.sim import Compute, Network
from shoal.sim.hardware import Machine
from shoal.strategies.bmuf import BMUF
from shoal.strategies.diloco import DiLoCo
from shoal.strategies.single import Single
from shoal.strategies.sync import Sync
from shoal.studies.study import Lab, time_to

MACHINES = 8
PERIOD = 32
STRATEGIES = {
    "single": Single(),
    "sync": Sync(),
    "bmuf": BMUF(period=PERIOD, warmup=0),
    "diloco": DiLoCo(period=PERIOD),
}
RARE = ("bmuf", "diloco")  # those that do not talk at every step


@dataclass(frozen=True)
class EightMachines:
    """The figures of act 2: the record of one run for each strategy, all on the same number of samples."""

    step_seconds: float  # measured
    network: str
    records: Sequence[Mapping[str, Any]]
    predicted: Mapping[str, float]  # seconds of each strategy, by the formulas of shoal plan, before it ran

    def record(self, strategy: str) -> Mapping[str, Any]:
        """The run of that strategy."""
        return next(record for record in self.records if record["strategy"] == strategy)

    def speed_up(self, strategy: str) -> float:
        """How many times as fast as one machine the samples were done."""
        return float(self.record("single")["seconds"]) / float(self.record(strategy)["seconds"])

    def accuracy(self, strategy: str) -> float:
        """Of the trained model on the test set, in per cent."""
        return float(self.record(strategy)["test_accuracy"])

    @property
    def target(self) -> float:
        """The highest half per cent that one machine, bmuf and diloco have all exceeded in the end."""
        lowest = min(self.accuracy(strategy) for strategy in ("single", *RARE))
        return math.ceil(2 * lowest - 1) / 2

    def prediction_error(self, strategy: str) -> float:
        """How far the prediction was off, of what came of it."""
        return self.predicted[strategy] / float(self.record(strategy)["seconds"]) - 1

    def seconds_to_target(self, strategy: str) -> float | None:
        """Virtual seconds until the test accuracy exceeds the target; None if it never does."""
        return time_to(self.target, self.record(strategy)["curve"])


def simulate_eight(lab: Lab, task: Task, epochs: int, network: str) -> EightMachines:
    """Measure the step, then train with each strategy on simulated machines of that speed."""
    lab.say("act 2 of 3: measuring a step of this machine")
    step = measure_step(task)
    compute, links = Compute(step.seconds, step.jitter), Network.parse(network)
    predicted = predict(task, epochs, Site(links, Machine(), compute))
    records = []
    for word, strategy in STRATEGIES.items():
        machines = 1 if word == "single" else MACHINES
        told = "one machine" if machines == 1 else f"{machines} machines with {word}"
        result = lab.run(
            f"act 2 of 3: {told}, virtual time",
            task,
            strategy,
            workers=machines,
            epochs=epochs,
            transport="sim",
            network=links,
            compute=compute,
        )
        records.append(result.record())
    return EightMachines(step.seconds, network, records, predicted)


def predict(task: Task, epochs: int, site: Site) -> dict[str, float]:
    """The seconds of each strategy, by formulas."""
    workload = probe(task, [])
    found = {}
    for word, strategy in STRATEGIES.items():
        options = {f.name: getattr(strategy, f.name) for f in fields(strategy)}
        contender = Contender(word, 1 if word == "single" else MACHINES, options)
        found[word] = (
            epochs * run_cost(contender, workload, lambda nodes, codec, served: site, epochs).seconds
        )
    return found
