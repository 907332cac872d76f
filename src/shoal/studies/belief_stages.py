"""A deep belief network trained in stages, each a run of its own, so that studies can time them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.api.belief_rows import Array, Rows, matrix
from shoal.api.deep_belief import finetuning
from shoal.core.task import Data, Task
from shoal.programs.models.belief_network import BeliefNet
from shoal.programs.models.pretraining import Momentum, Pretraining
from shoal.programs.models.rbm import RBM
from shoal.runs.result import Result
from shoal.studies.clockwork import clockwork
from shoal.vocabulary.strategy import Strategy

MONITORED = 500  # test rows that pretraining is evaluated on
LIKELIEST = 0.99  # the highest probability of a unit being on, or off

Runner = Callable[[str, Task, Strategy, int], Result]
"""Makes the run of a stage, given its name, task, strategy and number of epochs."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Fine-tuning sees `labelled` rows, each once."""

    strategy: Strategy
    finetune_strategy: Strategy

    layers: tuple[int, ...]
    epochs: int  # of pretraining, each layer
    labelled: int
    batch: int
    lr: float  # of pretraining
    momentum: float
    finetune_lr: float
    finetune_momentum: float


@dataclass(frozen=True)
class Net:
    """The results of all stages."""

    layers: Sequence[Result]
    finetuning: Result

    @property
    def pretraining_seconds(self) -> float:
        """Seconds of pretraining all layers."""
        return sum(result.seconds for result in self.layers)

    @property
    def reconstruction(self) -> float:
        """Reconstruction error of the first layer; layers above have different inputs in every network."""
        return self.layers[0].metrics["reconstruction error"]

    def timed(self, recipe: Recipe, run: Runner) -> Net:
        """The same network with the times of runs that send the same messages and compute nothing.

        Exact for strategies whose results do not depend on the order of arrival.
        """
        layers = [
            on_the_clock(result, run(f"layer {level}", as_large(result), recipe.strategy, recipe.epochs))
            for level, result in enumerate(self.layers, start=1)
        ]
        last = run("fine-tuning", as_large(self.finetuning), recipe.finetune_strategy, 1)
        return Net(layers, on_the_clock(self.finetuning, last))


class Examples:
    """Inputs in [0, 1] and their classes in files, which worker processes read themselves."""

    def __init__(self, data: Data, folder: Path) -> None:
        if data.y.ndim != 1 or data.y.is_floating_point():
            raise ValueError("fine-tuning needs a task with classes, such as mnist")
        low, width = data.x.min(), data.x.max() - data.x.min()
        self.folder = folder
        self.classes = int(data.y.max()) + 1
        self.rows = Rows(matrix((data.x - low) / width), matrix((data.test_x - low) / width))
        save(folder, x=self.rows.x, test_x=self.rows.test_x, y=data.y.numpy(), test_y=data.test_y.numpy())

    def train(self, recipe: Recipe, run: Runner) -> Net:
        """Run all stages, one after the other."""
        rows, folder = self.rows, self.folder
        rbms: list[RBM] = []
        results: list[Result] = []
        for level, hidden in enumerate(recipe.layers, start=1):
            if level > 1:  # one folder for all levels above the first: the previous level is not needed again
                rows, folder = rows.through(rbms[-1], "cpu"), self.folder / "above"
                save(folder, x=rows.x, test_x=rows.test_x)
            task = pretraining(recipe, rows, folder, hidden)
            results.append(run(f"layer {level}", task, recipe.strategy, recipe.epochs))
            model = results[-1].model
            if not isinstance(model, RBM):
                raise ValueError(
                    f"{results[-1].strategy} ends with several models; take 'local', which ends with one"
                )
            rbms.append(model.cpu().eval())
        task = finetuning(
            BeliefNet(rbms),
            self.classes,
            partial(read_labelled, self.folder, recipe.labelled),
            optimizer=Momentum(recipe.finetune_momentum, decay=0.0),
            lr=recipe.finetune_lr,
            batch=recipe.batch,
        )
        return Net(results, run("fine-tuning", task, recipe.finetune_strategy, 1))


def pretraining(recipe: Recipe, rows: Rows, folder: Path, hidden: int) -> Task:
    """The task of one RBM. Its initial visible biases turn each unit on as often as the data does."""
    often = np.clip(rows.x.mean(axis=0), 1 - LIKELIEST, LIKELIEST)
    settings = Pretraining(
        lr=recipe.lr, batch=recipe.batch, optimizer=Momentum(recipe.momentum, recipe.momentum)
    )
    bias = tuple(np.log(often / (1 - often)).tolist())
    return settings.task(rows.x.shape[1], hidden, partial(read_rows, folder), bias)


# -- runs that only measure time ------------------------------------------------------------------------


def as_large(result: Result) -> Task:
    """A task with the parameters and steps of a run that computes nothing."""
    rows = result.samples // result.config["epochs"]
    return clockwork(f"clockwork of {result.task}", result.parameters, rows, result.config["batch"])


def on_the_clock(result: Result, clock: Result) -> Result:
    """The result of one run with the times of another that took the same steps."""
    points = [
        {**point, "seconds": other["seconds"]} for point, other in zip(result.curve, clock.curve, strict=True)
    ]
    return replace(result, seconds=clock.seconds, curve=points)


# -- files ----------------------------------------------------------------------------------------------


def save(folder: Path, **arrays: Array) -> None:
    """Write arrays to files by their names."""
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def read_rows(folder: Path) -> Data:
    """The inputs without labels, and test rows at even distances."""
    x, test_x = read(folder, "x"), read(folder, "test_x")
    test_x = test_x[:: max(1, len(test_x) // MONITORED)][:MONITORED]
    return Data(x, torch.zeros(len(x)), test_x, torch.zeros(len(test_x)))


def read_labelled(folder: Path, most: int) -> Data:
    """The first `most` rows with their classes, and all test rows."""
    x, y, test_x, test_y = (read(folder, name) for name in ("x", "y", "test_x", "test_y"))
    return Data(x[:most], y[:most], test_x, test_y)


def read(folder: Path, name: str) -> Tensor:
    """A file as a tensor, read at once: pages loaded on demand would count as time of a step."""
    array: Array = np.load(folder / f"{name}.npy")
    return torch.from_numpy(array)
