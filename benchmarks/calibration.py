"""How near virtual time is to real time: settings predicted from a profile of this machine, then run.

The machine is measured as `shoal calibrate` does, and each task's step in as many processes as the run has
workers, before and after the run: where a machine's speed changes by the minute, a prediction can be no
better than what it is told of that. Every setting is run in virtual time and on real processes of this
machine, start-up and tests left out.

    python benchmarks/calibration.py [--profile FILE] [--tasks digits,mnist] [--workers 2] [--seconds 4]
        [--strategies sync,local:period=8,bmuf:period=8,easgd:period=4,asgd,downpour] [--repeats 1]
        [--transports processes,grpc]

Each run is about `--seconds` long by the prediction. The last line is JSON: median and p90 of the error's
size, bias, the mean of the error itself, all as shares of the measured time, and the number of settings.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

import shoal
from shoal.profiling.measure import measure_profile
from shoal.profiling.trials import measure_step_among
from shoal.programs.tasks import TASKS
from shoal.sim.hardware import Profile

STRATEGIES = "sync,local:period=8,bmuf:period=8,easgd:period=4,asgd,downpour"


def predict(
    setting: dict[str, Any], profile: Profile, transport: str, compute: shoal.Compute
) -> shoal.Result:
    """The run in virtual time, as processes of one machine that use this transport."""
    here = replace(
        profile,
        transports={"processes": profile.wiring(transport)},
        servers={"processes": profile.wiring(transport, has_server=True)},
    )
    return shoal.run(**setting, transport="sim", profile=here, compute=compute)


def step_here(task: str, workers: int, profile: Profile) -> shoal.Compute:
    """What a step of the task takes now while so many processes train it."""
    machine = profile.machine("processes", per_host=workers)
    busy = min(workers, machine.cores)
    step = measure_step_among(TASKS.make(task), busy)
    return replace(step.compute(), mean=step.seconds * machine.speed(busy))


def epochs_for(
    seconds: float, setting: dict[str, Any], profile: Profile, transport: str, compute: shoal.Compute
) -> int:
    """How many epochs take about so long."""
    one = predict({**setting, "epochs": 1}, profile, transport, compute)
    return max(1, round(seconds / one.seconds))


def measure(options: argparse.Namespace, profile: Profile) -> list[dict[str, Any]]:
    """Every setting, predicted and measured."""
    rows = []
    for task in options.tasks.split(","):
        for workers in map(int, options.workers.split(",")):
            compute = step_here(task, workers, profile)
            for transport, word in product(options.transports.split(","), options.strategies.split(",")):
                strategy = shoal.strategies.STRATEGIES.read(word)
                setting: dict[str, Any] = {"task": task, "strategy": strategy, "workers": workers}
                setting |= {"tests": 0, "threads": 1}
                setting["epochs"] = epochs_for(options.seconds, setting, profile, transport, compute)
                taken = [shoal.run(**setting, transport=transport).seconds for _ in range(options.repeats)]
                before, compute = compute, step_here(task, workers, profile)
                between = replace(compute, mean=(before.mean + compute.mean) / 2)
                predicted = predict(setting, profile, transport, between).seconds
                error = predicted / median(taken) - 1
                name = f"{task} {workers} {transport} {word}"
                said = f"predicted {predicted:.2f} s, measured {median(taken):.2f} s, {error:+.1%}"
                print(f"{name}: {said}; a step {1e3 * between.mean:.2f} ms", flush=True)
                figures = {"predicted": predicted, "measured": median(taken), "error": error}
                rows.append({"setting": name, **figures})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="seconds in virtual time and on real processes")
    for name in ("setting", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        table.add_row(
            row["setting"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}", f"{row['error']:+.1%}"
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--profile", help="a file of `shoal calibrate`; by default the machine is measured now"
    )
    parser.add_argument("--tasks", default="digits,mnist")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--transports", default="processes,grpc")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run, about")
    parser.add_argument(
        "--repeats", type=int, default=1, help="real runs of each setting; their median counts"
    )
    options = parser.parse_args()
    profile = measure_profile() if options.profile is None else Profile.load(options.profile)
    rows = measure(options, profile)
    show(rows)
    errors = [row["error"] for row in rows]
    sizes = [abs(error) for error in errors]
    p90 = quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]
    print(json.dumps({"median": median(sizes), "p90": p90, "bias": fmean(errors), "settings": len(rows)}))


if __name__ == "__main__":
    main()
