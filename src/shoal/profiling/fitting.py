"""Fits what messages cost, so that virtual time reproduces real runs that exchange vectors at every step.

What a message costs is more than what its transport takes: the engine looks at it, waiting processes wake up.
So two workers train small nets and large ones on real processes; and virtual time tells what a message, and a
byte of it, must cost for such runs to take as long there. Messages among workers and
those to a server go different ways: each kind is fitted by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from shoal.core.codec import Identity
from shoal.launch.audience import Audience
from shoal.profiling.trials import BY_MESSAGES, NEVER, net_task, step_seconds
from shoal.runs.plan import Plan
from shoal.runs.simulated import VirtualTime, run_simulated
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile, Wiring
from shoal.strategies.asgd import ASGD
from shoal.strategies.local import Local
from shoal.strategies.sync import Sync
from shoal.vocabulary.strategy import Strategy

SHORT, MIDDLE, LONG = 24, 320, 1000
"""Widths of the nets that are tried: 1,200, 205,000 and 2 million parameters."""

STEPS = {SHORT: 200, MIDDLE: 66, LONG: 20}
"""How often each is exchanged on real processes in each round."""

ROUNDS = 3
"""Of trials: a core's speed changes from second to second, so each is beside one of the same round."""

FITS = (("each", SHORT), ("byte", LONG), ("large", MIDDLE), ("byte", LONG))
"""What of a message's cost is fitted to the trial of which model, one after the other."""

FIRST_GUESS = {"each": 1e-4, "large": 1e-4, "byte": 1e-10}
"""Seconds that a part may cost."""

VIRTUAL_STEPS = 10
WORKERS = 2
SILENT = ""  # in place of a transport
TRIES = 6
NEAR = 0.005


RealSteps = dict[tuple[int, str, type[Strategy]], float]
"""(width, transport, strategy) -> seconds of a step; what is silent has no transport."""


def real_steps(transports: Sequence[str], tell: Callable[[str], None]) -> RealSteps:
    """Seconds of a step with and without messages, over each transport, by trials in several rounds."""
    tasks = {width: net_task(width, WORKERS * steps) for width, steps in STEPS.items()}
    kinds: list[tuple[str, Strategy]] = [(SILENT, Local(period=NEVER))]
    kinds += [(kind, strategy) for kind in transports for strategy in (Sync(), ASGD())]
    taken: dict[tuple[int, str, type[Strategy]], list[float]] = {}
    for number in range(ROUNDS):
        tell(f"messages between processes, round {number + 1} of {ROUNDS}")
        for width, task in tasks.items():
            for kind, strategy in kinds:
                seconds = step_seconds(task, strategy, WORKERS, kind or "processes")
                taken.setdefault((width, kind, type(strategy)), []).append(seconds)
    return beside_silent(taken)


def beside_silent(taken: Mapping[tuple[int, str, type[Strategy]], Sequence[float]]) -> RealSteps:
    """The usual step without messages, and times that the usual ratio of each to the one of its round."""
    found = {}
    for (width, kind, strategy), steps in taken.items():
        silent = taken[width, SILENT, Local]
        ratio = median(step / alone for step, alone in zip(steps, silent, strict=True))
        found[width, kind, strategy] = median(silent) * ratio
    return found


def fit_wirings(profile: Profile, transport: str, latency: float, real: RealSteps) -> tuple[Wiring, Wiring]:
    """What messages among workers cost over a transport, and what those to a server cost."""
    found = []
    for strategy in (Sync(), ASGD()):
        wiring = Wiring(latency=latency)
        for part, width in FITS:
            trial = VirtualTrial(profile, part, width, silent=real[width, SILENT, Local])
            wiring = trial.fitted(wiring, strategy, real[width, transport, type(strategy)])
        found.append(wiring)
    return found[0], found[1]


class VirtualTrial:
    """A trial in virtual time, by what `part` of handling a message costs; `silent` is a step without any."""

    def __init__(self, profile: Profile, part: str, width: int, silent: float) -> None:
        self._profile, self._part, self._silent = profile, part, silent
        self._task = net_task(width, WORKERS * VIRTUAL_STEPS, batch=1)  # its time is `silent`, not its own

    def fitted(self, wiring: Wiring, strategy: Strategy, real: float) -> Wiring:
        """The wiring with the cost at which a step takes as long as the real one, the same at both ends."""

        def step(cost: float) -> float:
            return self.step_seconds(self._with(wiring, cost), strategy)

        return self._with(wiring, solve(step, real, FIRST_GUESS[self._part]))

    def _with(self, wiring: Wiring, cost: float) -> Wiring:
        handling = replace(wiring.send, **{self._part: cost})
        return replace(wiring, send=handling, receive=handling)

    def step_seconds(self, wiring: Wiring, strategy: Strategy) -> float:
        """Virtual seconds of a step over that wiring."""
        settings = {"workers": WORKERS, "transport": "sim", "collective": BY_MESSAGES, "tests": 0}
        plan = Plan(self._task, strategy, Identity(), **settings)  # type: ignore[arg-type]
        profile = replace(self._profile, transports={"trial": wiring})
        machine = profile.machine("trial", per_host=plan.nodes)
        compute = Compute(mean=self._silent * machine.speed(WORKERS))
        virtual = VirtualTime(Network(wiring.latency, wiring.bandwidth), compute, machine)
        return run_simulated(plan, virtual, None, Audience(None)).seconds / VIRTUAL_STEPS


def solve(seconds: Callable[[float], float], target: float, cost: float) -> float:
    """The cost at which `seconds`, which grows with it, comes to the target; 0 if it is more without any.

    Begins with `cost`, and goes by the last two it has tried. The nearest of all that it has tried counts.
    """
    before, before_seconds = 0.0, seconds(0.0)
    tried = [(abs(before_seconds - target), 0.0)]
    if before_seconds >= target:
        return 0.0
    for _ in range(TRIES):
        taken = seconds(cost)
        tried.append((abs(taken - target), cost))
        if tried[-1][0] <= NEAR * target or taken == before_seconds:
            break
        slope = (taken - before_seconds) / (cost - before)
        before, before_seconds, cost = cost, taken, max(cost / 4, cost + (target - taken) / slope)
    return min(tried)[1]
