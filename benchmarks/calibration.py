"""How near virtual time is to real time: settings predicted from a profile of this machine, then run.

The machine is measured once, as `shoal calibrate` does, and each task's step by itself in one process. Every
setting is then run in virtual time and on real processes of this machine, start-up and tests left out.

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
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

import shoal
from shoal.profiling.measure import measure_profile
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.sim.hardware import Profile

STRATEGIES = "sync,local:period=8,bmuf:period=8,easgd:period=4,asgd,downpour"


def predict(setting: dict[str, Any], profile: Profile, transport: str, compute: shoal.Compute) -> Any:
    """The run in virtual time, as processes of one machine that use this transport."""
    here = replace(profile, transports={"processes": profile.wiring(transport)})
    return shoal.run(**setting, transport="sim", profile=here, compute=compute)


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
        compute = measure_step(TASKS.make(task)).compute()
        for workers in map(int, options.workers.split(",")):
            for transport in options.transports.split(","):
                for word in options.strategies.split(","):
                    strategy = shoal.strategies.STRATEGIES.read(word)
                    setting: dict[str, Any] = {
                        "task": task,
                        "strategy": strategy,
                        "workers": workers,
                        "tests": 0,
                        "threads": 1,
                    }
                    setting["epochs"] = epochs_for(options.seconds, setting, profile, transport, compute)
                    predicted = predict(setting, profile, transport, compute).seconds
                    taken = [
                        shoal.run(**setting, transport=transport).seconds for _ in range(options.repeats)
                    ]
                    error = predicted / median(taken) - 1
                    name = f"{task} {workers} {transport} {word}"
                    row = {"setting": name, "predicted": predicted, "measured": median(taken), "error": error}
                    print(
                        f"{name}: predicted {predicted:.2f} s, measured {median(taken):.2f} s, {error:+.1%}",
                        flush=True,
                    )
                    rows.append(row)
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
