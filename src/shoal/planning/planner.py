"""plan(): measures a task, prices every setting by formulas, tries the few best, and orders them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from time import perf_counter

from shoal.codecs import CODECS
from shoal.core.task import Task
from shoal.planning.contenders import SINGLE, Contender, contenders
from shoal.planning.forecasting import forecast_all, goal_samples
from shoal.planning.message_time import Wire
from shoal.planning.noise_scale import measure_noise, useful_workers
from shoal.planning.objectives import DEFAULT_EPOCHS, Objective, duration
from shoal.planning.probing import probe
from shoal.planning.rules import Situation, rule_for, warnings
from shoal.planning.run_time import RunCost, run_cost
from shoal.planning.surroundings import Machines, check_host, profile_of
from shoal.planning.survivors import guessed_ratio, machines, survivors
from shoal.planning.training_plan import TrainingPlan
from shoal.planning.trials import AT_FIRST, Bench, Race, lengths, race
from shoal.planning.workload import Workload
from shoal.programs.tasks import TASKS
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile

SHARE = 0.10  # of the run's machine-seconds that a plan may cost
FREE = 20.0  # seconds that a plan may always take
BESIDE = 2.0  # times as long as its gradients a short run takes: tests, messages, the simulator
MOST_EPOCHS = 100  # beyond which a target counts as out of reach
LEFT_OUT = ("factors", "by_layer", "sparse")  # codecs whose size depends on more than the vector


def plan(
    task: Task | str,
    workers: int,
    *,
    network: Network | str | None = None,
    compute: Compute | str | None = None,
    profile: Profile | str | Path | None = None,
    epochs: int | None = None,
    target: float | None = None,
    within: float | str | None = None,
    fewest_bytes: bool = False,
    price: float | None = None,
    memory: int | None = None,
    strategies: Iterable[str] | None = None,
    scale_lr: str = "auto",
    trials: bool = True,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainingPlan:
    """Find out which strategy, period, codec and number of workers, up to `workers`, suits a task best.

    Nodes are machines like this one on `network`, or without one processes of this machine. `profile` is what
    `shoal calibrate` has measured; without one it is measured now. `compute` replaces the time of a step,
    which is measured otherwise. By default the best setting is the first to get where one worker is after
    `epochs`, 5 unless given. With `target` it is the first at that accuracy; with `within`, such as "10min",
    the most accurate by then; with `epochs` alone, the most accurate after so many; with `fewest_bytes` the
    one that sends least to get there; with `price`, that of a machine for an hour, the cheapest.
    `memory` is what each machine has, in bytes. Without `trials` nothing is trained, and settings are ordered
    by time alone. `tell` hears what is being done.
    Raises ValueError for a target that nobody reaches and for a profile of another machine.
    """
    chosen = TASKS.make(task) if isinstance(task, str) else task
    limit = duration(within) if isinstance(within, str) else within
    others = target is not None or limit is not None or fewest_bytes or price is not None
    objective = Objective(
        epochs or DEFAULT_EPOCHS,
        target,
        limit,
        by_epochs=epochs is not None and not others,
        fewest_bytes=fewest_bytes,
        price=price,
    )
    if workers < 1:
        raise ValueError(f"workers={workers}: a run needs at least 1 worker")
    links = Network.parse(network) if isinstance(network, str) else network
    step = Compute.parse(compute) if isinstance(compute, str) else compute
    account = Timings()
    with account.of("machine"):
        known = profile_of(profile, tell)
    check_host(known, step)
    site = Machines(known, links, chosen, step)
    planner = Planner(chosen, workers, site, objective, scale_lr, memory, seed, tell, account)
    return planner.plan(strategies, trials)


@dataclass
class Timings:
    """Seconds that each part of a plan takes."""

    taken: dict[str, float] = field(default_factory=dict)
    _part: str = ""
    _began: float = 0.0

    def of(self, part: str) -> Timings:
        """Time the block that follows as that part."""
        self._part = part
        return self

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.taken[self._part] = self.taken.get(self._part, 0.0) + perf_counter() - self._began

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.taken.values())


@dataclass
class Planner:
    """One plan in the making."""

    task: Task
    workers: int
    site: Machines
    objective: Objective
    scale_lr: str
    memory: int | None
    seed: int
    tell: Callable[[str], None]
    account: Timings

    def plan(self, words: Iterable[str] | None, trials: bool) -> TrainingPlan:
        """All of it."""
        with self.account.of("step"):
            self.tell(f"measuring a step of {self.task.name}")
            codecs = [word for word in self.site.profile.codecs if word in CODECS and word not in LEFT_OUT]
            workload = probe(self.task, codecs, self.seed)
            self.site(1, "none")
        with self.account.of("formulas"):
            costs = self.price(workload, words)
        inside = self.fitting(costs)
        noise, second = self.noise(workload) if trials else (None, 0.0)
        found = self.race(workload, inside, noise, second) if trials and len(inside) > 1 else None
        return self.summed_up(workload, costs, inside, noise, found)

    def price(self, workload: Workload, words: Iterable[str] | None) -> dict[Contender, RunCost]:
        """The cost of every setting by the formulas."""
        epochs = self.objective.epochs
        steps = epochs * -(-workload.samples // workload.batch)
        listed = contenders(self.workers, steps, workload.codecs, words=words)
        self.tell(f"pricing {len(listed):,} settings")
        return {c: run_cost(c, workload, self.site, epochs) for c in listed if workload.samples >= c.workers}

    def fitting(self, costs: Mapping[Contender, RunCost]) -> dict[Contender, RunCost]:
        """Those that the memory of a machine holds. Raises ValueError if none is."""
        if self.memory is None:
            return dict(costs)
        inside = {c: cost for c, cost in costs.items() if cost.memory <= self.memory}
        if SINGLE not in inside:
            raise ValueError(
                f"the model needs {costs[SINGLE].memory:,.0f} bytes on one machine and --memory has "
                f"{self.memory:,}: rule 1, cut it first, with shoal split"
            )
        return inside

    def noise(self, workload: Workload) -> tuple[float | None, float]:
        """The noise scale, and the seconds that a sample takes here."""
        with self.account.of("noise"):
            self.tell("comparing gradients of half batches")
            updates, began = 200, perf_counter()
            found = measure_noise(self.task, self.task.data(), updates, self.seed)
            return found, (perf_counter() - began) / (updates * workload.batch)

    def race(
        self, workload: Workload, inside: Mapping[Contender, RunCost], noise: float | None, second: float
    ) -> Race | None:
        """Try the few best; None if there is no room for it."""
        objective, samples = self.objective, self.objective.epochs * workload.samples
        entrants = survivors(inside, workload, objective, noise, AT_FIRST)

        def whole(c: Contender) -> float:
            ratio = guessed_ratio(c, workload, noise)
            return machines(c) * inside[c].seconds * objective.epochs * ratio

        tenth = SHARE * min(whole(c) for c in [*entrants, SINGLE]) - self.account.total
        affordable = max(FREE, tenth) / (BESIDE * second)
        length, number = lengths(samples, affordable, len(entrants), is_short=tenth < FREE)
        steps = length / workload.batch
        entrants = [c for c in entrants if steps / 4 / c.workers / c.period >= 1][:number]
        if not entrants or steps < 10:
            return None
        compute = self.site.step(max(1, self.site.profile.cores))
        bench = Bench(
            self.task, self.site.network, compute, self.site.profile, self.scale_lr, self.seed, self.tell
        )

        def score(c: Contender, seconds: float, ratio: float) -> float:
            return objective.key(inside[c], machines(c), ratio)

        with self.account.of("trials"):
            return race(bench, entrants, length, score)

    def summed_up(
        self,
        workload: Workload,
        costs: Mapping[Contender, RunCost],
        inside: Mapping[Contender, RunCost],
        noise: float | None,
        found: Race | None,
    ) -> TrainingPlan:
        objective = self.resolved(found)
        forecasts = forecast_all(inside, workload, objective, found)
        alone = self.site(1, "none")
        situation = self.situation(workload, costs)
        rule = rule_for(situation)
        made = TrainingPlan(
            self.task.name,
            None,
            workload,
            self.site.profile,
            self.site.network,
            alone.compute,
            objective,
            self.scale_lr,
            forecasts,
            len(costs),
            (rule.number, rule.because),
            noise,
            found is not None and found.baseline.error is None,
            taken=dict(self.account.taken),
        )
        return replace(made, notes=self.notes(made, noise, trained=found is not None))

    def resolved(self, found: Race | None) -> Objective:
        """The objective, once it is known whether the task is judged by accuracy or by loss.

        Raises ValueError for a target that nobody reaches.
        """
        objective = self.objective
        if objective.target is None or found is None:
            return objective
        baseline = found.baseline
        objective = replace(objective, is_loss=baseline.error is None)
        needed = goal_samples(objective, baseline, 1)
        epochs = needed / len(self.task.data().x)
        if epochs > MOST_EPOCHS:
            at = "never" if not isfinite(epochs) else f"after about {epochs:,.0f} epochs"
            raise ValueError(
                f"nobody reaches {objective.text.removesuffix(' soonest')}: one worker would get there {at}, "
                "going by the beginning of its learning curve; ask for less"
            )
        return objective

    def situation(self, workload: Workload, costs: Mapping[Contender, RunCost]) -> Situation:
        """What the rules look at, on all workers."""
        site = self.site(self.workers, "none")
        slow = [factor for rank, factor in site.compute.slow.items() if rank < self.workers]
        return Situation(
            site.compute.mean,
            workload.nbytes,
            Wire(site.network, site.machine, self.workers).whole,
            self.workers,
            site.compute.jitter,
            max([1.0, *slow]),
            costs[SINGLE].seconds * self.objective.epochs,
            by_epochs=self.objective.by_epochs,
        )

    def notes(self, made: TrainingPlan, noise: float | None, *, trained: bool) -> list[str]:
        """What to beware of, and what the plan could not tell."""
        choice, told = made.choice.contender, []
        if not trained and self.workers > 1:
            told.append(
                "nothing was trained: accuracy is not predicted, and settings are ordered by time alone"
            )
        told += warnings(choice, made.workload)
        if noise is not None:
            fine, most = useful_workers(noise, made.workload.batch)
            told.append(
                f"the gradient noise scale is about {noise:,.0f} samples: up to {fine} workers are worth "
                f"their samples, and more than {most} save hardly a step"
            )
        return told
