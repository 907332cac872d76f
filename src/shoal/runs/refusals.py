"""What does not go together in a run, each said in one sentence."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.nn import Parameter

from shoal.core.codec import Codec
from shoal.core.limits import at_least
from shoal.core.task import Task
from shoal.launch.keeper_process import NOBODY_RETURNS, NOBODY_WAITS
from shoal.layouts.model_layout import ModelLayout
from shoal.replicas.optimizer import steps_each_element
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy


def check_crew(strategy: Strategy, word: str) -> None:
    """Raise ValueError for a strategy whose workers cannot become more during training."""
    deal = strategy.deal
    if deal.fixed:
        raise ValueError(
            f"crew: {word!r} gives every worker its own share of the data, and a worker that joins finds "
            "none left; take --strategy.fixed_shares false, in Python fixed_shares=False"
        )
    if deal.blocks is not None:
        raise ValueError(f"crew: {bound_to_a_crew(strategy, word)}; take period")
    if deal.portions:
        raise ValueError(f"crew: workers of {word!r} have no step in common at which others could join")
    if strategy.servers <= 1 and (why := bound_to_a_crew(strategy, word)) is not None:
        raise ValueError(f"crew: {why}")


def bound_to_a_crew(strategy: Strategy, word: str) -> str | None:
    """Why a run cannot go on with another number of workers or servers; None if it can."""
    deal = strategy.deal
    if strategy.independent:
        return f"the workers of {word!r} train models of their own, which no other could join"
    if deal.blocks is not None:
        return f"blocks={deal.blocks} cuts the data up for one number of workers"
    if deal.whole:
        return f"every worker of {word!r} goes through all of the data, from its beginning"
    if strategy.servers > 1:
        return f"the servers of {word!r} send updates on to each other, and some may have been under way"
    return None


def check_balance(strategy: Strategy, word: str) -> None:
    """Raise ValueError for a strategy whose workers do not all step together, or keep fixed samples."""
    if strategy.servers or strategy.survives:
        raise ValueError(
            f"balance divides the samples of a step that all workers take together; "
            f"the workers of {word!r} each go at their own speed"
        )
    if strategy.deal.fixed or strategy.deal.blocks is not None:
        raise ValueError(f"balance cannot divide samples by speed: {word!r} gives every worker its own share")


def check_every(every: int | None, checkpoint: str | None) -> None:
    """Raise ValueError for a number of steps between checkpoints that cannot be, or for no place for them."""
    if every is not None and checkpoint is None:
        raise ValueError("every=... says how often to write a checkpoint; say where with checkpoint=DIR")
    if every is not None and every < 1:
        raise ValueError(f"every={every}: checkpoints are at least 1 step apart")


def check_native(collective: str, transport: str, codec: Codec) -> None:
    """Raise ValueError for an all-reduce of the transport's own where there is none, or none that fits."""
    if collective == "native" and not (transport == "gloo" and codec.in_flight):
        raise ValueError(
            "collective 'native' needs transport 'gloo' and no codec, or one that averages in flight, "
            "such as low_rank; take 'auto'"
        )


def check_portions(word: str, checkpoint: str | None, task: Task) -> None:
    """Raise ValueError for what does not go with a server that hands the data out in portions."""
    if checkpoint is not None:
        raise ValueError(
            f"checkpoint={checkpoint!r}: workers of {word!r} have no step in common to save at, as "
            "each computes as many portions as it can; leave checkpoint out"
        )
    if task.growth:
        raise ValueError(f"grow_batch: batches are portions of one sum under {word!r}; take a fixed batch")


def check_layout(layout: ModelLayout, task: Task, strategy: Strategy, codec: Codec, given: Set[str]) -> None:
    """Raise ValueError for what does not go with workers that are groups; `given` names other settings."""
    if layout.group is None:
        raise ValueError("the layout does not say of how many processes a worker is; give it group=2, say")
    for name, why in BESIDE_GROUPS.items():
        if name in given:
            raise ValueError(f"a layout and {name}: {why}")
    word = STRATEGIES.name_of(strategy)
    if strategy.servers or strategy.survives:
        raise ValueError(
            f"a layout and strategy {word!r}: its workers go at their own speed, and the processes of a "
            "group cannot; take 'sync', 'bmuf', 'diloco' or another whose workers step together"
        )
    if strategy.looks_at:
        raise ValueError(
            f"a layout and strategy {word!r}: it looks at {strategy.looks_at}, and each process holds "
            "some or parts of them; take 'diloco'"
        )
    if codec.needs_products or (codec.needs_matrices and layout.cuts_matrices):
        raise ValueError(
            f"a layout and codec {codec}: it needs whole matrices, or factors of their gradients"
        )
    optimizer = task.optimizer([Parameter(torch.zeros(2, 2))], lr=task.lr)
    if layout.cuts_matrices and not steps_each_element(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole tensors, and each process holds a part of them; take "
            "layout 'pipeline', or another optimizer"
        )


BESIDE_GROUPS = {
    "sim": "in virtual time `shoal split` shows a step of every one; take real processes here",
    "crew": "a group of processes cannot join a run later",
    "balance": "the processes of a group would measure different speeds",
    "checkpoint": "no process holds the whole model; `shoal run --group` saves that of a script",
}
"""Settings that a worker of several processes cannot have, and why."""


def check_places(max_workers: int, workers: int, transport: str, word: str, *, elastic: bool) -> None:
    """Raise ValueError where nobody could join from elsewhere."""
    if max_workers < workers:
        raise ValueError(f"max_workers={max_workers}: {workers} workers begin, so there are as many at least")
    if max_workers == workers:
        return
    if transport != "grpc":
        raise ValueError(
            f"max_workers={max_workers}: workers join from elsewhere over gRPC, and not over {transport!r}; "
            "take transport 'grpc'"
        )
    if not elastic:
        raise ValueError(
            f"max_workers={max_workers}: nobody can join workers of {word!r} here; that is for workers who "
            "average among themselves, as those of 'sync', 'bmuf' and 'diloco', without balance, crew and "
            "layout"
        )


def check_membership(min_workers: int, spares: int, workers: int, *, elastic: bool, returns: bool) -> None:
    """Raise ValueError for numbers of workers that cannot be kept.

    `elastic` says that workers who average go on without one that dies; `returns`, that it comes back.
    """
    if not 1 <= min_workers <= workers:
        raise ValueError(f"min_workers={min_workers}: take 1 to {workers}, the number of workers")
    if min_workers > 1 and not elastic:
        raise ValueError(f"min_workers={min_workers}: {NOBODY_WAITS}")
    at_least(0, spares=spares)
    if spares and not returns:
        raise ValueError(f"spares={spares}: {NOBODY_RETURNS}")
