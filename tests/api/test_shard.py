"""shard(): whatever loader torch can build, every sample once in a pass, at one worker."""

from __future__ import annotations

import os
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shoal
from shoal.api.shard import Shard, count_samples
from shoal.launch.environment import Place

SAMPLES = 103  # prime: nothing divides it
NUMBERS = TensorDataset(torch.arange(SAMPLES))


class OwnSampler(Sampler[int]):
    """Draws from the generator that it is told."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SAMPLES), key=lambda _: self._draw()))


class WithoutLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(SAMPLES))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return SAMPLES


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(SAMPLES).split(8))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(NUMBERS, 8),
    "shuffled": lambda: DataLoader(NUMBERS, 8, shuffle=True),
    "with a generator": lambda: DataLoader(NUMBERS, 8, shuffle=True, generator=torch.Generator()),
    "a subset": lambda: DataLoader(NUMBERS, 8, sampler=SubsetRandomSampler(range(SAMPLES))),
    "torch's generator": lambda: DataLoader(NUMBERS, 8, sampler=OwnSampler(lambda: float(torch.rand(())))),
    "Python's generator": lambda: DataLoader(NUMBERS, 8, sampler=OwnSampler(random.random)),
    "NumPy's generator": lambda: DataLoader(NUMBERS, 8, sampler=OwnSampler(np.random.random)),
    "batches": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 8, False)),
    "no batches": lambda: DataLoader(NUMBERS, batch_size=None, shuffle=True),
    "a sampler without a length": lambda: DataLoader(NUMBERS, 8, sampler=WithoutLength()),
    "a stream": lambda: DataLoader(Stream(), 8),
    "a stream with a length": lambda: DataLoader(StreamWithLength(), 8),
    "a loader with its own __iter__": lambda: OwnLoader(NUMBERS, 8),
}


def place(monkeypatch: pytest.MonkeyPatch, rank: int, workers: int) -> None:
    monkeypatch.setattr("shoal.api.shard._rank", lambda: rank)
    monkeypatch.setattr("shoal.api.shard._workers", lambda: workers)


def one_pass(shares: Shard) -> list[list[int]]:
    return [
        (batch[0] if isinstance(batch, (list, tuple)) else batch).reshape(-1).tolist() for batch in shares
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_sample_is_in_a_batch_of_one_worker(make, workers, monkeypatch):
    passes: list[list[list[list[int]]]] = []
    for rank in range(workers):
        torch.manual_seed(rank)  # as where a script does not seed: the workers' own generators differ
        random.seed(rank)
        np.random.seed(rank)
        place(monkeypatch, rank, workers)
        shares = shoal.shard(make())
        passes.append([one_pass(shares) for _ in range(2)])
    for turn in range(2):
        batches = [batch for own in passes for batch in own[turn]]
        assert sorted(chain(*batches)) == list(range(SAMPLES))
        assert max(len(own[turn]) for own in passes) - min(len(own[turn]) for own in passes) <= 1


@pytest.mark.parametrize("name", ["in order", "shuffled", "a subset", "Python's generator"])
def test_where_samples_are_dealt_out_all_have_as_many_batches_and_the_length_says_so(name, monkeypatch):
    lengths = set()
    for rank in range(4):
        place(monkeypatch, rank, 4)
        shares = shoal.shard(LOADERS[name]())
        lengths |= {len(shares), len(one_pass(shares))}
    assert len(lengths) == 1


@pytest.mark.parametrize("name", ["batches", "no batches", "a stream with a length"])
def test_where_batches_are_dealt_out_the_length_is_this_worker_s(name, monkeypatch):
    for rank in range(4):
        place(monkeypatch, rank, 4)
        shares = shoal.shard(LOADERS[name]())
        assert len(shares) == len(one_pass(shares))
    with pytest.raises(TypeError):
        len(shoal.shard(LOADERS["a stream"]()))


@pytest.mark.parametrize(("nodes", "is_known"), [(2, True), (3, False)])
def test_the_length_of_the_only_worker_beside_a_server_is_known_before_attach(nodes, is_known, monkeypatch):
    here = Place(0, nodes, launched="shoal", store="nowhere", strategy="asgd")
    ((name, value),) = here.to_environment().items()
    monkeypatch.setenv(name, value)
    shares = shoal.shard(LOADERS["in order"]())
    with nullcontext() if is_known else pytest.raises(TypeError, match=r"before shoal\.attach\(\)"):
        assert len(shares) == 13


def test_before_attach_a_worker_of_several_is_not_told_the_length_of_the_whole(monkeypatch):
    ((name, value),) = Place(0, 2, launched="shoal", store="nowhere").to_environment().items()
    shares = shoal.shard(LOADERS["in order"]())
    assert len(shares) == 13  # plain python: one worker, whose share is the whole
    monkeypatch.setenv(name, value)
    with pytest.raises(TypeError, match=r"not known before shoal\.attach\(\).* len\(loader\) counts"):
        len(shares)
    monkeypatch.setattr("shoal.api.attach._was_launched", True)  # and finish() has been called since
    assert len(shares) == len(one_pass(shares)) == 13


@pytest.mark.parametrize("name", ["shuffled", "a subset", "NumPy's generator", "batches"])
def test_each_pass_draws_anew_and_another_seed_otherwise(name):
    loader = LOADERS[name]()
    first, second = one_pass(shoal.shard(loader)), one_pass(shoal.shard(loader))  # asked for at each epoch
    assert first != second
    assert one_pass(shoal.shard(loader, seed=1)) not in (first, second)


def test_with_replacement_all_see_parts_of_one_draw(monkeypatch):
    drawn = []
    for rank in range(3):
        torch.manual_seed(rank)
        place(monkeypatch, rank, 3)
        sampler = WeightedRandomSampler([0.0] * 50 + [1.0] * 53, 90)
        drawn.append([*chain(*one_pass(shoal.shard(DataLoader(NUMBERS, 10, sampler=sampler))))])
    assert [len(own) for own in drawn] == [30, 30, 30]
    assert min(map(min, drawn)) >= 50 and drawn[0] != drawn[1] != drawn[2]


def test_drawing_leaves_the_script_s_generators_as_they_were():
    for name in ("torch's generator", "Python's generator", "NumPy's generator"):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        next(iter(shoal.shard(LOADERS[name]())))
        here = float(torch.rand(())), random.random(), np.random.random()
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        assert here == (float(torch.rand(())), random.random(), np.random.random())


@pytest.mark.parametrize("samples", [64, 100, 103])
def test_drop_last_drops_what_does_not_fill_a_batch_of_every_worker(samples, monkeypatch):
    batches: list[list[int]] = []
    for rank in range(4):
        place(monkeypatch, rank, 4)
        loader = DataLoader(TensorDataset(torch.arange(samples)), 8, shuffle=True, drop_last=True)
        batches += one_pass(shoal.shard(loader))
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) == samples // 32 * 4


# -- samplers that divide the data themselves ----------------------------------------------------------


def test_a_distributed_sampler_of_this_worker_is_its_share(monkeypatch):
    seen: list[int] = []
    for rank in range(3):
        place(monkeypatch, rank, 3)
        shares = shoal.shard(DataLoader(NUMBERS, 8, sampler=DistributedSampler(NUMBERS, 3, rank)))
        seen += chain(*one_pass(shares))
        assert len(shares) == len(one_pass(shares)) == 5  # ceil(103 / 3) samples
    assert set(seen) == set(range(SAMPLES))


def test_a_distributed_sampler_of_other_shares_is_refused(monkeypatch):
    place(monkeypatch, 1, 4)
    shares = shoal.shard(DataLoader(NUMBERS, 8, sampler=DistributedSampler(NUMBERS, 2, 0)))
    with pytest.raises(ValueError, match=r"takes share 0 of 2, and this is worker 1 of 4: .* shuffle=True"):
        next(iter(shares))


@pytest.mark.parametrize("batch_size", [None, "sampler"])
def test_so_it_is_in_batches_of_its_own_and_without_batches(batch_size, monkeypatch):
    seen: list[int] = []
    for rank in range(2):
        place(monkeypatch, rank, 2)
        sampler = DistributedSampler(NUMBERS, 2, rank)
        if batch_size is None:
            loader = DataLoader(NUMBERS, batch_size=None, sampler=sampler)
        else:
            loader = DataLoader(NUMBERS, batch_sampler=BatchSampler(sampler, 4, False))
        shares = shoal.shard(loader)
        seen += chain(*one_pass(shares))
        assert len(shares) == len(one_pass(shares))
    assert set(seen) == set(range(SAMPLES))


# -- samplers and loaders that are not what they seem ---------------------------------------------------


class Wrong(OwnSampler):
    """Yields another number of samples than its length says."""

    def __init__(self, yields: int) -> None:
        super().__init__(random.random)
        self._yields = yields

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._yields))


@pytest.mark.parametrize("yields", [50, 103, 150])
def test_what_a_sampler_yields_counts_not_its_length(yields, monkeypatch):
    seen: list[int] = []
    for rank in range(3):
        place(monkeypatch, rank, 3)
        many = TensorDataset(torch.arange(200))
        seen += chain(*one_pass(shoal.shard(DataLoader(many, 8, sampler=Wrong(yields)))))
    assert sorted(seen) == list(range(yields))


def test_a_batch_sampler_around_a_sampler_without_a_length_is_read_whole():
    loader = DataLoader(NUMBERS, batch_sampler=BatchSampler(WithoutLength(), 8, False))
    assert sorted(chain(*one_pass(shoal.shard(loader)))) == list(range(SAMPLES))


class Prepared(DataLoader[Any]):
    """A loader that does something to each batch, below `__iter__`."""

    def _get_iterator(self) -> Any:
        return (batch + 1000 for (batch,) in super()._get_iterator())


def test_a_loader_that_does_something_to_its_batches_still_does():
    seen = list(chain(*one_pass(shoal.shard(Prepared(NUMBERS, 8)))))
    assert sorted(seen) == list(range(1000, 1000 + SAMPLES))


@pytest.mark.filterwarnings("ignore:optimizer.step")
def test_a_stream_may_be_read_again_and_beside_another_loader():
    model = torch.nn.Linear(1, 1)
    with shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        stream, other = shoal.shard(DataLoader(Stream(), 8)), shoal.shard(DataLoader(NUMBERS, 8))
        for _ in range(2):
            assert sorted(chain(*one_pass(stream))) == sorted(chain(*one_pass(other))) == list(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize(
    "loader", [DataLoader(NUMBERS, 8), DataLoader(Stream(), 8)], ids=["loader", "stream"]
)
def test_a_look_at_a_batch_in_the_midst_of_a_pass_is_refused_and_from_the_loader_it_is_free(loader):
    model = torch.nn.Linear(1, 1)
    with shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        for _ in zip(range(3), shoal.shard(loader), strict=False):  # a pass may be left
            next(iter(loader))
        batches = iter(shoal.shard(loader))
        next(batches), next(iter(shoal.shard(loader)))
        with pytest.raises(ValueError, match=r"another pass .* in the midst of this one, .* from the loader"):
            next(batches)
        assert sorted(chain(*one_pass(shoal.shard(loader)))) == list(range(SAMPLES))


# -- loader processes ----------------------------------------------------------------------------------


class Noise(Dataset[Tensor]):
    """The seed and the process that a sample is loaded with."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.initial_seed() % 2**31, os.getpid()])


@pytest.mark.slow
def test_loader_processes_of_different_workers_draw_differently_and_may_persist(monkeypatch):
    seeds, processes = [], []
    for rank in range(2):
        place(monkeypatch, rank, 2)
        loader = DataLoader(Noise(), 3, num_workers=1, persistent_workers=True)
        passes = [torch.cat([*shoal.shard(loader)]) for _ in range(2)]
        seeds += [int(seen[0, 0]) for seen in passes]
        processes += [int(seen[0, 1]) for seen in passes]
        shoal.shard(loader)._reader._iterator._shutdown_workers()  # a collection of garbage takes 5 s to
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]  # torch seeds a process once
    assert processes[0] == processes[1] != processes[2] == processes[3]


# -- how many samples a batch has ----------------------------------------------------------------------


@dataclass
class Example:
    name: str
    features: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        [torch.zeros(5), torch.zeros(5)],
        {"x": torch.zeros(5, 3)},
        UserDict({"input_ids": torch.zeros(5, 3)}),
        Example("a", torch.zeros(5)),
        (["a", "b"], Example("b", torch.zeros(5))),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_samples_are_counted_in_whatever_a_batch_is(batch):
    assert count_samples(batch) == 5


def test_a_batch_without_tensors_is_one_sample():
    assert count_samples("words") == count_samples([]) == count_samples(torch.tensor(1.0)) == 1


def test_samples_of_known_batches_are_counted_by_their_indices(monkeypatch):
    handed: list[int] = []
    model = nn.Linear(1, 1)
    with shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as training:
        monkeypatch.setattr(training._replica, "saw", handed.append)
        for _ in shoal.shard(DataLoader(NUMBERS, 50, collate_fn=lambda samples: object())):
            pass
        training.abandon()
    assert handed == [50, 50, 3]


def test_a_loader_that_is_made_anew_for_each_pass_goes_on_with_new_orders_and_is_counted():
    def orders(make):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found = []
        with shoal.attach(model, optimizer) as training:
            for _ in range(3):
                loader = make()
                found.append([int(x) for batch in shoal.shard(loader) for x in batch[0]])
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            handed_out = training.data.passes.batches
        return found, handed_out

    data = TensorDataset(torch.arange(20))
    anew, counted = orders(lambda: DataLoader(data, batch_size=4, shuffle=True))
    kept = DataLoader(data, batch_size=4, shuffle=True)
    assert (anew, counted) == orders(lambda: kept)
    assert counted == 3 * 5
    assert anew[0] != anew[1] != anew[2]


@pytest.mark.parametrize("processes", [0, 1, pytest.param(-1, id="persistent")])
def test_what_processes_of_a_loader_have_read_ahead_is_dealt_again_when_workers_go(processes):
    """This worker is the first of two until the other one dies, in the third step."""
    data = TensorDataset(torch.arange(40))
    loader = DataLoader(data, 4, shuffle=True, num_workers=abs(processes), persistent_workers=processes < 0)
    model = nn.Linear(1, 1)
    with shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)) as training:
        passes = training.data.passes
        passes.redeal(0, 2, {})
        seen: list[list[int]] = []
        for step, (ids,) in enumerate(shoal.shard(loader)):
            training.engine.progress.finish_step()
            seen.append(ids.tolist())
            if step == 2:
                lost = passes.dealing.share(1, 2)
                others = [passes.dealing.share(1, k) for k in (0, 1)]
                passes.redeal(0, 1, {1: range(2, 3)})
        if processes < 0:
            shoal.shard(loader)._reader._iterator._shutdown_workers()  # a collection of garbage takes 5 s to
        training.abandon()
    assert seen[3] == lost
    assert sorted(chain(*seen, *others)) == list(range(40))


def test_one_loader_may_be_read_with_two_seeds_and_by_two_iterators_at_once():
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True)
    with shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)) as training:
        for seed in (0, 1):
            assert sorted(chain(*one_pass(shoal.shard(loader, seed)))) == list(range(20))
        pairs = list(zip(shoal.shard(loader), shoal.shard(loader, 1), strict=True))
        training.abandon()
    for side in zip(*pairs, strict=True):
        assert sorted(int(x) for (batch,) in side for x in batch) == list(range(20))
