"""shard(): each worker's share of a data loader."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from shoal.api.attach import current
from shoal.core.seeds import stream
from shoal.replicas.module import share, steps_per_epoch


def shard(loader: DataLoader[Any], seed: int = 0) -> Shard:
    """This worker's share of `loader`; iterate over it instead. A single worker's share is the whole loader.

    The same loader always gives the same shard. So you may call `shard(loader)` at every epoch: each pass
    still gets a new shuffle.
    """
    shards: dict[int, Shard] = vars(loader).setdefault("_shoal_shards", {})
    return shards.setdefault(seed, Shard(loader, seed))


class Shard:
    """The batches of a loader for one worker, shuffled anew at each pass. Every worker gets the same number.

    The loader's batch size is that of each worker. The shard reports the size of every batch to the
    attachment, so that short batches have less weight. After a resume it skips the batches that were done
    before the checkpoint. With a custom sampler every worker reads the whole loader and keeps every N-th
    batch: the sampler must then yield the same order at all workers.
    """

    def __init__(self, loader: DataLoader[Any], seed: int = 0) -> None:
        self._loader = loader
        self._seed = seed
        self._epoch = 0
        ordinary = type(loader.sampler) is SequentialSampler or (
            type(loader.sampler) is RandomSampler
            and not loader.sampler.replacement
            and loader.sampler.num_samples == len(cast(Sized, loader.dataset))
        )
        self._by_sample = ordinary and loader.batch_size is not None

    def __len__(self) -> int:
        """Batches of each worker in one pass."""
        if not self._by_sample:
            return len(self._loader) // _workers()
        samples, batch = len(cast(Sized, self._loader.dataset)), self._loader.batch_size or 1
        if self._loader.drop_last:
            return samples // (batch * _workers())
        return steps_per_epoch(samples, batch, _workers())

    def __iter__(self) -> Iterator[Any]:
        attachment = current()
        leads = attachment is not None and attachment.leads(self)
        skip = attachment.skip_batches(len(self)) if attachment is not None and leads else 0
        batches = self._own_samples(skip) if self._by_sample else self._own_batches(skip)
        self._epoch += 1
        for batch in batches:
            if attachment is not None and leads:
                attachment.hand_out(_samples(batch))
            yield batch

    def _own_samples(self, skip: int) -> Iterator[Any]:
        """A loader like the user's, over this worker's samples only."""
        old = self._loader
        samples, batch = len(cast(Sized, old.dataset)), old.batch_size or 1
        if isinstance(old.sampler, RandomSampler):
            order = torch.randperm(samples, generator=stream(self._seed, "shard", self._epoch))
        else:
            order = torch.arange(samples)
        last = None if old.drop_last else len(self) - 1  # the last step takes the remainder
        own = [
            share(order, step, batch, _rank(), _workers(), step == last) for step in range(skip, len(self))
        ]
        loader: DataLoader[Any] = DataLoader(
            old.dataset,
            batch_sampler=[indices.tolist() for indices in own],
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            multiprocessing_context=old.multiprocessing_context,
            prefetch_factor=old.prefetch_factor,
            generator=stream(self._seed, "loader", self._epoch),  # else it would use torch's global generator
        )
        return iter(loader)

    def _own_batches(self, skip: int) -> Iterator[Any]:
        """Every N-th batch of the loader, without its last incomplete round of N."""
        every, rounds = _workers(), len(self)
        return islice(self._loader, skip * every + _rank(), rounds * every, every)


def _rank() -> int:
    attachment = current()
    return 0 if attachment is None else attachment.rank


def _workers() -> int:
    attachment = current()
    return 1 if attachment is None else attachment.workers


def _samples(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor, or 1 without one."""
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return _samples(batch[0])
    return 1
