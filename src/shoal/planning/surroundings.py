"""Surroundings from a profile: machines like this one, on a network or as processes of one of them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.codecs import CODECS
from shoal.core.task import Task
from shoal.planning.workload import Site
from shoal.profiling.measure import measure_profile
from shoal.profiling.trials import compute_here
from shoal.sim import Compute, Network
from shoal.sim.hardware import Machine, Profile

LEFT_OUT = ("factors", "by_layer", "sparse")
"""Codecs whose size depends on more than the length of a vector."""


def profile_of(given: Profile | str | Path | None, tell: Callable[[str], None]) -> Profile:
    """The profile that was given, or one that is measured now."""
    if given is None:
        return measure_profile(lambda what: tell(f"measuring {what}"))
    return given if isinstance(given, Profile) else Profile.load(given)


def codecs_of(profile: Profile) -> list[str]:
    """The codecs that a plan looks at: those whose speed was measured."""
    return [word for word in profile.codecs if word in CODECS and word not in LEFT_OUT]


def check_host(profile: Profile, compute: Compute | None) -> None:
    """Raise ValueError for a profile of another machine, unless the time of a step there is given."""
    here = platform.node()
    if profile.host != here and compute is None:
        raise ValueError(
            f"the profile was measured on {profile.host}, and a step would be timed on {here}; give "
            f"--compute with what it takes on {profile.host}, or measure this machine with shoal calibrate"
        )


@dataclass
class Machines:
    """How nodes meet their machines, for run after run: call it with their number and a codec's word."""

    profile: Profile
    network: Network | None  # None: all nodes are processes of one machine
    task: Task | None
    compute: Compute | None = None  # None: the task's step, measured as virtual time does
    _steps: dict[tuple[int, int], Compute] = field(default_factory=dict)

    def __call__(self, nodes: int, codec: str, has_server: bool = False) -> Site:
        threads = max(1, self.profile.cores // (nodes if self.network is None else 1))
        network, machine = self.profile.of_run(nodes, codec, self.network, threads, has_server)
        return Site(network, machine, self.compute or self._measured(machine, threads))

    def _measured(self, machine: Machine, threads: int) -> Compute:
        """What a step takes with so many threads beside as many processes as a machine has cores for."""
        busy = min(machine.cores, machine.per_host) if self.network is None else 1
        if (busy, threads) not in self._steps:
            assert self.task is not None, "a plan without a task is told what a step takes"
            self._steps[busy, threads] = compute_here(self.task, machine, busy, threads=threads)
        return self._steps[busy, threads]
