"""Test accuracy of synchronous training with each codec, compared with training without one.

All have the same task, samples and seeds. Virtual time by default; results equal those of real processes.

    python benchmarks/codec_accuracy.py [--task mnist] [--workers 4] [--epochs 2] [--seeds 0,1,2]
        [--codecs "one_bit;top_k:density=0.01,feedback=none"] [--json FILE]

SHOAL_DATA in the environment names the folder that holds mnist/ (or fashion-mnist/) with its four files. The
last line is JSON: for each codec how many points of test accuracy it is ahead of training without one, the
mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import shoal
from shoal.codecs import CODECS
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy

CONTROL = "top_k:density=0.001,feedback=none"
AIMS = {
    "one_bit": -0.5,
    "qsgd": -0.5,
    "dgc": -0.5,
    "low_rank": -0.5,
    "ternary": -1.0,
    "threshold": -1.0,
}
"""How far behind each codec may be, with error feedback; the control should be clearly worse."""

DEFAULT = ";".join(
    [
        *("fp16", "bf16", "int8", "one_bit", "ternary", "qsgd", "top_k:density=0.001", "threshold"),
        *("dgc:density=0.001,warmup=10", "low_rank:rank=2", CONTROL),
    ]
)


MOMENTUM_RATE = 0.3
"""Factor of the learning rate for a codec with momentum, whose steps are longer."""


def train(codec: str, strategy: Strategy, options: argparse.Namespace, seed: int) -> float:
    """Test accuracy in per cent."""
    task = TASKS.make(options.task)
    lr = task.lr if options.lr is None else options.lr
    if CODECS.read(codec).for_gradients:
        lr *= MOMENTUM_RATE
    task = replace(task, lr=lr)
    result = shoal.run(
        task,
        strategy,
        workers=options.workers,
        epochs=options.epochs,
        seed=seed,
        codec=codec,
        transport=options.transport,
    )
    if result.test_accuracy is None:
        raise SystemExit(f"{options.task} has no test accuracy; take a task with classes, such as mnist")
    return result.test_accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist", choices=list(TASKS))
    parser.add_argument("--strategy", default="sync")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seeds", default="0", help="numbers separated by commas")
    parser.add_argument("--codecs", default=DEFAULT, help="separated by semicolons, options behind a colon")
    parser.add_argument("--transport", default="sim")
    parser.add_argument("--json", type=Path, help="write all accuracies to this file")
    options = parser.parse_args()
    strategy = STRATEGIES.make(options.strategy)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found: dict[str, list[float]] = {}
    print(f"{options.task}, {options.strategy}, {options.workers} workers, {options.epochs} epochs")
    for codec in ["none", *options.codecs.split(";")]:
        CODECS.read(codec)  # report a wrong name before training
        found[codec] = [train(codec, strategy, options, seed) for seed in seeds]
        ahead = mean(found[codec]) - mean(found["none"])
        aim = AIMS.get(codec.partition(":")[0])
        judged = "" if aim is None else f"   at least {aim}: {'met' if ahead >= aim else 'MISSED'}"
        listed = " ".join(f"{accuracy:6.2f}" for accuracy in found[codec])
        print(f"  {codec:36} {listed}   mean {mean(found[codec]):6.2f}   {ahead:+.2f}{judged}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    base = mean(found["none"])
    print(json.dumps({codec: round(mean(each) - base, 2) for codec, each in found.items()}))


if __name__ == "__main__":
    main()
