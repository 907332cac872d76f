"""plan_script(): a plan for a user's script, by what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.planning.objectives import Objective
from shoal.planning.pricing import Pricing, Timings, notes
from shoal.planning.script_probe import probe_script
from shoal.planning.surroundings import Machines, check_host, codecs_of, profile_of
from shoal.planning.training_plan import TrainingPlan
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile


def plan_script(
    script: Sequence[str],
    workers: int,
    *,
    network: Network | None = None,
    compute: Compute | None = None,
    profile: Profile | str | Path | None = None,
    objective: Objective | None = None,
    memory: int | None = None,
    strategies: Iterable[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainingPlan:
    """The same for a script that calls attach(), with its arguments: by time alone.

    Raises ShoalError if it never calls attach(), and ValueError for a goal that only accuracy tells.
    """
    asked = objective or Objective()
    if asked.target is not None or asked.within is not None or asked.by_epochs:
        raise ValueError(
            f"{script[0]} tells no accuracy before it has run, so a plan cannot aim for one; leave --target, "
            "--within and --epochs out, or plan a task"
        )
    timings = Timings()
    with timings.of("machine"):
        known = profile_of(profile, tell)
    check_host(known, compute)
    with timings.of("step"):
        tell(f"running {script[0]} for some steps")
        probed = probe_script(script, codecs_of(known), known.cores if network is not None else 1)
    site = Machines(known, network, None, compute or probed.compute)
    pricing = Pricing(probed.workload, workers, site, asked, memory)
    with timings.of("formulas"):
        costs = pricing.price(strategies, own_loop=True)
    made = pricing.plan(costs, pricing.fitting(costs), asked, (None, "none"), script=list(script))
    return replace(made, notes=[*probed.notes, *notes(made)], taken=dict(timings.taken))
