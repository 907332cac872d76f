"""Torch modules as replicas: a task's model, its share of the data and its optimizer at one worker."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.growth import Growth
from shoal.core.matrices import Matrix
from shoal.core.products import Product, Recorder
from shoal.core.replica import Gradient, Replica
from shoal.core.seeds import derive, stream
from shoal.core.task import Data, Task
from shoal.core.vector import Flat, Layout
from shoal.engine.streaming import Intake, Streamed
from shoal.replicas.splits import Splits, split_steps
from shoal.replicas.watch import Watch
from shoal.vocabulary.strategy import Strategy


def steps_per_epoch(samples: int, batch: int, workers: int) -> int:
    """Steps each worker takes for one pass over the data; the same for all, so nobody waits for a batch.

    A remainder too small to give every worker a sample joins the batches before it.
    """
    if samples < workers:
        raise ValueError(
            f"{samples} samples cannot be shared among {workers} workers; every one needs at least 1"
        )
    return max(1, -(-(samples - workers + 1) // (batch * workers)))


def share(
    order: Tensor,
    step: int,
    batch: int,
    rank: int,
    workers: int,
    last: bool,
    speeds: Sequence[float] | None = None,
) -> Tensor:
    """The samples of one worker in one step: every `workers`-th of it, or as many as its speed deserves.

    The last step takes what is left.
    """
    taken = batch * workers
    these = order[step * taken : None if last else (step + 1) * taken]
    if speeds is None:
        return these[rank::workers]
    return torch.split(these, apportion(len(these), speeds))[rank]


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, which add up to `total`; at least 1 each.

    By the largest remainder: what rounding down leaves goes to those whom it took most from.
    """
    scale = total / sum(weights)
    above_one = [max(0.0, weight * scale - 1) for weight in weights]
    spare = total - len(weights)
    quotas = [part * spare / (sum(above_one) or 1.0) for part in above_one]
    parts = [int(quota) for quota in quotas]
    short = sorted(range(len(parts)), key=lambda k: parts[k] - quotas[k])[: spare - sum(parts)]
    return [1 + part + (k in short) for k, part in enumerate(parts)]


class Batches:
    """One worker's share of the data: a fresh shuffle for every epoch, the same for all workers.

    Step s of an epoch takes the next `batch * workers` samples of the shuffle; worker k gets every
    `workers`-th of them, from the k-th on. So all shares differ by at most one sample at every step.
    With `fixed` shares worker k keeps to every `workers`-th sample of the first shuffle, in a fresh order for
    every epoch, cut into batches of about the same size. `weigh` cuts steps unequally from then on.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch: int,
        rank: int,
        workers: int,
        seed: int,
        fixed: bool = False,
        growth: Growth | None = None,
    ) -> None:
        self._x, self._y = x, y
        self._batch, self._rank, self._workers, self._seed = batch, rank, workers, seed
        self._fixed = fixed
        self._growth = growth or Growth()
        self.steps_per_epoch = steps_per_epoch(len(x), batch, workers)  # until the batch grows
        self._begins = [0]  # the position at which each epoch begins
        self.position = 0  # batches taken so far
        self.rate = 1.0  # by which the learning rate is multiplied for the batch taken last
        self._detour: tuple[int, int] | None = None
        self._speeds: Sequence[float] | None = None

    def weigh(self, speeds: Sequence[float]) -> None:
        """From now on a step's samples are cut in proportion to these, one for each worker."""
        self._speeds = speeds

    def seek(self, owner: int, place: int) -> None:
        """Take one batch from another worker's share next; in its own, go on from there."""
        if owner == self._rank:
            self.position, self._detour = place, None
        else:
            self._detour = owner, place

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; goes on for ever."""
        rank, position = self._detour or (self._rank, self.position)
        if self._detour is None:
            self.position += 1
        self._detour = None
        epoch, step, steps = self._find(position)
        self.rate = self._growth.rate(self._batch, epoch)
        if self._fixed:
            index = torch.tensor_split(self._own(rank, epoch), steps)[step]
        else:
            order, batch = _shuffle(len(self._x), self._seed, epoch), self._growth.batch(self._batch, epoch)
            index = share(order, step, batch, rank, self._workers, step == steps - 1, self._speeds)
        return self._x[index], self._y[index]

    def _find(self, position: int) -> tuple[int, int, int]:
        """The epoch of a batch, its number in it, and how many there are."""
        while self._begins[-1] <= position:
            batch = self._growth.batch(self._batch, len(self._begins) - 1)
            self._begins.append(self._begins[-1] + steps_per_epoch(len(self._x), batch, self._workers))
        epoch = bisect_right(self._begins, position) - 1
        return epoch, position - self._begins[epoch], self._begins[epoch + 1] - self._begins[epoch]

    def _own(self, rank: int, epoch: int) -> Tensor:
        """The fixed share of a worker, in the order of this epoch."""
        mine = _shuffle(len(self._x), self._seed, 0)[rank :: self._workers]
        return mine[_shuffle(len(mine), derive(self._seed, "share", rank), epoch)]


@lru_cache(maxsize=4)
def _shuffle(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=stream(seed, "data", epoch))


class ModuleReplica:
    """A module that learns from its own batches by its own torch optimizer."""

    def __init__(self, task: Task, model: nn.Module, batches: Batches | Splits, noise_seed: int) -> None:
        self.model = model
        self.batches = batches
        self._flat = Flat(model)
        self.x = self._flat.x
        self._loss = task.loss
        self._augment = task.augment
        self._optimizer = task.optimizer(self._flat.parameters, lr=task.lr)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._rate = 1.0  # by which they are multiplied; NaN where that is not known
        self._watch = Watch(self._flat)
        self._recorder: Recorder | None = None
        self._g: Tensor | None = None
        self._noise = torch.Generator(self.x.device).manual_seed(noise_seed).get_state()

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def layout(self) -> Layout:
        """Which slice of `x` is which parameter."""
        return self._flat.layout

    @property
    def split_steps(self) -> int | None:
        """Steps of a pass over a split, where the data is cut into splits."""
        return self.batches.split_steps if isinstance(self.batches, Splits) else None

    @property
    def parts(self) -> Sequence[slice]:
        """The parts in which a gradient can be taken in."""
        return self._watch.parts

    async def gradient(self) -> Gradient:
        """The gradient of the mean loss on the next batch."""
        if self._g is None:
            self._g = torch.empty_like(self.x)
        x, y = self._next_batch()
        loss = self._propagate(x, y)
        gradient = Gradient(self._flat.gradient(self._g), len(y), loss)
        if self._recorder is not None:
            self._recorder.belongs_to(gradient.vector)
        return gradient

    async def stream(self, intake: Intake) -> Streamed:
        """The same, taken in while back-propagation runs."""
        x, y = self._next_batch()
        weight = intake.unit * len(y)
        self._watch.begin(intake, lambda: weight)
        loss = self._propagate(x, y)
        changed = self._watch.end(weight)
        fill = partial(self._watch.fill, intake.out, weight)
        return Streamed(intake.out, len(y), loss, changed, fill)

    def record(self) -> None:
        """Keep from now on what each gradient is made of."""
        self._recorder = Recorder(self.model, self._flat)

    @property
    def recorded(self) -> Sequence[Matrix]:
        """The layers of which that is kept."""
        return self._recorder.layers if self._recorder else ()

    def take_products(self, v: Tensor) -> list[Product] | None:
        """What the layers of the last gradient are made of, if this is it."""
        return self._recorder.take(v) if self._recorder else None

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch; from now on the learning rate is what belongs to it."""
        batch = self.batches.next()
        if self.batches.rate != self._rate:
            self._rate = self.batches.rate
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._rate
        return batch

    def _propagate(self, x: Tensor, y: Tensor) -> float | None:
        """Leave the gradients of one batch at the parameters; its loss, or None where that is empty."""
        for p in self._flat.parameters:
            p.grad = None
        with self._own_noise(), self._recorder.recording() if self._recorder else nullcontext():
            loss = self._loss(self.model(x if self._augment is None else self._augment(x)), y)
            torch.autograd.backward(loss, torch.ones_like(loss))
        return loss.item() if loss.numel() else None

    def weigh(self, speeds: Sequence[float]) -> None:
        """Cut each step's samples in proportion to these, one for each worker, from now on."""
        if isinstance(self.batches, Splits):
            raise TypeError("splits of data blocks are cut before training, and cannot follow speeds")
        self.batches.weigh(speeds)

    def seek(self, owner: int, place: int) -> None:
        """Take the next batch from another worker's share."""
        self.batches.seek(owner, place)

    def descend(self, g: Tensor) -> None:
        """One step of the task's optimizer."""
        self._flat.set_gradient(g)
        self._optimizer.step()

    def reset_momentum(self) -> None:
        """Zero the velocity of SGD with momentum; other optimizers have none."""
        reset_momentum(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, buffers, place in the data and the stream that dropout draws from."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "position": self.batches.position,
            "noise": self._noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._rate = float("nan")
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.batches.position = state["position"]
        self._noise = state["noise"]

    @contextmanager
    def _own_noise(self) -> Iterator[None]:
        """Layers such as dropout draw from their device's global stream: lend them this replica's own."""
        outer = get_noise(self.x.device)
        set_noise(self.x.device, self._noise)
        try:
            yield
        finally:
            self._noise = get_noise(self.x.device)
            set_noise(self.x.device, outer)


def get_noise(device: torch.device) -> Tensor:
    """Where a device's global stream of random numbers stands."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_noise(device: torch.device, state: Tensor) -> None:
    """Have it go on from there."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def reset_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zero the velocity of SGD with momentum; other optimizers have none that is kept apart."""
    for state in optimizer.state.values():
        if isinstance(state.get("momentum_buffer"), Tensor):
            state["momentum_buffer"].zero_()


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model with the initial weights that belong to the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "init"))
        return task.model()


def build_member(task: Task, strategy: Strategy, rank: int, seed: int) -> nn.Module:
    """The model that a worker begins with: everybody's, unless all have models of their own."""
    own = strategy.independent and rank > 0
    return build_model(task, derive(seed, "member", rank) if own else seed)


def build_replica(
    task: Task,
    model: nn.Module,
    data: Data,
    strategy: Strategy,
    rank: int,
    workers: int,
    seed: int,
    ahead: bool = False,
) -> ModuleReplica:
    """The replica of one worker, with a copy of `model`, unless all have models of their own.

    With `ahead` a thread may gather data that comes next.
    """
    own = build_member(task, strategy, rank, seed) if strategy.independent else copy.deepcopy(model)
    batches = build_batches(task, data, strategy, rank, workers, seed, ahead)
    return ModuleReplica(task, own, batches, derive(seed, "noise", rank))


def build_batches(
    task: Task, data: Data, strategy: Strategy, rank: int, workers: int, seed: int, ahead: bool = False
) -> Batches | Splits:
    """One worker's part of the data, cut up as the strategy wants it."""
    place: dict[str, int] = {"batch": task.batch, "rank": rank, "workers": workers, "seed": seed}
    if strategy.deal.whole:
        place |= {"rank": 0, "workers": 1, "seed": derive(seed, "member", rank) if rank else seed}
    if strategy.deal.blocks is not None:
        return Splits(data.x, data.y, blocks=strategy.deal.blocks, ahead=ahead, **place)
    return Batches(data.x, data.y, fixed=strategy.deal.fixed, growth=task.growth, **place)


def steps_of(task: Task, strategy: Strategy, samples: int, workers: int, epochs: int) -> int:
    """Steps that every worker takes for so many passes over the data."""
    workers = 1 if strategy.deal.whole else workers
    blocks = strategy.deal.blocks
    if blocks is not None:
        return epochs * blocks * split_steps(samples, task.batch, workers, blocks)
    batches = [task.growth.batch(task.batch, epoch) for epoch in range(epochs)]
    return sum(steps_per_epoch(samples, batch, workers) for batch in batches)


class EnsembleModel(nn.Module):
    """Several models as one. Its outputs are the logarithms of their mean probabilities.

    Cross-entropy and arg max take those like any others. Where labels are no `classes`, the outputs are the
    mean of the members' own.
    """

    def __init__(self, members: Sequence[nn.Module], classes: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        """The mean prediction."""
        outputs = torch.stack([member(x) for member in self.members])
        if not self.classes:
            return outputs.mean(dim=0)
        return outputs.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(self.members))


def module_of(replica: Replica, other: nn.Module) -> nn.Module:
    """The module that a node trains, with its buffers; `other` for a server, which trains none."""
    return replica.model if isinstance(replica, ModuleReplica) else other
