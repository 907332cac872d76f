"""ModuleReplica: a task's model at one worker, with its optimizer and its share of the data."""

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
    """Steps of each worker for one pass over the data, the same for all workers.

    A remainder too small to give every worker a sample joins the last batches. Raises ValueError if there are
    fewer samples than workers.
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
    """The samples of one worker in one step: every `workers`-th, or with `speeds` a share by its speed.

    The last step of an epoch takes the remainder.
    """
    taken = batch * workers
    these = order[step * taken : None if last else (step + 1) * taken]
    if speeds is None:
        return these[rank::workers]
    return torch.split(these, apportion(len(these), speeds))[rank]


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers, at least 1 each, in proportion to the weights.

    Uses the largest-remainder method.
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
    With `fixed` shares worker k always gets the same samples, every `workers`-th of the first shuffle, in a
    fresh order for every epoch, cut into batches of about the same size. After a call of `weigh`, steps are
    divided by the workers' speeds.
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
        self.rate = 1.0  # factor of the learning rate for the batch taken last
        self._detour: tuple[int, int] | None = None
        self._speeds: Sequence[float] | None = None

    def weigh(self, speeds: Sequence[float]) -> None:
        """From now on divide a step's samples in proportion to `speeds`, one for each worker."""
        self._speeds = speeds

    def seek(self, owner: int, place: int) -> None:
        """Continue from batch `place` of this worker's share, or take that one batch of another worker's."""
        if owner == self._rank:
            self.position, self._detour = place, None
        else:
            self._detour = owner, place

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; never ends."""
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
        """The epoch of a batch, its index in the epoch, and the number of batches in the epoch."""
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
    """A module with its own batches and its own torch optimizer."""

    def __init__(self, task: Task, model: nn.Module, batches: Batches | Splits, noise_seed: int) -> None:
        self.model = model
        self.batches = batches
        self._flat = Flat(model)
        self.x = self._flat.x
        self._loss = task.loss
        self._augment = task.augment
        self._optimizer = task.optimizer(self._flat.parameters, lr=task.lr)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._rate = 1.0  # the current factor of `_rates`; NaN if unknown
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
        """Steps of a pass over a split; None if the data is not cut into splits."""
        return self.batches.split_steps if isinstance(self.batches, Splits) else None

    @property
    def parts(self) -> Sequence[slice]:
        """The slices in which `stream` hands a gradient over."""
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
        """As `gradient`, but hand the gradient over in parts while back-propagation runs."""
        x, y = self._next_batch()
        weight = intake.unit * len(y)
        self._watch.begin(intake, lambda: weight)
        loss = self._propagate(x, y)
        changed = self._watch.end(weight)
        fill = partial(self._watch.fill, intake.out, weight)
        return Streamed(intake.out, len(y), loss, changed, fill)

    def record(self) -> None:
        """From now on keep the factors of which each layer's gradient is the product."""
        self._recorder = Recorder(self.model, self._flat)

    @property
    def recorded(self) -> Sequence[Matrix]:
        """The layers whose factors are kept."""
        return self._recorder.layers if self._recorder else ()

    def take_products(self, v: Tensor) -> list[Product] | None:
        """The factors of the last gradient, if `v` is that gradient; else None."""
        return self._recorder.take(v) if self._recorder else None

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Take the next batch, and set the learning rate that belongs to it."""
        batch = self.batches.next()
        if self.batches.rate != self._rate:
            self._rate = self.batches.rate
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._rate
        return batch

    def _propagate(self, x: Tensor, y: Tensor) -> float | None:
        """Compute the gradients of one batch. Returns its loss, or None if the loss is an empty tensor."""
        for p in self._flat.parameters:
            p.grad = None
        with self._own_noise(), self._recorder.recording() if self._recorder else nullcontext():
            loss = self._loss(self.model(x if self._augment is None else self._augment(x)), y)
            torch.autograd.backward(loss, torch.ones_like(loss))
        return loss.item() if loss.numel() else None

    def weigh(self, speeds: Sequence[float]) -> None:
        """From now on divide each step's samples in proportion to `speeds`, one for each worker."""
        if isinstance(self.batches, Splits):
            raise TypeError("splits of data blocks are cut before training and cannot be balanced by speed")
        self.batches.weigh(speeds)

    def seek(self, owner: int, place: int) -> None:
        """Take batch `place` of worker `owner`'s share next."""
        self.batches.seek(owner, place)

    def descend(self, g: Tensor) -> None:
        """One step of the task's optimizer."""
        self._flat.set_gradient(g)
        self._optimizer.step()

    def reset_momentum(self) -> None:
        """Zero the velocity of SGD with momentum; other optimizers have none."""
        reset_momentum(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, buffers, position in the data, and the random state that dropout draws from."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "position": self.batches.position,
            "noise": self._noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._rate = float("nan")
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.batches.position = state["position"]
        self._noise = state["noise"]

    @contextmanager
    def _own_noise(self) -> Iterator[None]:
        """Swap this replica's random state into the device's global generator, from which dropout draws."""
        outer = get_noise(self.x.device)
        set_noise(self.x.device, self._noise)
        try:
            yield
        finally:
            self._noise = get_noise(self.x.device)
            set_noise(self.x.device, outer)


def get_noise(device: torch.device) -> Tensor:
    """The state of a device's global random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_noise(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's global random generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def reset_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zero the velocity of SGD with momentum. Other optimizers keep no separate velocity."""
    for state in optimizer.state.values():
        if isinstance(state.get("momentum_buffer"), Tensor):
            state["momentum_buffer"].zero_()


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model with the initial weights for this seed."""
    cuda: Any = torch.cuda  # torch's stubs lack types here
    started, users_seed = cuda.is_initialized(), torch.initial_seed()
    with torch.random.fork_rng(devices=range(cuda.device_count()) if started else []):
        torch.manual_seed(derive(seed, "init"))
        model = task.model()
    if not started:  # the seed above waits for CUDA to start, and would become the user's
        cuda.manual_seed_all(users_seed)
    return model


def build_member(task: Task, strategy: Strategy, rank: int, seed: int) -> nn.Module:
    """The initial model of a worker: the same for all, unless the strategy's workers are independent."""
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
    """The replica of one worker, with a copy of `model`, or its own model if workers are independent.

    With `ahead` a thread may gather the next data in advance.
    """
    own = build_member(task, strategy, rank, seed) if strategy.independent else copy.deepcopy(model)
    batches = build_batches(task, data, strategy, rank, workers, seed, ahead)
    return ModuleReplica(task, own, batches, derive(seed, "noise", rank))


def build_batches(
    task: Task, data: Data, strategy: Strategy, rank: int, workers: int, seed: int, ahead: bool = False
) -> Batches | Splits:
    """One worker's share of the data, divided as the strategy asks."""
    place: dict[str, int] = {"batch": task.batch, "rank": rank, "workers": workers, "seed": seed}
    if strategy.deal.whole:
        place |= {"rank": 0, "workers": 1, "seed": derive(seed, "member", rank) if rank else seed}
    if strategy.deal.blocks is not None:
        return Splits(data.x, data.y, blocks=strategy.deal.blocks, ahead=ahead, **place)
    return Batches(data.x, data.y, fixed=strategy.deal.fixed, growth=task.growth, **place)


def steps_of(task: Task, strategy: Strategy, samples: int, workers: int, epochs: int) -> int:
    """Steps of each worker for `epochs` passes over the data."""
    workers = 1 if strategy.deal.whole else workers
    blocks = strategy.deal.blocks
    if blocks is not None:
        return epochs * blocks * split_steps(samples, task.batch, workers, blocks)
    batches = [task.growth.batch(task.batch, epoch) for epoch in range(epochs)]
    return sum(steps_per_epoch(samples, batch, workers) for batch in batches)


class EnsembleModel(nn.Module):
    """Several models as one. Its outputs are the logarithms of their mean probabilities.

    You can pass them to cross-entropy and arg max like any logits. Without `classes` the outputs are the mean
    of the members' outputs.
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
    """The module that a node trains, with its buffers; `other` for a server, which has none."""
    return replica.model if isinstance(replica, ModuleReplica) else other
