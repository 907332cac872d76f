"""What workers agree on beside their strategy: the same start, and the buffers in the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.core.vector import is_statistic, named_buffers
from shoal.engine.engine import Engine
from shoal.engine.group import Group
from shoal.engine.membership import Membership
from shoal.replicas.local_shards import local

START, OPTIONS, BUFFERS = "start", "options", "buffers"

BUFFERS_ARE = ("mean", "first", "own")
"""How the buffers of a model are merged at the end: averaged, worker 0's, or left as each worker has them."""


async def start_alike(engine: Engine, tensors: Sequence[Tensor]) -> None:
    """Take over worker 0's tensors. Raises ValueError where one has another size or dtype."""
    me = engine.identity
    for mine in tensors:
        if me.rank:
            take_start(me, mine, (await engine.mailbox.find(START, 0)).body)
            continue
        for rank in me.others_at_first:
            await engine.channel.send(rank, Message(START, (as_sent(mine),)))


def as_sent(tensor: Tensor) -> Tensor:
    """A tensor as it travels: flat, and numbers instead of booleans."""
    flat = tensor.detach().reshape(-1)
    return flat.to(torch.uint8) if tensor.dtype == torch.bool else flat


def take_start(me: NodeIdentity, mine: Tensor, start: Tensor) -> None:
    """Copy to `mine` what worker 0 began with. Raises ValueError where that has another size or dtype."""
    like = as_sent(mine)
    if start.numel() != mine.numel() or start.dtype != like.dtype:
        raise ValueError(
            f"worker 0 sent a tensor of {start.numel():,} elements ({start.dtype}) for one of "
            f"{mine.numel():,} ({like.dtype}) at {me.name}; all processes must build the same model"
        )
    mine.copy_(start.view(mine.shape))


async def check_alike(engine: Engine, options: Sequence[str]) -> None:
    """Raise ValueError where worker 0's optimizers have other options, which `options` describes."""
    me, text = engine.identity, "\n".join(options)
    if me.rank == 0:
        for rank in me.others_at_first:
            letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            await engine.channel.send(rank, Message(OPTIONS, (letters,)))
        return
    theirs = await engine.mailbox.find(OPTIONS, 0)
    if (differing := first_difference(theirs, options)) is not None:
        raise ValueError(
            f"worker 0's optimizer has {differing[0]}, that of {me.name} has {differing[1]}. All nodes must "
            "take the same step: build the same optimizer in every process"
        )


async def tell_options(engine: Engine, ranks: Iterable[int], options: Sequence[str]) -> None:
    """Before its first step a worker that came tells the others the options of its optimizers."""
    letters = torch.frombuffer(bytearray("\n".join(options).encode()), dtype=torch.uint8)
    for rank in ranks:
        await engine.channel.tell(rank, Message(OPTIONS, (letters,)))


def how_it_came(me: NodeIdentity, rank: int) -> str:
    """What is said of a worker that was not there from the beginning."""
    return "was started again" if rank in me.first_workers else "has joined"


def other_options(engine: Engine, newcomer: tuple[int, str], other: tuple[int, str]) -> ValueError:
    """The error where a worker that came has another option than one that was there, in the same step."""
    me, (rank, its), (whose, theirs) = engine.identity, newcomer, other
    return ValueError(
        f"{me.name_of(rank)} {how_it_came(me, rank)}, and its optimizer has {its}, that of "
        f"{me.name_of(whose)} has {theirs}: its loop has not brought its learning rate to step {engine.t}. "
        "Step the scheduler once an epoch, or training.resumed_from times before the loop"
    )


def first_difference(theirs: Message, options: Sequence[str]) -> tuple[str, str] | None:
    """The first option that another node told which is not this one's; both of them."""
    told = bytes(theirs.body.tolist()).decode().split("\n")
    pairs = zip_longest(told, options, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


# -- buffers ---------------------------------------------------------------------------------------


def largest_message(model: nn.Module, untrained: Iterable[Tensor]) -> int:
    """The bytes of the largest message of those that start alike and merge buffers, without the vector."""
    merged = sum(b.numel() * (2 if b.is_complex() else 1) for _, b in _buffers(model))
    return max(8 * merged, *(t.nbytes for t in untrained), 0)


async def merge_buffers(engine: Engine, model: nn.Module, how: str, weight: float) -> None:
    """Give all workers the same buffers, once training is over. Those that have gone do not count.

    `weight` is that of this worker's running statistics: 1, or less for one that was started again.
    With "mean", running statistics are averaged; all others are worker 0's. With "first" all are worker 0's.
    Without worker 0 every worker keeps its own.
    """
    me, mailbox = engine.identity, engine.mailbox
    means, others = _kinds(model, how)
    if how == "own" or not (means or others) or me.workers == 1:
        return
    if me.rank:
        await engine.channel.send(0, Message(BUFFERS, (_joined(means),), count=weight))
        try:
            merged = [(await mailbox.find(BUFFERS, 0)).body for _ in range(1 + len(others))]
        except PeerLost as loss:
            warnings.warn(f"{me.name} keeps its own buffers, which others may not have: {loss}", stacklevel=5)
            return
        _share_out(merged[0], means)
        for buffer, at_first in zip(others, merged[1:], strict=True):
            buffer.copy_(at_first.view(buffer.dtype).view(buffer.shape))
        return
    there, total, weights = [], _joined(means), weight
    total *= weight
    for rank in range(1, me.workers):
        with suppress(PeerLost):
            m = await mailbox.find(BUFFERS, rank)
            total.add_(m.body, alpha=m.count)
            weights += m.count
            there.append(rank)
    total = total.div_(weights) if weights else _joined(means)
    _share_out(total, means)
    for rank in there:
        for part in (total, *map(_bits, others)):
            await engine.channel.send(rank, Message(BUFFERS, (part,)))


async def merge_present_buffers(engine: Engine, members: Membership, model: nn.Module, how: str) -> None:
    """The same where workers come and go: a round of those who are there, whose first stands for worker 0."""
    means, others = _kinds(model, how)
    if how == "own" or not (means or others):
        return
    sizes = [8 * sum(b.numel() for b in means), *(b.nbytes for b in others)]
    own = torch.cat([_bits(_joined(means)), *(_bits(b).cpu() for b in others)])
    merged, _ = await members.form(partial(_merged, engine.group, own, sizes[0]))
    averages, *firsts = (bits.clone() for bits in torch.split(merged, sizes))
    _share_out(averages.view(torch.float64), means)
    for buffer, bits in zip(others, firsts, strict=True):
        buffer.copy_(bits.view(buffer.dtype).view(buffer.shape))


async def _merged(group: Group, own: Tensor, averaged: int) -> tuple[Tensor, float]:
    """The bytes of all buffers: the first `averaged` of numbers to average, the rest is the first one's."""
    if group.rank:
        await group.send(0, Message(BUFFERS, (own[:averaged].clone(),)))
        return (await group.take(BUFFERS, 0)).body, 1.0
    total = own[:averaged].clone().view(torch.float64)
    for rank in range(1, group.size):
        total += (await group.take(BUFFERS, rank)).body.clone().view(torch.float64)
    merged = torch.cat([_bits(total.div_(group.size)), own[averaged:]])
    for rank in range(1, group.size):
        await group.send(rank, Message(BUFFERS, (merged,)))
    return merged, 1.0


def _kinds(model: nn.Module, how: str) -> tuple[list[Tensor], list[Tensor]]:
    """The buffers of a model that are averaged, and the others."""
    mine = _buffers(model)
    means = [buffer for name, buffer in mine if how == "mean" and is_statistic(name, buffer)]
    return means, [buffer for _, buffer in mine if not any(buffer is mean for mean in means)]


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, local(buffer)) for name, buffer in named_buffers(model)]


def _joined(buffers: Sequence[Tensor]) -> Tensor:
    """All of them as one vector."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *(b.double().reshape(-1).cpu() for b in buffers)])


def _share_out(vector: Tensor, buffers: Sequence[Tensor]) -> None:
    for buffer, values in zip(buffers, torch.split(vector, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view(buffer.shape))


def _bits(buffer: Tensor) -> Tensor:
    """The bytes of a buffer, whatever its dtype."""
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
