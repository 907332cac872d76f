"""What the study of plans trains, and where: tasks, scripts, networks; a plan and a real run of each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from shoal.api.run import run
from shoal.core.errors import WorkerFailed
from shoal.planning.contenders import PLANNED, Contender
from shoal.planning.planner import plan
from shoal.planning.probing import refused_by
from shoal.planning.script_plan import plan_script
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.sim import Network
from shoal.sim.hardware import Profile
from shoal.strategies import STRATEGIES
from shoal.studies.busy_neighbour import busy_neighbour
from shoal.studies.host_runs import LONGEST_SECONDS, run_on_hosts, script_on_hosts
from shoal.studies.shaped_hosts import ShapedHosts

HERE = "here"
"""The network of two processes of this machine."""

WORKERS = 2
TESTS = 40  # of the model in a real run
SEED = 7  # of real runs; the short runs of a plan have others
LONGER = 1.5  # times as long as predicted a run is, to see when it gets to the goal
SCRIPT_SECONDS = 8.0  # about so long a script trains
GRACE_SECONDS = 30.0  # in which a run that is given up ends its workers
TOOK = re.compile(r"took ([0-9.]+) s")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """A task with the test accuracy to get to, in per cent, or a script."""

    name: str
    target: float | None = None
    epochs: int = 5  # of one worker, about, to the target

    @property
    def script(self) -> Path:
        """The file, of a program without a target."""
        return Path(__file__).with_name(f"{self.name}.py")


PROGRAMS = (
    Program("digits", 94.0, 8),
    Program("mnist", 96.0, 2),
    Program("mnist-cnn", 96.0, 1),
    Program("speech", 87.0, 1),
    Program("shakespeare", 34.0, 1),
    Program("picture_loop"),
    Program("recurrent_loop"),
)


@dataclass(frozen=True)
class RealRun:
    """What was measured of one setting."""

    contender: Contender
    to_goal: float | None  # seconds; None: it did not get there
    seconds: float
    samples: float
    score: float | None  # in the end: accuracy in per cent, or loss


@dataclass(frozen=True)
class LinkedMachines:
    """A network: two hosts with links of some rate, or processes of this machine."""

    name: str
    profile: Profile
    hosts: ShapedHosts | None = None

    @property
    def network(self) -> Network | None:
        """As the plan is told."""
        return None if self.hosts is None else Network.parse(f"{self.name},0ms")

    @property
    def machine(self) -> Profile:
        """A host is one core of this machine."""
        return self.profile if self.hosts is None else replace(self.profile, cores=1, slowdown=(1.0,))

    @property
    def words(self) -> list[str] | None:
        """The strategies to choose from; a server would be a host more than there are cores."""
        return None if self.hosts is None else without_server()

    def beside(self, workers: int) -> AbstractContextManager[None]:
        """On hosts, keep the other one busy while there is a single worker."""
        return nullcontext() if self.hosts is None or workers > 1 else busy_neighbour()


def without_server() -> list[str]:
    """The strategies that need no server, and run the optimizers of all programs."""
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    refused = refused_by(torch.optim.Adam(weights), torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    made = {word: STRATEGIES.make(word) for word in PLANNED if word not in refused}
    return [word for word, strategy in made.items() if not (strategy.servers or strategy.one_sided)]


def planned(program: Program, machines: LinkedMachines, tell: Tell) -> TrainingPlan:
    """The plan of a program there."""
    where: dict[str, Any] = {
        "network": machines.network,
        "profile": machines.machine,
        "strategies": machines.words,
    }
    with machines.beside(1):
        if program.target is None:
            return plan_script([str(program.script)], WORKERS, tell=tell, **where)
        goal: dict[str, Any] = {"target": program.target, "epochs": program.epochs}
        return plan(program.name, WORKERS, **goal, tell=tell, **where)


def candidates(made: TrainingPlan, others: int) -> list[Forecast]:
    """What is really run: the plan's choice, so many of the next best, plain `sync`, and one worker."""
    choice = made.choice
    rest = [f for f in made.ranked if f.contender not in (choice.contender, made.single.contender)]
    sync = [f for f in made.forecasts if f.contender == Contender("sync", WORKERS)]
    chosen = {f.contender.name: f for f in (choice, *rest[:others], *sync, made.single)}
    return list(chosen.values())


def epochs_for(made: TrainingPlan, forecast: Forecast, longest: float) -> int:
    """Epochs of a real run: somewhat longer than to the goal, and no longer than that many seconds."""
    if made.script is not None:
        return max(1, round(SCRIPT_SECONDS / made.single.cost.seconds))
    needed = forecast.epochs or made.single.epochs or made.objective.epochs
    most = max(1, int(longest / forecast.cost.seconds))
    return min(most, ceil(LONGER * needed))


def really_run(
    program: Program, machines: LinkedMachines, made: TrainingPlan, forecast: Forecast, longest: float
) -> RealRun:
    """Train one setting."""
    contender, epochs = forecast.contender, epochs_for(made, forecast, longest)
    with machines.beside(contender.workers):
        if program.target is None:
            seconds = script_seconds(program.script, machines, contender, epochs)
            return RealRun(contender, seconds, seconds, epochs * made.workload.samples, None)
        result = task_result(program.name, machines, made, contender, epochs)
    score = result.test_loss if made.judged_by_loss else result.test_accuracy
    at = time_to_goal(made, result.curve)
    return RealRun(contender, at, result.seconds, result.samples, score)


def task_result(
    word: str, machines: LinkedMachines, made: TrainingPlan, contender: Contender, epochs: int
) -> Any:
    """The result of a task."""
    settings: dict[str, Any] = {"workers": contender.workers, "epochs": epochs, "tests": TESTS, "seed": SEED}
    settings |= {"scale_lr": made.scale_lr if contender.workers > 1 else "none"}
    if machines.hosts is None:
        return run(word, contender.strategy, codec=contender.codec, servers=contender.servers, **settings)
    settings |= {"transport": "grpc", "threads": 1}
    return run_on_hosts(
        machines.hosts, Plan(TASKS.make(word), contender.strategy, contender.coder, **settings)
    )


def script_seconds(script: Path, machines: LinkedMachines, contender: Contender, epochs: int) -> float:
    """How long a script says that it took."""
    line = [str(script), "--epochs", str(epochs)]
    dotted = {name: str(value) for name, value in contender.options.items()}
    coded = None if contender.codec == contender.strategy.default_codec else contender.codec
    if machines.hosts is not None:
        nodes = {"nodes": contender.workers, "strategy": contender.word, "strategy_options": dotted}
        said = script_on_hosts(machines.hosts, line, {**nodes, "codec": coded})
    else:
        words = ["-n", str(contender.workers), "--strategy", contender.word]
        words += [word for name, value in dotted.items() for word in (f"--strategy.{name}", value)]
        words += [] if coded is None else ["--codec", coded]
        said = launched([*words, "--runs", "none", "--quiet", *line])
    found = TOOK.search(said)
    if found is None:
        raise WorkerFailed(f"{script.name} did not say how long it took", said)
    return float(found[1])


def launched(words: list[str]) -> str:
    """What `shoal run` prints with these words. Raises WorkerFailed if it fails, or takes too long."""
    line = [sys.executable, "-m", "shoal", "run", *words]
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(line, stdin=nothing, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said, errors = process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its workers, which a kill would leave behind
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()  # if it is still there
            raise WorkerFailed(f"shoal run took more than {LONGEST_SECONDS:g} s", "") from None
    if process.returncode:
        raise WorkerFailed(f"shoal run ended with exit code {process.returncode}", errors)
    return said


def time_to_goal(made: TrainingPlan, curve: list[dict[str, Any]]) -> float | None:
    """Seconds until a learning curve is at the plan's goal, between two points; None if it never is."""
    key, sign = ("test_loss", -1.0) if made.judged_by_loss else ("test_accuracy", 1.0)
    target = made.objective.target if made.judged_by_loss else made.objective.percent
    assert target is not None, "a plan of a task has a target here"
    before: tuple[float, float] | None = None
    for point in curve:
        at, reached = float(point["seconds"]), sign * float(point[key])
        if reached >= sign * target:
            if before is None:
                return at
            return before[0] + (at - before[0]) * (sign * target - before[1]) / (reached - before[1])
        before = at, reached
    return None
