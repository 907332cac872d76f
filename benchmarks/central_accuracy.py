"""Test accuracy of strategies with a server, compared with synchronous training on as many samples.

Real processes on this machine, four workers, every strategy with its defaults; EASGD exchanges every two
steps, because the runs are short.

    python benchmarks/central_accuracy.py [--task mnist] [--workers 4] [--seeds 0,1,2] [--strategies asgd,ssp]

SHOAL_DATA in the environment names the folder that holds mnist/ with its four files.

The last line is JSON: for each strategy how many points of test accuracy it is ahead of synchronous training,
the mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean
from typing import Any

import shoal
from shoal.strategies import STRATEGIES

SETTINGS = {"digits": (20, 0.1), "mnist": (2, 0.05)}  # epochs, learning rate
OPTIONS: dict[str, dict[str, Any]] = {"easgd": {"period": 2}, "eamsgd": {"period": 2, "momentum": 0.5}}
CENTRAL = [word for word in STRATEGIES if STRATEGIES.make(word).servers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist", choices=SETTINGS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--epochs", type=int, help="sweeps over the data, instead of 2 (mnist) or 20 (digits)"
    )
    parser.add_argument("--seeds", default="0", help="numbers separated by commas")
    parser.add_argument("--strategies", default=",".join(CENTRAL), help="words separated by commas")
    options = parser.parse_args()
    epochs, lr = SETTINGS[options.task]
    if options.epochs is not None:
        epochs = options.epochs
    seeds = [int(seed) for seed in options.seeds.split(",")]
    ahead: dict[str, float] = {}
    base = 0.0
    print(f"{options.task}, {options.workers} workers, {epochs} epochs, rate {lr}")
    for word in ["sync", *options.strategies.split(",")]:
        strategy = STRATEGIES.make(word, **OPTIONS.get(word, {}))
        results = [
            shoal.run(options.task, strategy, workers=options.workers, seed=seed, epochs=epochs, lr=lr)
            for seed in seeds
        ]
        accuracies = [result.test_accuracy or 0.0 for result in results]
        late = [result.staleness_mean for result in results if result.staleness_mean is not None]
        if word == "sync":
            base = mean(accuracies)
        else:
            ahead[word] = round(mean(accuracies) - base, 2)
        listed = " ".join(f"{accuracy:6.2f}" for accuracy in accuracies)
        staleness = f"   staleness {mean(late):4.1f}" if late else ""
        print(f"  {word:16} {listed}   mean {mean(accuracies):6.2f}{staleness}", flush=True)
    print(json.dumps(ahead))


if __name__ == "__main__":
    main()
