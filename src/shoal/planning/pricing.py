"""Pricing: what every setting costs by the formulas, and the plan that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from shoal.planning.contenders import SINGLE, Contender, contenders, one_sided_words
from shoal.planning.forecasting import forecast_all
from shoal.planning.message_time import Wire
from shoal.planning.noise_scale import useful_workers
from shoal.planning.objectives import Objective
from shoal.planning.plan_text import speed_up
from shoal.planning.rules import Situation, rule_for, warnings
from shoal.planning.run_time import RunCost, run_cost
from shoal.planning.short_runs import Race
from shoal.planning.surroundings import Machines
from shoal.planning.training_plan import TrainingPlan
from shoal.planning.workload import Workload

Costs = Mapping[Contender, RunCost]


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


@dataclass(frozen=True)
class Pricing:
    """A workload on some machines, and what is asked for."""

    workload: Workload
    workers: int  # at most
    site: Machines
    objective: Objective
    memory: int | None  # bytes of each machine

    def price(self, words: Iterable[str] | None, *, own_loop: bool = False) -> dict[Contender, RunCost]:
        """The cost of every setting; `own_loop` for a script."""
        epochs, workload = self.objective.epochs, self.workload
        steps = epochs * -(-workload.samples // workload.batch)
        apart = one_sided_words() if self.site.network is not None else {}
        listed = contenders(
            self.workers,
            steps,
            workload.codecs,
            words=words,
            refused={**workload.refused, **apart},
            own_loop=own_loop,
        )
        enough = [c for c in listed if workload.samples >= c.workers]
        return {c: run_cost(c, workload, self.site, epochs) for c in enough}

    def fitting(self, costs: Costs) -> dict[Contender, RunCost]:
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

    def situation(self, costs: Costs) -> Situation:
        """What the rules look at, on all workers."""
        site = self.site(self.workers, "none")
        slow = [factor for rank, factor in site.compute.slow.items() if rank < self.workers]
        return Situation(
            site.compute.mean,
            self.workload.nbytes,
            Wire(site.network, site.machine, self.workers).whole,
            self.workers,
            site.compute.jitter,
            max([1.0, *slow]),
            costs[SINGLE].seconds * self.objective.epochs,
            by_epochs=self.objective.by_epochs,
            samples=self.workload.samples,
            batch=self.workload.batch,
        )

    def plan(
        self,
        costs: Costs,
        inside: Costs,
        objective: Objective,
        rates: tuple[float | None, str],
        noise: float | None = None,
        found: Race | None = None,
        script: Sequence[str] | None = None,
    ) -> TrainingPlan:
        """The plan that these figures make; `rates` are the learning rate and how it is scaled."""
        rule = rule_for(self.situation(costs))
        return TrainingPlan(
            self.workload.task,
            script,
            self.workload,
            self.site.profile,
            self.site.network,
            self.site(1, "none").compute,
            objective,
            *rates,
            forecast_all(inside, self.workload, objective, found),
            len(costs),
            (rule.number, rule.because),
            noise,
            None if found is None else found.baseline,
        )


def notes(made: TrainingPlan) -> list[str]:
    """What to beware of with the choice of a plan."""
    told = warnings(made.choice.contender, made.workload)
    choice, up = made.choice.contender, speed_up(made, made.choice)
    if up is not None and choice.workers > 1 and up > choice.workers:
        told.append(
            f"{choice.workers} workers are predicted to be {up:.3g} times as fast as one, which is more than "
            "they can be: trust the order, not the figure"
        )
    if made.noise is not None:
        fine, most = useful_workers(made.noise, made.workload.batch)
        told.append(
            f"the gradient noise scale is about {made.noise:,.0f} samples at first: up to {fine} workers are "
            f"worth their samples then, and more than {most} save hardly a step"
        )
    return told
