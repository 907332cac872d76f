"""Pretraining: an RBM as a task like any other, with its own metrics and momentum schedule.

Defaults follow Hinton's guide (2012): small batches, low momentum at first, decay of weights but not biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Metric, Task
from shoal.programs.models.rbm import RBM

MONITORED = 2000  # test rows that the metrics are taken of, and as many training rows


@dataclass(frozen=True)
class Momentum:
    """SGD with a lower momentum for `first_steps`; only matrices decay. Called like an optimizer class."""

    momentum: float = 0.9
    first: float = 0.5
    first_steps: int = 0
    decay: float = 2e-4

    def __post_init__(self) -> None:
        for name in ("momentum", "first"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: momentum must be at least 0 and below 1")
        if self.decay < 0 or self.first_steps < 0:
            raise ValueError(
                f"decay={self.decay}, first_steps={self.first_steps}: neither may be negative; 0 means none"
            )

    def __call__(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer for these parameters."""
        own = list(parameters)
        groups = [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": self.decay},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return _TwoMomenta([group for group in groups if group["params"]], lr, self)


class _TwoMomenta(torch.optim.SGD):
    """SGD that counts its steps in its parameter groups, which checkpoints save."""

    def __init__(self, groups: Any, lr: float, plan: Momentum) -> None:
        super().__init__(groups, lr=lr, momentum=plan.first if plan.first_steps else plan.momentum)
        self._plan = plan
        for group in self.param_groups:
            group["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            early = group["steps"] < self._plan.first_steps
            group["momentum"] = self._plan.first if early else self._plan.momentum
            group["steps"] += 1
        return super().step(closure)


@dataclass(frozen=True)
class Pretraining:
    """The settings of one RBM and its training."""

    units: str = "binary"  # of the visible layer, or "gaussian"
    steps: int = 1  # k
    chains: int = 0  # persistent chains; 0: chains start at the data
    positive: str = "probability"  # or "sample"
    lr: float = 0.1
    batch: int = 100
    optimizer: Momentum = Momentum()

    def name(self, visible: int, hidden: int) -> str:
        """The name of the task in checkpoints; names everything that must be equal to resume."""
        method = f"pcd-{self.steps} with {self.chains} chains" if self.chains else f"cd-{self.steps}"
        units = "gaussian units, v / sigma, " if self.units == "gaussian" else ""
        return f"rbm {visible}-{hidden}, {units}{method}, {self.positive}"

    def task(
        self,
        visible: int,
        hidden: int,
        data: Callable[[], Data],
        visible_bias: Sequence[float] | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> Task:
        """The task of training an RBM on the inputs of `data`; the metrics are taken of its test set."""
        return Task(
            name=self.name(visible, hidden)
            + (", shared bias" if visible_bias is not None else "")
            + (", drawn inputs" if augment is not None else ""),
            model=partial(_build, self, visible, hidden, visible_bias),
            data=partial(monitored, data),
            loss=contrast,
            optimizer=self.optimizer,
            lr=self.lr,
            batch=self.batch,
            augment=augment,
            metrics=monitors(self.units),
        )


def _build(settings: Pretraining, visible: int, hidden: int, visible_bias: Sequence[float] | None) -> RBM:
    rbm = RBM(
        visible,
        hidden,
        units=settings.units,
        steps=settings.steps,
        chains=settings.chains,
        positive=settings.positive,
    )
    if visible_bias is not None:
        rbm.visible_bias.data.copy_(torch.tensor(visible_bias))
    return rbm


def contrast(out: Tensor, _: Tensor) -> Tensor:
    """The loss: the mean contrast in training, the mean reconstruction error of test rows in evaluation."""
    return out.mean() if out.ndim == 1 else out[:, 0, 0].mean()


def monitored(data: Callable[[], Data]) -> Data:
    """The inputs without labels; each test row is paired with a training row, for the free-energy gap."""
    given = data()
    x, test = given.x.flatten(1), given.test_x.flatten(1)
    rows = min(MONITORED, len(x), len(test))
    pairs = torch.stack([_spread(test, rows), _spread(x, rows)], dim=1)
    return Data(x, torch.zeros(len(x)), pairs, torch.zeros(rows))


def _spread(x: Tensor, rows: int) -> Tensor:
    """Rows at even distances: a file may begin with easy ones."""
    return x[torch.arange(rows, device=x.device) * len(x) // max(1, rows)]


def monitors(units: str) -> dict[str, Metric]:
    """Metrics from `RBM.measure` by name. Only differences of free energies have a meaning."""
    named: dict[str, Metric] = {"reconstruction error": reconstruction_error}
    if units == "binary":
        named["pseudo-likelihood"] = pseudo_likelihood
    return {**named, "free-energy gap": free_energy_gap}


def reconstruction_error(out: Tensor, _: Tensor) -> float:
    """Mean reconstruction error of the test rows, in nats per row."""
    return float(out[:, 0, 0].mean())


def pseudo_likelihood(out: Tensor, _: Tensor) -> float:
    """Mean pseudo-log-likelihood of the test rows, in nats per row."""
    return float(out[:, 0, 2].mean())


def free_energy_gap(out: Tensor, _: Tensor) -> float:
    """Mean of F(test) - F(training), in nats per row; positive if test rows are less likely."""
    return float((out[:, 0, 1] - out[:, 1, 1]).mean())
