"""A training loop as a user writes it, to be run by plain torch and, as a replica, by a simulation."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from shoal.replicas.attached import AttachedReplica

STEPS = 30


class Replacing(torch.optim.Optimizer):
    """SGD whose steps give each parameter a new tensor, as many home-made optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}, {}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"momentum": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, {"momentum": 0.7}),
    "decay": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    "adam": (torch.optim.Adam, {"lr": 0.01}, {"betas": (0.8, 0.9)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}, {"lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}, {"alpha": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}, {"rho": 0.8}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}, {"momentum_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}, {"eps": 1e-6}),
    "replacing": (Replacing, {"lr": 0.05}, {}),
}
"""A class, its options, and what is different in its second group beside a tenfold learning rate."""


class Loop:
    """A small model and everything that hangs on a loop: two groups, a schedule, clipping, GradScaler."""

    def __init__(self, word: str, rank: int = 0, workers: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.xs, self.ys = torch.randn(STEPS, workers, 8, 5)[:, rank], torch.randint(3, (STEPS, workers, 8))
        self.ys = self.ys[:, rank]
        make, options, others = OPTIMIZERS[word]
        first, second = self.model[0].parameters(), self.model[2].parameters()
        groups = [{"params": first}, {"params": second, "lr": 10 * options["lr"], **others}]
        self.optimizer = make(groups, **options)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            [2 * group["lr"] for group in self.optimizer.param_groups],
            total_steps=STEPS + 1,
            cycle_momentum="momentum" in options or "betas" in self.optimizer.defaults,
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run_step(self, t: int) -> None:
        """One step; the third overflows, and GradScaler skips it."""
        self.optimizer.zero_grad()
        out = self.model(self.xs[t] * (float("inf") if t == 3 else 1.0))
        self.scaler.scale(F.cross_entropy(out, self.ys[t])).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@cache
def trained_plainly(word: str) -> torch.Tensor:
    """The parameters after the loop, by torch alone."""
    loop = Loop(word)
    for t in range(STEPS):
        loop.run_step(t)
        loop.schedule.step()
    return nn.utils.parameters_to_vector(loop.model.parameters()).detach()


class LoopReplica(AttachedReplica):
    """The loop as the replica of a worker: `optimizer.step()` hands the gradient over, as attach() has it."""

    def __init__(self, word: str, rank: int = 0, workers: int = 1) -> None:
        self.loop = Loop(word, rank, workers)
        super().__init__(self.loop.model, self.loop.optimizer)
        self._t = 0
        self._taken = []
        optimizer, scheduled = self.loop.optimizer, self.loop.optimizer.step

        def step():
            self._taken.append(self.collect())
            optimizer._opt_called = True  # what a scheduler looks for

        step.__dict__.update(scheduled.__dict__)
        optimizer.step, optimizer._step_supports_amp_scaling = step, True

    async def gradient(self):
        """One step of the loop; the schedule goes on after what the strategy does with the gradient."""
        if self._t:
            self.loop.schedule.step()
        with torch.enable_grad():
            self.loop.run_step(self._t)
        self._t += 1
        return self._taken.pop()

    async def step(self, check):
        """The same, with the step of the optimizer along it."""
        gradient = await self.gradient()
        check(gradient.loss)
        self.descend(gradient.vector)
        return gradient.count
