"""Logistic regression on MNIST by L-BFGS: against torch's and scipy's, and in time against Downpour SGD.

    python benchmarks/lbfgs.py [--samples 60000] [--workers 8] [--iterations 80] [--json FILE]

First, iterations: Sandblaster in virtual time, `torch.optim.LBFGS` with strong_wolfe and scipy's L-BFGS-B,
all with 10 pairs, until the loss is within 1e-4 of the minimum. Then time: Sandblaster and Downpour on the
same virtual machines, which take 40 us a sample and have links of 1 Gbit/s. The loss is the mean
cross-entropy of the training images plus 0.005 |w|^2; Downpour takes the square as weight decay.

It needs scipy: pip install scipy.

The last line is JSON. `python docs/lbfgs.py FILE docs/lbfgs.svg` draws the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.task import Data, Task
from shoal.core.vector import trainable
from shoal.engine.engine import Engine, Instrument
from shoal.programs.tasks import TASKS
from shoal.replicas.module import build_model, build_replica, build_served, steps_of
from shoal.sim import Compute, Network, Simulation
from shoal.strategies import Downpour, Sandblaster
from shoal.vocabulary.strategy import Strategy

L2 = 1e-2
CLOSE = 1e-4  # relative to the minimum
HISTORY = 10
PORTION, BATCH = 500, 100  # samples: of a portion, and of a batch of Downpour
SECONDS = 40e-6  # of computing a sample


class Regression:
    """The loss as a function of all weights, and its gradient."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __call__(self, w: Tensor) -> tuple[float, Tensor]:
        v = w.detach().clone().requires_grad_()
        weight, bias = v[:-10].view(10, -1), v[-10:]
        loss = F.cross_entropy(F.linear(self.data.x, weight.float(), bias.float()), self.data.y)
        loss = loss + L2 / 2 * v.dot(v)
        (gradient,) = torch.autograd.grad(loss, v)
        return loss.item(), gradient


def model(inputs: int) -> nn.Module:
    made = nn.Linear(inputs, 10)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def by_torch(function: Regression, iterations: int) -> list[float]:
    """The loss after each iteration of torch's."""
    w = torch.zeros(function.data.x.shape[1] * 10 + 10, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w],
        max_iter=1,
        max_eval=10**6,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss, w.grad = function(w)
        return loss

    starts = [  # the loss before each
        float(optimizer.step(closure))  # type: ignore[no-untyped-call]
        for _ in range(iterations + 1)
    ]
    return starts[1:]


def by_scipy(function: Regression) -> list[float]:
    """The loss after each iteration of scipy's, as far as numbers go: the last is the minimum."""
    losses = []

    def both(w: Any) -> tuple[float, Any]:
        loss, gradient = function(torch.from_numpy(w))
        return loss, gradient.numpy()

    def after(intermediate_result: OptimizeResult) -> None:
        losses.append(float(intermediate_result.fun))

    start = torch.zeros(function.data.x.shape[1] * 10 + 10, dtype=torch.float64).numpy()
    ends = {"maxiter": 1000, "maxfun": 10**6, "maxcor": HISTORY, "ftol": 0.0, "gtol": 1e-7}
    minimize(both, start, jac=True, method="L-BFGS-B", callback=after, options=ends)
    return losses


@dataclass
class ServerPath(Instrument):
    """What the server held, and when; with `every`, after so many updates."""

    every: int
    seconds: list[float] = field(default_factory=list)
    points: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # after each iteration

    def update(self, engine: Engine) -> None:
        if engine.version % self.every == 0:
            self.seconds.append(engine.channel.now())
            self.points.append(engine.x.clone())

    def step(self, engine: Engine) -> None:
        if engine.is_server:
            self.losses.append(engine.meter.loss)


def simulated(
    strategy: Strategy, task: Task, data: Data, workers: int, epochs: int, every: int
) -> ServerPath:
    """A run in virtual time."""
    start, path = build_model(task, 0), ServerPath(every)
    Simulation(
        strategy,
        partial(build_replica, task, start, data, strategy, workers=workers, seed=0),
        workers=workers,
        steps=steps_of(task, strategy, len(data.x), workers, epochs),
        passes=epochs,
        served=partial(build_served, task, start),
        network=Network.parse("1Gbit,100us"),
        compute=Compute(SECONDS * task.batch),
        batch=task.batch,
        layout=trainable(start)[1],
        observers=[path],
    ).run()
    return path


def decaying(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, weight_decay=L2)


def reached(losses: list[float], minimum: float) -> int | None:
    """The first iteration whose loss is close to the minimum, counted from 1."""
    return next((n for n, loss in enumerate(losses, 1) if loss <= (1 + CLOSE) * minimum), None)


def iterations(function: Regression, ours: list[float], count: int) -> dict[str, Any]:
    """How many each of them needs, and the loss after as many iterations as all have made."""
    losses = {"shoal": ours, "torch": by_torch(function, count), "scipy": by_scipy(function)}
    minimum = min(map(min, losses.values()))
    table = Table(title=f"Logistic regression: the minimum is {minimum:.6f}")
    for column in ("L-BFGS of", "iterations to within 1e-4", "loss there", f"loss after {count}"):
        table.add_column(column, justify="right")
    for name, path in losses.items():
        needed = reached(path, minimum)
        there = "" if needed is None else f"{path[needed - 1]:.6f}"
        table.add_row(name, str(needed or "not reached"), there, f"{path[:count][-1]:.6f}")
    Console(width=100).print(table)
    counts = {name: reached(path, minimum) or inf for name, path in losses.items()}
    return {"minimum": minimum, "iterations": counts, "losses": losses}


def times(
    function: Regression, paths: dict[str, ServerPath], minimum: float, every: Callable[[int], bool]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds and loss above the minimum, as shares of it, along each path."""
    curves = {}
    for name, path in paths.items():
        found = [
            (seconds, function(point)[0] / minimum - 1)
            for n, (seconds, point) in enumerate(zip(path.seconds, path.points, strict=True))
            if every(n) or n == len(path.points) - 1
        ]
        curves[name] = found
        last = found[-1]
        print(f"{name}: after {last[0]:.1f} virtual seconds {last[1]:.2e} above the minimum, relatively")
    return curves


def first_below(curve: list[tuple[float, float]], share: float) -> float:
    return next((seconds for seconds, above in curve if above <= share), inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mnist", help="whose data it takes")
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=12, help="of Downpour")
    parser.add_argument("--rates", default="0.02,0.005,0.001", help="learning rates of Downpour")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    whole = TASKS.make(options.task).data()
    data = Data(whole.x[: options.samples].flatten(1), whole.y[: options.samples], whole.x[:0], whole.y[:0])
    function = Regression(data)
    task = Task("regression", partial(model, data.x.shape[1]), lambda: data, batch=PORTION)
    paths = {
        "sandblaster": simulated(
            Sandblaster(l2=L2, history=HISTORY, iterations=options.iterations, tolerance=0.0),
            *(task, data, options.workers, 4 * options.iterations, 1),
        )
    }
    found = iterations(function, paths["sandblaster"].losses, options.iterations)
    each = replace(task, batch=BATCH, optimizer=decaying)
    per_epoch = max(1, len(data.x) // BATCH)
    for rate in map(float, options.rates.split(",")):
        path = simulated(
            Downpour(), replace(each, lr=rate), data, options.workers, options.epochs, max(1, per_epoch // 8)
        )
        paths[f"downpour, lr {rate:g}"] = path
    curves = times(function, paths, found["minimum"], lambda n: n < 40 or n % 4 == 0)
    if options.json:
        options.json.write_text(json.dumps({**found, "curves": curves}) + "\n")
    figures = {f"iterations_{name}": count for name, count in found["iterations"].items()}
    figures |= {
        f"seconds_{share:g}_{n}": first_below(c, share) for share in (1e-2, 1e-3) for n, c in curves.items()
    }
    print(json.dumps({name: value for name, value in figures.items() if value < inf}))


if __name__ == "__main__":
    main()
