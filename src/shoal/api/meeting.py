"""Meeting: the workers of a run exchange small values beside their strategy, such as a path or a metric."""

from __future__ import annotations

import json
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from shoal.api.attachment import current
from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.launch.environment import Place
from shoal.transports.rendezvous import Store, await_keys

MEET = "meet"


class Meeting:
    """What a framework calls collectives: every worker must make the same calls in the same order.

    From attach() to finish() values travel as messages, and a strategy's own messages are answered meanwhile.
    Before and after, they go through the store in which the nodes of the run found each other; nothing then
    limits the wait, since a launcher ends all workers if one fails. Values are what JSON can write.
    """

    def __init__(self, place: Place, workers: int) -> None:
        self._place = place
        self._workers = workers
        self._held = 0  # meetings in the store

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, in the order of their ranks; of those that are left, while training.

        Raises TypeError for a value that JSON cannot write, and PeerLost if worker 0 has gone.
        """
        try:
            text = json.dumps(value)
        except TypeError as error:
            raise TypeError(
                f"workers cannot exchange {type(value).__name__!r}, only what JSON can write: {error}"
            ) from None
        if self._workers == 1:
            return [value]
        training = current()
        texts = self._through_store(text) if training is None else drive(_exchange(training.engine, text))
        return [json.loads(one) for one in texts]

    def barrier(self) -> None:
        """Wait for all workers."""
        self.gather(None)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The value of worker `src`."""
        is_mine = src == self._place.rank
        return self.gather(value if is_mine else None)[src]

    def total(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The sum over all workers, in the order of their ranks, and how many they are."""
        stacked = self.stack(tensor)
        return stacked.sum(dim=0, dtype=tensor.dtype), len(stacked)

    def stack(self, tensor: Tensor) -> Tensor:
        """The tensors of all workers, which must have the same shape, stacked. No gradient flows back."""
        values = self.gather(tensor.detach().cpu().tolist())
        return torch.stack([torch.tensor(v, dtype=tensor.dtype, device=tensor.device) for v in values])

    def _through_store(self, text: str) -> list[str]:
        keys = {rank: f"{MEET}/{self._held}/{rank}" for rank in range(self._workers)}
        self._held += 1
        if self._place.rank in keys:  # a server listens only
            self._store.set(keys[self._place.rank], text)
        await_keys(self._store, keys, inf)
        return [self._store.get(key).decode() for key in keys.values()]

    @cached_property
    def _store(self) -> Store:
        store = self._place.open_store()
        if store is None:
            raise ValueError(
                f"these {self._place.nodes} processes have no store in which to meet, as those of mpiexec; "
                "start them with `shoal run` or torchrun"
            )
        return store


async def _exchange(engine: Engine, text: str) -> list[str]:
    """Send the text to worker 0, which sends all texts back."""
    me, find = engine.identity, engine.mailbox.find
    answers = engine.rounds.answers  # a strategy may wait for them while this worker waits here
    if me.rank:
        await engine.channel.send(0, Message(MEET, (_bytes(text),)))
        return list(json.loads(_text((await find(MEET, 0, handlers=answers)).body)))
    texts, there = [text], []
    for rank in range(1, me.workers):
        try:
            texts.append(_text((await find(MEET, rank, handlers=answers)).body))
        except PeerLost:
            if engine.progress.works(rank):  # it is there, but has been silent for too long
                raise
            continue
        there.append(rank)
    for rank in there:
        await engine.channel.send(rank, Message(MEET, (_bytes(json.dumps(texts)),)))
    return texts


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(body: Tensor) -> str:
    return body.cpu().numpy().tobytes().decode()
