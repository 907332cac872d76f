"""What the demo's figures say, in words: every sentence is computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.demo.eight_machines import MACHINES, RARE, EightMachines
from shoal.demo.killed import Killed
from shoal.demo.machine_load import MachineLoad
from shoal.demo.this_machine import APART, DDP, ONE, PERIOD, TWO, WORKERS, ThisMachine
from shoal.report.units import percent_text, seconds_text
from shoal.sim import Network

EVEN = 0.05  # speeds this close are within the noise
SAME_POINTS = 0.5  # accuracies this close, in percentage points, are the same on 2,000 test samples
SCRIPT = """import shoal
training = shoal.attach(model, optimizer)   # after the optimizer is made
for x, y in shoal.shard(loader):            # instead of: for x, y in loader"""
LOW_CEILING = 1.6  # below it, two workers cannot show what they can do


@dataclass(frozen=True)
class Acts:
    """The figures of all three acts."""

    here: ThisMachine
    eight: EightMachines
    killed: Killed


def closing_lines(acts: Acts) -> list[str]:
    """The five lines of the last screen."""
    return [
        two_workers(acts.here),
        beside_them(acts.here),
        eight_machines(acts.eight),
        killed(acts.killed),
        conclusion(acts),
    ]


# -- act 1 -----------------------------------------------------------------------------------------


def about_load(load: MachineLoad) -> str:
    """How many cores there are, and who else uses them."""
    cores = "1 core" if load.cores == 1 else f"{load.cores} cores"
    if load.others is None:
        return f"This machine has {cores}; it does not say how busy they are."
    told = f"This machine has {cores}; other programs use {percent_text(load.others)} of them."
    if load.cores < WORKERS:
        return f"{told} Two workers will share it, and cannot be faster than one."
    if load.is_busy:
        return f"{told} Expect lower speed-ups in act 1 than on a quiet machine."
    return told


def two_workers(here: ThisMachine) -> str:
    """Whether two workers were faster than one, and as accurate."""
    reached = compared(here.accuracy(TWO), here.accuracy(ONE))
    told = f"Two workers on this machine were {pace(here.speed_up(TWO), 'one')}, {reached}"
    if here.load.others is not None and here.load.is_busy:
        return f"{told}, while other programs used {percent_text(here.load.others)} of the cores."
    return f"{told}."


def beside_them(here: ThisMachine) -> str:
    """DDP on the same work, and the ceiling; if the ceiling is low, the reason."""
    ddp, ceiling = here.speed_up(DDP), here.speed_up(APART)
    told = (
        f"PyTorch's DDP was {pace(ddp, 'one')} on the same work; the ceiling, two workers that never talk, "
        f"is {times(ceiling)} times"
    )
    if ceiling < (1 - EVEN) * here.speed_up(TWO):
        return f"{told}, less than two that do: the machine was too uneven to measure this."
    return f"{told}." if ceiling >= LOW_CEILING else f"{told}, because {low_ceiling(here.load)}."


def low_ceiling(load: MachineLoad) -> str:
    """Why even two workers that never talk are hardly faster than one."""
    if load.cores < WORKERS:
        return "there is only one core"
    if load.is_busy:
        return f"other programs use {percent_text(load.others)} of the cores"
    return "the cores slow each other down"


# -- act 2 -----------------------------------------------------------------------------------------


def eight_machines(eight: EightMachines) -> str:
    """Averaging at every step against averaging now and then, on the simulated link."""
    rare = " and ".join(f"{word} {times(eight.speed_up(word))}" for word in RARE)
    return (
        f"{MACHINES} machines with {link_text(eight.network)} (virtual time): averaging at every step, as "
        f"DDP does, was {pace(eight.speed_up('sync'), 'one machine')}; on the same samples {rare} times as "
        f"fast, {accuracy_of_rare(eight)}."
    )


def accuracy_of_rare(eight: EightMachines) -> str:
    """How accurate those that average now and then are, compared with one machine."""
    reached, single = [eight.accuracy(word) for word in RARE], eight.accuracy("single")
    if all(abs(accuracy - single) <= SAME_POINTS for accuracy in reached):
        return "at the same accuracy"
    told = " and ".join(f"{accuracy:.1f} %" for accuracy in reached)
    return f"at {told} accuracy instead of {single:.1f} %"


def to_target(eight: EightMachines) -> str:
    """How long each took to the same test accuracy."""
    told = []
    for record in eight.records:
        word = str(record["strategy"])
        seconds = eight.seconds_to_target(word)
        name = "one machine" if word == "single" else word
        told.append(f"{name} {'never' if seconds is None else f'after {seconds_text(seconds)} s'}")
    return f"{eight.target:g} % of the test digits were read correctly by {', '.join(told)} of virtual time."


def foretold(eight: EightMachines) -> str:
    """What was predicted before anything ran, and how near that was."""
    told = [f"{word} {seconds_text(eight.predicted[word])} s" for word in eight.predicted]
    worst = max(abs(eight.prediction_error(word)) for word in eight.predicted)
    return (
        f"The formulas of shoal plan had predicted {enumeration(told)} before anything ran: off by "
        f"{percent_text(worst)} at most."
    )


def link_text(network: str) -> str:
    """A network in words: '250Mbit,1ms' is 'links of 250 Mbit/s and 1 ms'."""
    links = Network.parse(network)
    rate = (
        f"{links.bandwidth * 8 / 1e6:g} Mbit/s" if math.isfinite(links.bandwidth) else "unlimited bandwidth"
    )
    lossy = f", losing {100 * links.loss:g} %" if links.loss else ""
    return f"links of {rate} and {1e3 * links.latency:g} ms{lossy}"


# -- act 3 -----------------------------------------------------------------------------------------


def killed(figures: Killed) -> str:
    """Who was killed, and how the loss went on."""
    if not figures.kills:
        return "Nobody was killed: the run was over too soon."
    names = enumeration([kill.name for kill in figures.kills])
    was = "was" if len(figures.kills) == 1 else "were"
    before, after = loss_before(figures), figures.last_loss
    went = "fell on" if after < before else "rose"
    lost = ", and no update was lost" if lost_nothing(figures) else ""
    return (
        f"{names[0].upper()}{names[1:]} {was} killed in mid-run: training went on, the loss {went} from "
        f"{before:.2f} to {after:.2f}{lost}."
    )


def loss_before(figures: Killed) -> float:
    """The loss when the first process was killed."""
    return figures.loss_near(figures.kills[0].seconds)


def lost_nothing(figures: Killed) -> bool:
    """Whether the restarted server reported that its journal had every update."""
    return any(fault.endswith("nothing was lost") for fault in figures.faults)


# -- all of them -----------------------------------------------------------------------------------


def conclusion(acts: Acts) -> str:
    """What Shoal was good for in this run."""
    good = [part for part in (_slow_links(acts.eight), _local_cores(acts.here), _deaths(acts.killed)) if part]
    if not good:
        return "In this run Shoal gained nothing over DDP."
    return f"So use Shoal {enumeration(good)}."


def _slow_links(eight: EightMachines) -> str:
    best = best_of_eight(eight)
    gain = eight.speed_up(best) / eight.speed_up("sync")
    if best not in RARE or gain <= 1 + EVEN:
        return ""
    return f"where links are slow (here {times(gain)} times as fast as averaging at every step)"


def _local_cores(here: ThisMachine) -> str:
    gain = here.speed_up(TWO) / here.speed_up(DDP)
    if min(gain, here.speed_up(TWO)) <= 1 + EVEN or here.speed_up(APART) < LOW_CEILING:
        return ""  # with a low ceiling, the figures say more about the machine than about Shoal
    return f"on the cores of one machine ({times(gain)} times as fast as DDP)"


def _deaths(figures: Killed) -> str:
    survived = len(figures.kills) > 1 and figures.last_loss < loss_before(figures)
    return "where processes may die" if survived else ""


def best_of_eight(eight: EightMachines) -> str:
    """The fastest strategy of those about as accurate as one machine; `single` if none is faster."""
    enough = eight.accuracy("single") - 2 * SAME_POINTS
    words = [str(record["strategy"]) for record in eight.records]
    return max((word for word in words if eight.accuracy(word) >= enough), key=eight.speed_up)


def next_command(acts: Acts, program: str) -> str:
    """The command for the user's own script on this machine, with the strategy that was fastest here."""
    here = acts.here
    workers = max(WORKERS, here.load.cores)
    rare = here.speed_up(TWO) >= (1 - EVEN) * here.speed_up(DDP)
    strategy = f"bmuf --strategy.period {PERIOD}" if rare else "sync"
    return f"{program} run -n {workers} --strategy {strategy} train.py"


def program_name(executable: str, found: str | None, here: str) -> str:
    """How to call shoal from the folder `here`: by name if that finds this one, else by its path."""
    mine = Path(executable).parent / "shoal"
    if found is not None and Path(found).parent == mine.parent:
        return "shoal"
    return str(mine.relative_to(here)) if mine.is_relative_to(here) else str(mine)


def pace(ratio: float, whom: str) -> str:
    """A speed-up in words: '1.83 times as fast as one', or slower, or no faster."""
    if ratio < 1 - EVEN:
        return f"slower than {whom} ({times(ratio)} times its speed)"
    if ratio <= 1 + EVEN:
        return f"no faster than {whom} ({times(ratio)} times)"
    return f"{times(ratio)} times as fast as {whom}"


def times(ratio: float) -> str:
    """A ratio to three digits, at least one of them after the point below 100."""
    return f"{ratio:.2f}" if ratio < 2.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def compared(mine: float | None, theirs: float | None) -> str:
    """An accuracy beside another, in words."""
    if mine is None or theirs is None:
        return "with no accuracy measured"
    points = mine - theirs
    if abs(points) <= SAME_POINTS:
        return "at the same accuracy"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} accurate"


def enumeration(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
