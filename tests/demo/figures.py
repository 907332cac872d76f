"""Figures of acts that nobody ran, to see what the demo says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.demo.eight_machines import EightMachines
from shoal.demo.killed import Kill, Killed
from shoal.demo.machine_load import MachineLoad
from shoal.demo.sentences import Acts
from shoal.demo.this_machine import APART, DDP, ONE, TWO, ThisMachine, Trial

QUIET = MachineLoad(cores=2, others=0.02)


def here(
    two: float = 1.85,
    ddp: float = 1.29,
    apart: float = 1.91,
    accuracies: tuple[float, float] = (98.9, 99.1),
    load: MachineLoad = QUIET,
) -> ThisMachine:
    """Three rounds of ten seconds for one worker, with these speed-ups in the middle one."""
    rounds = [
        {
            ONE: Trial(10.0, accuracies[1]),
            TWO: Trial(10.0 / (two + off), accuracies[0]),
            DDP: Trial(10.0 / (ddp + off), 99.0),
            APART: Trial(10.0 / (apart + off), None),
        }
        for off in (-0.05, 0.0, 0.02)
    ]
    return ThisMachine(load, 1_201_162, 32_000, 64, rounds)


def eight(
    speed_ups: Mapping[str, float] | None = None, accuracies: Mapping[str, float] | None = None
) -> EightMachines:
    """Runs of ten virtual seconds on one machine, that learn evenly."""
    speeds = {"single": 1.0, "sync": 0.3, "bmuf": 4.6, "diloco": 4.5, **(speed_ups or {})}
    reached = {"single": 99.6, "sync": 98.9, "bmuf": 99.5, "diloco": 99.4, **(accuracies or {})}
    records = [record(word, 10.0 / speeds[word], reached[word]) for word in speeds]
    predicted = {str(record["strategy"]): 1.1 * record["seconds"] for record in records}
    return EightMachines(0.0026, "250Mbit,1ms", records, predicted)


def record(word: str, seconds: float, accuracy: float) -> dict[str, Any]:
    curve = [
        {
            "seconds": seconds * part,
            "samples": 1000 * part,
            "test_accuracy": accuracy * part,
            "test_loss": 1.0,
        }
        for part in (0.0, 0.5, 1.0)
    ]
    return {
        "strategy": word,
        "transport": "sim",
        "seconds": seconds,
        "test_accuracy": accuracy,
        "wait_fraction": 0.3,
        "bytes_sent": 1_000_000,
        "parameters": 269_322,
        "curve": curve,
    }


def killed(last: float = 0.08, kills: int = 2, faults: tuple[str, ...] | None = None) -> Killed:
    """A loss of 0.5 until the middle, and `last` at the end."""
    names = [Kill("worker 2", 4711, 4.0), Kill("the server", 4712, 6.0)]
    losses = [(second / 2, 0.5 if second <= 10 else last) for second in range(21)]
    back = "the server died and came back at version 534; nothing was lost"
    return Killed(names[:kills], losses, 3, 2, (back,) if faults is None else faults, 97.2, 118_282)


def acts(**parts: Any) -> Acts:
    """All three, with these instead of the usual ones."""
    return Acts(**{"here": here(), "eight": eight(), "killed": killed(), **parts})
