"""Strategies and tasks that go wrong, importable by worker processes."""

import os
import signal
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal import SERVER, Data, DataMissing, Node, Strategy, Task
from shoal.strategies import ASGD
from shoal.testing import blobs


@dataclass(frozen=True)
class Raises(Strategy):
    """Worker 1 raises in its step 3."""

    async def worker(self, w: Node) -> None:
        async for t in w.steps():
            if w.rank == 1 and t == 3:
                raise RuntimeError("the cat walked over the keyboard")
            w.descend(await w.mean(w.grad()))


@dataclass(frozen=True)
class Dies(Strategy):
    """Worker 1 is killed in its step 3."""

    async def worker(self, w: Node) -> None:
        async for t in w.steps():
            if w.rank == 1 and t == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            w.descend(await w.mean(w.grad()))


@dataclass(frozen=True)
class Sleeps(Strategy):
    """Worker 1 stands still in its step 3."""

    async def worker(self, w: Node) -> None:
        async for t in w.steps():
            if w.rank == 1 and t == 3:
                time.sleep(60)
            w.descend(await w.mean(w.grad()))


@dataclass(frozen=True)
class Slow(Strategy):
    """Synchronous, ten milliseconds a step, so that there is time to interrupt it."""

    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            time.sleep(0.01)
            w.descend(await w.mean(w.grad()))


def no_data() -> None:
    raise DataMissing("data set 'unicorns' is in none of these places: here, there")


def poisoned_data() -> Data:
    data = blobs().data()
    return replace(data, x=data.x.masked_fill(torch.arange(300).view(-1, 1) == 7, float("nan")))


def with_nan() -> Task:
    return replace(blobs(), data=poisoned_data)


def without_data() -> Task:
    return replace(blobs(), data=no_data)


def without_parameters() -> Task:
    return replace(blobs(), model=nn.Flatten)


def split_over_devices() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    model[1].to(torch.device("meta"))
    return model


def on_two_devices() -> Task:
    return replace(blobs(), model=split_over_devices)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def with_batch_norm() -> Task:
    return replace(blobs(), model=normalised)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[1].weight = model[0].weight
    return model


def with_tied_weights() -> Task:
    return replace(blobs(), model=tied)


def untested_data() -> Data:
    data = blobs().data()
    return replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0])


def without_test_data() -> Task:
    return replace(blobs(), data=untested_data)


@dataclass(frozen=True)
class OneIsSlow(ASGD):
    """Worker 1 takes twenty milliseconds longer for every step than the others."""

    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            time.sleep(0.02 if w.rank == 1 else 0.0)
            await w.pull(SERVER, out=w.x)
            await w.push(SERVER, await w.grad())


@dataclass(frozen=True)
class Lingers(ASGD):
    """The server is in no hurry to end, unless it has died once."""

    async def server(self, s: Node) -> None:
        await super().server(s)
        time.sleep(0.0 if s.incarnation else 30.0)
