"""shard(): each worker's share of a data loader."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from shoal.api.attach import is_due
from shoal.api.attachment import current
from shoal.api.loop_data import LoopData
from shoal.core.seeds import derive, stream
from shoal.replicas.passes import LOOKED_AT, Dealing
from shoal.replicas.wrapped import undress

COPIED = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""The options of a loader that the loader of a share has too, where this version of torch knows them.

Not `in_order`: batches are counted, and skipped on a resume, in order.
"""

Seat: TypeAlias = "tuple[int, int]"
"""A worker's rank, and the number of workers."""

READS = ("__iter__", "_get_iterator")
"""What a class of loaders overrides that yields something else than its sampler and data set say."""


def shard(loader: DataLoader[Any], seed: int = 0) -> Shard:
    """This worker's share of `loader`; iterate over it instead. A single worker's share is the whole loader.

    The same loader always gives the same shard, and a loader that is made anew for every pass, over the same
    data set and with the same options, goes on where the one before it was. So you may call `shard(loader)`
    at every epoch: each pass still gets a new shuffle.
    """
    shards: dict[int, Shard] = vars(loader).setdefault("_shoal_shards", {})
    return shards.setdefault(seed, Shard(loader, seed))


class Shard:
    """The batches of a loader for one worker. In each pass every sample is in a batch of one worker.

    A batch sampler of your own is asked for its batches, and each goes to one worker. Any other sampler is
    asked for its samples: workers get batches of the loader's size, all the same number of them; `drop_last`
    drops what does not fill a batch for each. Samplers that draw from global generators draw anew at each
    pass, and alike at all workers, from seeds that Shoal sets.
    A loader that cannot be asked (an IterableDataset, a class with its own `__iter__`, a sampler without a
    length) is read whole by every worker, which keeps every N-th batch: all must see the same order.
    The shard reports the number of samples in every batch to the attachment, so that short batches have less
    weight. After a resume it skips the batches that were done before the checkpoint.
    """

    def __init__(self, loader: DataLoader[Any], seed: int = 0, seat: Seat | None = None) -> None:
        self._loader, self._dress = undress(loader)
        self._seed = seed
        self._given_seat = seat  # where the share is wanted before attach()
        self._epoch = 0
        self._own = _Dealt()
        self._generator = torch.Generator()
        self._reader: DataLoader[Any] | None = None  # kept from pass to pass for its persistent workers

    def __len__(self) -> int:
        """Batches of this worker in one pass. Raises TypeError if the loader has no length, or none yet."""
        if self._given_seat is None and is_due():
            raise TypeError(
                "len(shoal.shard(loader)) is not known before shoal.attach(), which tells this worker its "
                "share: call it after attach(), or inside the loop over shoal.epochs(). len(loader) counts "
                "the batches of all workers"
            )
        if _is_read_whole(self._loader):
            return _dealt(len(self._loader), self._seat())
        if self._loader.batch_size is None:
            return _dealt(len(_sampler(self._loader)), self._seat())
        dealing = self._dealing(range(len(_sampler(self._loader))))
        dealing.check_is_enough()
        return dealing.steps

    def __iter__(self) -> Iterator[Any]:
        attachment, kind = current(), _kind(self._loader)
        epoch, self._epoch = self._epoch, self._epoch + 1
        if attachment is not None:
            data, reader = attachment.data, (*kind, self._seed)
            epoch = data.begin_pass(reader)
            if data.leads(kind, self._loader.dataset):
                for batch in self._training_data(data, epoch):
                    yield batch
                    data.check_is_last(reader, epoch)
                return
        if _is_read_whole(self._loader):
            yield from islice(self._loader, self._seat()[0], None, self._seat()[1])
        else:
            yield from (batch for batch, _ in self._read(self.deal(epoch), epoch))

    def _training_data(self, data: LoopData, epoch: int) -> Iterator[Any]:
        """This worker's batches of a pass over the data that is trained on, while others come and go."""
        loader, whole, passes = self._loader, _is_read_whole(self._loader), data.passes
        shared = not _divides_itself(loader, self._mine())
        order = None if whole else self._order(epoch)
        number = data.next_pass()
        options = loader.batch_size, bool(loader.drop_last), shared, loader.dataset
        if not passes.begin(number, order, *options):
            return
        if whole:
            yield from self._stream(data)
            return
        dealing = None
        while passes.is_at(number) and passes.dealing is not dealing:  # until it is read to its end
            dealing, left = passes.dealing, passes.left()
            for batch, samples in self._read([own for own in map(self._turn, left) if own != []], epoch):
                data.hand_out(samples)
                yield batch
                if passes.is_at(number) and passes.dealing is not dealing:
                    break
            else:
                if left and not left[-1]:
                    data.sit_out()

    def _stream(self, data: LoopData) -> Iterator[Any]:
        """This worker's batches of a loader that only reading tells about."""
        index = -1
        for index, batch in enumerate(self._loader):
            if not index:
                data.passes.note_first(_digest(batch))
            if data.passes.is_own(index) and not data.passes.skips():
                data.hand_out(count_samples(batch))
                yield batch
        if data.passes.is_short(index + 1):
            data.sit_out()

    def _turn(self, share: list[Any]) -> Any:
        """What the loader reads for a share: a list of samples, or a batch of the user's own."""
        return share if self._loader.batch_size is not None or not share else share[0]

    def _seat(self) -> Seat:
        """Which share of how many this worker takes of what the loader yields."""
        if _divides_itself(self._loader, self._mine()):
            return 0, 1
        return self._given_seat or _seat()

    def _mine(self) -> Seat:
        """This worker's rank and the number of workers, whoever is there."""
        return self._given_seat or (_rank(), _workers())

    def deal(self, epoch: int) -> list[Any]:
        """What this worker takes from the data set in this pass: lists of indices, or indices of batches."""
        dealing = self._dealing(self._order(epoch))
        dealing.check_is_enough()
        return [self._turn(own) for own in dealing.shares(self._seat()[0]) if own]

    def _dealing(self, order: Sequence[Any]) -> Dealing:
        loader = self._loader
        return Dealing(order, loader.batch_size, bool(loader.drop_last), self._seat()[1])

    def _order(self, epoch: int) -> list[Any]:
        """All that the loader's sampler yields in this pass, the same at all workers."""
        sampler = _sampler(self._loader)
        if type(sampler) is SequentialSampler:
            return list(range(len(sampler)))
        if _is_plain_shuffle(sampler):
            generator = stream(self._seed, "shard", epoch)
            return torch.randperm(len(sampler), generator=generator).tolist()
        with _seeded(derive(self._seed, "sampler", epoch)):
            return list(sampler)

    def _read(self, own: Sequence[Any], epoch: int) -> Iterator[tuple[Any, int]]:
        """Load these batches with a loader like the user's, each with its number of samples."""
        self._own.turns = own
        self._generator.set_state(stream(self._seed, "loader", _rank(), epoch).get_state())
        if self._reader is None or not self._loader.persistent_workers:
            self._reader = self._make_reader()
        for batch, indices in zip(self._reader, own, strict=True):
            yield batch, len(indices) if isinstance(indices, list) else count_samples(batch)

    def _make_reader(self) -> DataLoader[Any]:
        old = self._loader
        options = copied_options(old)
        if old.batch_size is None and _batch_sampler(old) is None:
            options |= {"sampler": self._own, "batch_size": None}
        else:
            options["batch_sampler"] = self._own
        return self._dress(DataLoader(old.dataset, generator=self._generator, **options))


class DealtBatches:
    """The batches of one worker as a batch sampler, for a framework that makes its own loaders.

    `set_epoch` chooses the pass, as with torch's DistributedSampler; without it each pass is the next one.
    Raises ValueError for a loader whose batches cannot be dealt out in equal numbers before they are read.
    """

    def __init__(self, loader: DataLoader[Any], seat: Seat, seed: int = 0) -> None:
        _check_can_be_dealt(loader, seat[1])
        self._shard = Shard(loader, seed, seat)
        self._asked = _sampler(loader)
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.sampler = self  # where a framework looks for `set_epoch`
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this one, counted from 0."""
        self._epoch = epoch
        if hasattr(self._asked, "set_epoch"):
            self._asked.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        yield from self._shard.deal(epoch)


def dealt_loader(loader: DataLoader[Any], seat: Seat, seed: int = 0) -> DataLoader[Any]:
    """A loader like this one over the batches of the worker in that seat."""
    generator = stream(seed, "loader", seat[0])
    batches: Any = DealtBatches(loader, seat, seed)
    return DataLoader(loader.dataset, batch_sampler=batches, generator=generator, **copied_options(loader))


def copied_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options that a loader of a share takes over."""
    return {name: getattr(loader, name) for name in COPIED if hasattr(loader, name)}


def _check_can_be_dealt(loader: DataLoader[Any], workers: int) -> None:
    if _is_read_whole(loader):
        raise ValueError(
            f"{type(loader.dataset).__name__} or its loader says only while it is read how many batches "
            f"there are, and {workers} workers need equally many. Take a data set with a length, or give "
            "each worker a loader of its own part and turn the framework's distributed sampler off"
        )
    own = _batch_sampler(loader)
    if loader.batch_size is None and (own is None or len(own) % workers):
        what = "no batch size" if own is None else f"{len(own)} batches of its own batch sampler"
        raise ValueError(
            f"the loader has {what}, which {workers} workers cannot share equally; give it a batch size"
        )


def _kind(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """What a loader has in common with one that is made anew in the same place of a script."""
    return id(loader.dataset), loader.batch_size, loader.drop_last, type(_sampler(loader))


class _Dealt:
    """A sampler that yields what it was given for this pass."""

    turns: Sequence[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.turns)

    def __len__(self) -> int:
        return len(self.turns)


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """The user's own batch sampler; None if torch made it from a batch size, or there is none."""
    return loader.batch_sampler if loader.batch_size is None else None


def _sampler(loader: DataLoader[Any]) -> Any:
    own = _batch_sampler(loader)
    return loader.sampler if own is None else own


def _is_read_whole(loader: DataLoader[Any]) -> bool:
    """Whether nothing but the loader itself knows its batches."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in READS):
        return True
    try:
        len(_sampler(loader))
    except (TypeError, NotImplementedError, AttributeError):
        return True  # it may never end
    return False


def _is_plain_shuffle(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _divides_itself(loader: DataLoader[Any], mine: Seat) -> bool:
    """Whether its sampler yields this worker's share only. Raises ValueError if it yields another share."""
    rank, workers = mine
    own = _batch_sampler(loader)
    divided = [s for s in (own, getattr(own, "sampler", None), loader.sampler) if hasattr(s, "num_replicas")]
    if not divided:
        return False
    sampler: Any = divided[0]
    if (sampler.rank, sampler.num_replicas) != mine:
        raise ValueError(
            f"the loader's {type(sampler).__name__} takes share {sampler.rank} of {sampler.num_replicas}, "
            f"and this is worker {rank} of {workers}: shard() would train on a part of that part. Make "
            "the loader with shuffle=True instead of that sampler"
        )
    return True


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a sampler may draw from, and restore them."""
    before = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(drawn)


def _dealt(batches: int, seat: Seat) -> int:
    """How many of so many batches the worker in that seat gets."""
    rank, workers = seat
    return len(range(rank, batches, workers))


def _seat() -> Seat:
    """Which share of how many this worker takes: of those who are there."""
    attachment = current()
    if attachment is None or attachment.engine.membership is None:
        return _rank(), _workers()
    return attachment.data.seat


def _rank() -> int:
    attachment = current()
    return 0 if attachment is None else attachment.rank


def _workers() -> int:
    attachment = current()
    return 1 if attachment is None else attachment.workers


def count_samples(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor found in it, or 1 without one."""
    found = next(_tensors(batch, depth=3), None)
    return 1 if found is None else len(found)


def _digest(batch: Any) -> str:
    """What tells two batches apart: some of the tensors found in it."""
    found = [(tuple(t.shape), t.detach().reshape(-1)[:LOOKED_AT].tolist()) for t in _tensors(batch, depth=3)]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _tensors(thing: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in a batch that is a collection or an object; not those that lie deeper."""
    if isinstance(thing, Tensor):
        if thing.dim():
            yield thing
    elif depth:
        inside = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", {}).values()
        for part in thing.values() if isinstance(thing, Mapping) else inside:
            yield from _tensors(part, depth - 1)
