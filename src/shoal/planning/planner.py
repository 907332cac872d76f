"""plan(): measures a task, prices every setting by formulas, tries the few best, and orders them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from time import process_time

from shoal.core.task import Task
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.forecasting import goal_samples
from shoal.planning.noise_scale import measure_noise
from shoal.planning.objectives import DEFAULT_EPOCHS, Objective, duration
from shoal.planning.pricing import Pricing, Timings, notes
from shoal.planning.probing import probe
from shoal.planning.run_time import RunCost
from shoal.planning.short_runs import (
    AT_FIRST,
    LONGEST,
    LONGEST_OF_SHORT,
    Allowance,
    Bench,
    Race,
    needed,
    race,
)
from shoal.planning.surroundings import Machines, check_host, codecs_of, profile_of
from shoal.planning.survivors import guessed_ratio, machines, survivors
from shoal.planning.training_plan import TrainingPlan
from shoal.programs.tasks import TASKS
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile

SHARE = 0.10  # of the run's machine-seconds that a plan may cost
FREE = 20.0  # seconds that a plan may always take
NOISE_SECONDS = 1.0  # of the processor, after which the noise scale is known well enough
BESIDE = 1.5  # times as long as its gradients a short run takes: tests, messages, the simulator
AT_LEAST = 4  # settings for whose short runs there is to be room
MOST_EPOCHS = 100  # beyond which a target counts as out of reach


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
    batch: int | None = None,
    lr: float | None = None,
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
    `memory` is what each machine has, in bytes. `strategies` are looked at alone; one with options, such as
    "local:period=8", with these alone. `batch` and `lr` are instead of the task's own. Without `trials`
    nothing is trained, and settings are ordered by time alone. `tell` hears what is being done.
    Raises ValueError for a target that nobody reaches and for a profile of another machine.
    """
    chosen = (TASKS.read(task) if isinstance(task, str) else task).but(batch, lr)
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
    if not trials and (target is not None or limit is not None):
        goal = "--target" if target is not None else "--within"
        raise ValueError(
            f"{goal} asks for an accuracy, which --no-trials leaves unknown; leave one of them out"
        )
    links = Network.parse(network) if isinstance(network, str) else network
    step = Compute.parse(compute) if isinstance(compute, str) else compute
    timings = Timings()
    with timings.of("machine"):
        known = profile_of(profile, tell)
    check_host(known, step)
    site = Machines(known, links, chosen, step)
    with timings.of("step"):
        tell(f"measuring a step of {chosen.name}")
        workload = probe(chosen, codecs_of(known), seed)
        site(1, "none")
    pricing = Pricing(workload, workers, site, objective, memory)
    made = Planner(chosen, pricing, scale_lr, seed, tell, timings).plan(strategies, trials)
    return replace(made, task=task) if isinstance(task, str) else made


@dataclass
class Planner:
    """One plan of a task in the making."""

    task: Task
    pricing: Pricing
    scale_lr: str
    seed: int
    tell: Callable[[str], None]
    timings: Timings

    def plan(self, words: Iterable[str] | None, trials: bool) -> TrainingPlan:
        """All of it."""
        with self.timings.of("formulas"):
            costs = self.pricing.price(words)
        inside = self.pricing.fitting(costs)
        noise, second = self.noise() if trials else (None, 0.0)
        found = self.race(inside, noise, second) if trials and len(inside) > 1 else None
        objective = self.resolved(found)
        made = self.pricing.plan(costs, inside, objective, (self.task.lr, self.scale_lr), noise, found)
        told = [] if found is not None or len(inside) == 1 else self.untrained()
        return replace(made, notes=[*told, *notes(made)], taken=dict(self.timings.taken))

    def untrained(self) -> list[str]:
        """What to say where no short run was made."""
        told = ["nothing was trained: accuracy is not predicted, and settings are ordered by time alone"]
        asked = self.pricing.objective
        if asked != asked.by_time:
            told.append(f"{asked.text} plays no part in that order")
        return told

    def noise(self) -> tuple[float | None, float]:
        """The noise scale, and the processor seconds that a sample takes here."""
        with self.timings.of("noise"):
            self.tell("comparing gradients of half batches")
            began = process_time()
            found = measure_noise(self.task, self.task.data(), seed=self.seed, seconds=NOISE_SECONDS)
            samples = found.updates * self.task.batch
            return found.value, (process_time() - began) / samples if samples else 0.0

    def race(self, inside: Mapping[Contender, RunCost], noise: float | None, second: float) -> Race | None:
        """Try the few best; None if there is no room for it."""
        pricing, objective = self.pricing, self.pricing.objective
        workload, site, samples = pricing.workload, pricing.site, objective.epochs * pricing.workload.samples

        def whole(c: Contender) -> float:
            ratio = guessed_ratio(c, workload, noise)
            return machines(c) * inside[c].seconds * objective.epochs * ratio

        def score(c: Contender, ratio: float) -> float:
            return objective.key(inside[c], machines(c), ratio)

        tenth = SHARE * min(whole(c) for c in inside) - self.timings.total
        longest = int((LONGEST if tenth > FREE else LONGEST_OF_SHORT) * samples)
        allowance = Allowance(max(FREE, tenth), longest, BESIDE * second)
        most = allowance.usual(AT_LEAST)
        short = {c: v for c, v in inside.items() if c == SINGLE or needed(c, workload.batch) <= most}
        entrants = survivors(short, workload, objective, noise, AT_FIRST)
        if not entrants:  # too short for so many: whoever is left after the first run
            entrants = survivors(inside, workload, objective, noise, AT_FIRST)

        def compute(c: Contender) -> Compute:
            return site(machines(c), c.codec, machines(c) > c.workers).compute

        bench = Bench(self.task, site.network, compute, site.profile, self.scale_lr, self.seed, self.tell)
        with self.timings.of("trials"):
            return race(bench, entrants, allowance, score)

    def resolved(self, found: Race | None) -> Objective:
        """The objective, once it is known whether the task is judged by accuracy or by loss.

        Raises ValueError for a target that nobody reaches.
        """
        objective = self.pricing.objective
        if found is None:
            return objective.by_time
        if objective.target is None:
            return objective
        objective = replace(objective, is_loss=found.baseline.error is None)
        epochs = goal_samples(objective, found.baseline, 1) / self.pricing.workload.samples
        if epochs > MOST_EPOCHS:
            at = "never" if not isfinite(epochs) else f"after about {epochs:,.0f} epochs"
            raise ValueError(
                f"nobody reaches {objective.goal}: one worker would get there {at}, going by the beginning "
                "of its learning curve; ask for less"
            )
        return objective
