"""ModuleReplica: a task's model at one worker, with its optimizer and its share of the data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.identity import NodeIdentity
from shoal.core.matrices import Matrix
from shoal.core.products import Product, Recorder
from shoal.core.replica import NOISE, Gradient, LastDeal, Replica
from shoal.core.seeds import derive
from shoal.core.task import Data, Task
from shoal.core.vector import Flat, Layout, named_buffers
from shoal.engine.streaming import Intake, Streamed
from shoal.replicas.batches import Batches, steps_per_epoch
from shoal.replicas.legs import Leg
from shoal.replicas.model_part import ModelPart, WholeModel
from shoal.replicas.optimizer import Schedule, steps_on_zeros
from shoal.replicas.repeatable import check_repeats
from shoal.replicas.served import ServedReplica
from shoal.replicas.splits import Splits, split_steps
from shoal.replicas.watch import Watch
from shoal.vocabulary.strategy import Strategy


class ModuleReplica:
    """A module with its own batches and its own torch optimizer.

    `part` is what this process holds of a module that lies in several; with `agrees` it takes over, before
    every gradient, what the first of them has of the parameters that several hold.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        batches: Batches | Splits,
        noise_seed: int,
        part: ModelPart | None = None,
        agrees: bool = False,
    ) -> None:
        self.model = model
        self.batches = batches
        self._part = part = part or WholeModel(model, task.loss)
        self._agrees = agrees
        self._flat = Flat(model, part.held, part.shards)
        part.bind(self._flat)
        self.x = self._flat.x
        self._augment = task.augment
        self._optimizer = task.optimizer(self._flat.tensors, lr=task.lr)
        self._schedule = Schedule(self._optimizer)
        self.tells_servers = True  # of changes in the optimizer's groups: theirs takes the steps
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._rate = 1.0  # the current factor of `_rates`; NaN if unknown
        self._watch = Watch(self._flat, early=part.is_whole)
        self._zeros_are_nothing = False  # to the optimizer; asked when a parameter has no gradient
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
    def changed(self) -> Tensor | None:
        """The numbers in the optimizer's groups, if others than the first rate have changed; else None."""
        return self._schedule.changed() if self.tells_servers else None

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
        x, y = self._next_batch()
        if not len(y):  # fewer samples are left than workers
            return Gradient(self._buffer.zero_(), 0, None)
        loss = self._propagate(x, y)
        gradient = Gradient(self._flat.gradient(self._buffer), len(y), loss)
        if self._recorder is not None:
            self._recorder.belongs_to(gradient.vector)
        return gradient

    async def step(self, check: Callable[[float | None], None]) -> int:
        """One step of the task's optimizer on the next batch, on the gradients as they lie."""
        x, y = self._next_batch()
        loss = self._propagate(x, y) if len(y) else None
        check(loss)
        if not len(y):
            self.descend(self._buffer.zero_())
        elif any(p.grad is not None and p.grad.is_sparse for p in self._flat.tensors):
            self.descend(self._flat.gradient(self._buffer))  # few optimizers take sparse gradients
        else:
            self._take_step()
        self._flat.drop_gradients()  # their memory is warm for another worker of this process
        return len(y)

    @property
    def _buffer(self) -> Tensor:
        """Where gradients are put together in one vector."""
        if self._g is None:
            self._g = torch.empty_like(self.x)
        return self._g

    async def stream(self, intake: Intake) -> Streamed:
        """As `gradient`, but hand the gradient over in parts while back-propagation runs."""
        x, y = self._next_batch()
        if not len(y):  # fewer samples are left than workers
            return Streamed(intake.out.zero_(), 0, None, changed=False, fill=intake.out.zero_)
        weight = intake.unit * len(y)
        self._watch.begin(intake, lambda: weight)
        loss = self._propagate(x, y)
        changed = self._watch.end(weight)
        fill = partial(self._watch.fill, intake.out, weight)
        return Streamed(intake.out, len(y), loss, changed, fill)

    def rehearse(self, x: Tensor, y: Tensor) -> None:
        """Compute the gradients of a batch, for nothing but to have done it once."""
        noise = self._noise
        self._propagate(x, y)
        self._noise = noise

    @property
    def flat(self) -> Flat:
        """The parameters that are trained here, as one vector."""
        return self._flat

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
        self._flat.drop_gradients()
        self._part.load(self._agrees)
        with self._own_noise(), self._recorder.recording() if self._recorder else nullcontext():
            loss = self._part.propagate(x if self._augment is None else self._augment(x), y)
        self._check_all_have_gradients()
        return loss

    def _check_all_have_gradients(self) -> None:
        """Raise ValueError for a parameter without one that the optimizer would move along zeros."""
        if self._zeros_are_nothing or all(p.grad is not None for p in self._flat.tensors):
            return
        if steps_on_zeros(self._optimizer):
            named = zip(self._flat.layout.names, self._flat.tensors, strict=True)
            raise ValueError(
                f"the loss does not depend on parameter {next(n for n, p in named if p.grad is None)!r}, and "
                f"{type(self._optimizer).__name__} would move it along zeros, where plain PyTorch leaves it "
                "alone; call requires_grad_(False) on it in the task's model"
            )
        self._zeros_are_nothing = True

    def weigh(self, speeds: Sequence[float]) -> None:
        """From now on divide each step's samples in proportion to `speeds`, one for each worker."""
        if isinstance(self.batches, Splits):
            raise TypeError("splits of data blocks are cut before training and cannot be balanced by speed")
        self.batches.weigh(speeds)

    def redeal(self, place: int, workers: int, step: int, last: LastDeal) -> None:
        """From `step` on deal the data to so many workers, of whom this is number `place`."""
        self._shared_batches.redeal(place, workers, step, last)

    def end_of(self, passes: int) -> int:
        """The step after the last of so many passes over the data."""
        return self._shared_batches.end_of(passes)

    def deal(self) -> dict[str, Any] | None:
        """What has been dealt so far, as plain values; None where it is dealt to one number of workers."""
        return None if isinstance(self.batches, Splits) else self.batches.deal()

    def take_deal(self, deal: dict[str, Any]) -> None:
        """Go on from what the `deal` of any worker gave."""
        self._shared_batches.take_deal(deal)

    @property
    def _shared_batches(self) -> Batches:
        if isinstance(self.batches, Splits):
            raise TypeError("splits of data blocks are cut before training and cannot be dealt again")
        return self.batches

    def seek(self, owner: int, place: int) -> None:
        """Take batch `place` of worker `owner`'s share next."""
        self.batches.seek(owner, place)

    def descend(self, g: Tensor) -> None:
        """One step of the task's optimizer."""
        self._flat.set_gradient(g)
        self._take_step()

    def _take_step(self) -> None:
        self._optimizer.step()
        self._flat.take_in()

    def reset_momentum(self) -> None:
        """Zero the velocity of SGD with momentum; other optimizers have none."""
        reset_momentum(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, buffers, position in the data, and the random state that dropout draws from."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(named_buffers(self.model)),
            "position": self.batches.position,
            NOISE: self._noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Without a random stream in it, this replica keeps its own."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._rate = float("nan")
        for name, buffer in named_buffers(self.model):
            buffer.copy_(state["buffers"][name])
        self.batches.position = state["position"]
        self._noise = state.get(NOISE, self._noise)

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
    leg: Leg | None = None,
    part: ModelPart | None = None,
) -> ModuleReplica:
    """The replica of one worker, with a copy of `model`, or its own model if workers are independent.

    With `ahead` a thread may gather the next data in advance. `leg` is that of a crew that grows.
    With `part`, which is of `model` itself, there is no copy.
    """
    batches = build_batches(task, data, strategy, rank, workers, seed, ahead, leg)
    noise = derive(seed, "noise", rank)
    if part is not None:
        noise = derive(seed, "noise", rank, part.stream) if part.stream else noise
        return ModuleReplica(task, model, batches, noise, part, agrees=workers > 1)
    own = build_member(task, strategy, rank, seed) if strategy.independent else copy.deepcopy(model)
    if strategy.deal.portions and rank == 0:
        check_repeats(task, own, data)
    replica = ModuleReplica(task, own, batches, noise)
    replica.tells_servers = strategy.steps_at_server
    return replica


def build_served(task: Task, model: nn.Module, me: NodeIdentity) -> ServedReplica:
    """The replica of a server: its slice of a copy of `model`, and the task's optimizer."""
    flat = Flat(copy.deepcopy(model))
    return ServedReplica(me, flat, task.optimizer(flat.parameters, lr=task.lr))


def build_batches(
    task: Task,
    data: Data,
    strategy: Strategy,
    rank: int,
    workers: int,
    seed: int,
    ahead: bool = False,
    leg: Leg | None = None,
) -> Batches | Splits:
    """One worker's share of the data, divided as the strategy asks."""
    place: dict[str, int] = {"batch": task.batch, "rank": rank, "workers": workers, "seed": seed}
    if strategy.deal.whole:
        place |= {"rank": 0, "workers": 1, "seed": derive(seed, "member", rank) if rank else seed}
    if strategy.deal.blocks is not None:
        return Splits(data.x, data.y, blocks=strategy.deal.blocks, ahead=ahead, **place)
    begin, end = (None, None) if leg is None else (leg.begin, leg.end)
    return Batches(
        data.x, data.y, fixed=strategy.deal.fixed, growth=task.growth, begin=begin, end=end, **place
    )


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
