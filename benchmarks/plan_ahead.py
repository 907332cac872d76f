"""How near a plan is that has seen only the beginning of a run: whole runs in virtual time beside it.

Every setting is trained to its end, and one worker too. A plan sees the first `--seen` of each learning curve
and continues it; the rest tells how many samples the setting really needed beside one worker.

    python benchmarks/plan_ahead.py [--task mnist] [--workers 8] [--epochs 3] [--seen 0.1]
        [--strategies bmuf:period=16,diloco:period=16,local:period=16,asgd]

The last line is JSON: the median and the largest error of the ratio of samples, as shares of it, the same for
the ratio as it was read off, without continuing it, and the error of one worker's accuracy in points.
"""

from __future__ import annotations

import argparse
import json
from math import isfinite
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import shoal
from shoal.planning.curves_ahead import Baseline, continued, ratio_of
from shoal.programs.tasks import TASKS

TESTS = 90
LAST = 8  # tests that are taken together at the end


def curve_of(options: argparse.Namespace, word: str, workers: int) -> list[dict[str, Any]]:
    """The learning curve of a whole run."""
    done = shoal.run(
        TASKS.make(options.task),
        shoal.strategies.STRATEGIES.read(word),
        workers=workers,
        epochs=options.epochs,
        transport="sim",
        network="100Mbit,20ms",
        compute="20ms,5%",
        scale_lr="none" if workers == 1 else "auto",
        tests=TESTS,
    )
    return done.curve


def beginning(curve: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """What a plan has seen."""
    return [point for point in curve if point["samples"] <= share * curve[-1]["samples"]]


def measured_ratio(curve: list[dict[str, Any]], baseline: Baseline) -> tuple[float, float]:
    """Samples needed over those of one worker at the end of a run, and how many the latter are."""
    last = curve[-LAST:]
    loss, samples = fmean(p["test_loss"] for p in last), fmean(p["samples"] for p in last)
    alone = baseline.samples_to(loss)
    return samples / alone, alone


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seen", type=float, default=0.1)
    parser.add_argument("--strategies", default="bmuf:period=16,diloco:period=16,local:period=16,asgd")
    options = parser.parse_args()
    alone = curve_of(options, "single", 1)
    whole, seen = Baseline.of([alone]), Baseline.of([beginning(alone, options.seen)])
    assert whole is not None
    assert seen is not None
    table = Table("setting", "read off", "continued", "measured")
    errors: list[float] = []
    kept: list[float] = []
    for word in options.strategies.split(","):
        curve = curve_of(options, word, options.workers)
        measured, goal = measured_ratio(curve, whole)
        first = beginning(curve, options.seen)
        early = ratio_of([first], seen, 0.0)
        if not isfinite(early.value):
            continue
        ahead = continued(early, first[-1]["samples"], goal)
        errors.append(ahead.value / measured - 1)
        kept.append(early.value / measured - 1)
        told = f"{ahead.value:.2f} ({ahead.low:.2f}–{ahead.high:.2f})"
        table.add_row(word, f"{early.value:.2f}", told, f"{measured:.2f}")
    Console().print(table)
    figures = {
        "median error": median(map(abs, errors)),
        "largest error": max(map(abs, errors)),
        "median error, not continued": median(map(abs, kept)),
    }
    if whole.error is not None and seen.error is not None:
        samples = alone[-1]["samples"]
        end = fmean(p["test_accuracy"] for p in alone[-LAST:])
        figures["accuracy, points"] = 100 - seen.error.at(samples).value - end
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
