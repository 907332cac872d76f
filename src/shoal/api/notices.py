"""Notices: warnings about what a script does, where plain PyTorch would not make anyone wonder."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.api.same_data import SameData
from shoal.api.same_weights import SameWeights, differ
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.optimizer import steps_on_zeros
from shoal.replicas.outside_changes import SAMPLED, OutsideChanges
from shoal.replicas.passes import PassMark
from shoal.vocabulary.strategy import Sends, Strategy

FIRST = "first"

UNUSED_ARE = ("refused", "zeros")
"""What a parameter is that has no gradient in a step, where whole gradients are merged."""

MOST_ELEMENTS = 1 << 20
"""Of each parameter's gradient that is looked at to tell two batches apart."""

Pair: TypeAlias = "tuple[int, int]"


class Notices:
    """Looks at the steps of one worker's loop, and warns once of each thing that it finds.

    `unused` is one of UNUSED_ARE.
    """

    def __init__(self, engine: Engine, strategy: Strategy, replica: AttachedReplica, unused: str) -> None:
        self._engine = engine
        self._name = type(strategy).__name__
        self._replica = replica
        alike = not (strategy.independent or engine.incarnation)  # whether all begin at the same weights
        self._first = FirstGradients(engine) if alike else None
        self._same_data = SameData(engine) if alike else None
        merges = strategy.sends is Sends.MEAN_GRADIENTS and engine.identity.workers > 1
        compares = strategy.ends_equal and engine.identity.workers > 1
        self._same_weights = SameWeights(engine, replica, self._name) if compares else None
        self._steps_alike = merges
        whole = strategy.steps_at_server or merges  # gradients: one that is missing would count as zeros
        self._looks_for_unused = whole and unused == "refused"
        self._moves_frozen = strategy.sends not in (Sends.MEAN_GRADIENTS, Sends.NOTHING)
        if strategy.servers or not strategy.keeps_changes:
            replica.outside_changes = OutsideChanges(replica.x, self._name, engine.progress)
        self._harmless: set[tuple[int, str]] = (
            set()
        )  # optimizers with their options, to which zeros are nothing

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The loop has called `optimizer.step()`. Raises ValueError if the step would not be what it says."""
        if self._moves_frozen and not all(p.requires_grad for p in self._replica.stepped_parameters):
            raise ValueError(
                f"a parameter was frozen after attach(), and {self._name} would still move it. Freeze it "
                "before attach(), or take strategy 'sync'."
            )
        if self._same_weights is not None and self._steps_alike:
            drive(self._same_weights.look())
        self._look_at_data(self._replica.passes.mark)
        self._compare_with_saved()
        self._look_for_equal_batches()
        if self._looks_for_unused and (name := self._replica.without_gradient):
            self._check_zeros(name, optimizer)

    def _check_zeros(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if a step along zeros is not what plain PyTorch does without a gradient."""
        options = [{**group, "params": None, "lr": None} for group in optimizer.param_groups]
        if (tried := (id(optimizer), str(options))) in self._harmless:
            return
        if steps_on_zeros(optimizer):
            raise ValueError(
                f"parameter {name!r} has no gradient in this step. {self._name} merges whole gradients, and "
                f"{type(optimizer).__name__} would move it along zeros, where plain PyTorch leaves it alone. "
                "Freeze it before attach() if it is never used. If other workers use it in this step, or "
                'zeros are right, say attach(..., unused="zeros").'
            )
        self._harmless.add(tried)

    def before_end(self) -> None:
        """No step follows; the other workers are still there."""
        self._look_at_data(None)
        self._compare_with_saved()
        self._look_for_equal_batches()
        if self._same_weights is not None and self._engine.membership is None:
            drive(self._same_weights.compare())

    def at_end(self) -> None:
        """The run is over."""
        if not self._engine.progress.clock:
            warnings.warn(
                "optimizer.step() was never called on the optimizer that attach() was given, so nothing was "
                "trained",
                stacklevel=4,
            )

    @contextmanager
    def at_script_end(self) -> Iterator[None]:
        """In this block the run is finished, which the script has not done. Rounding makes no other model."""
        seen = self._replica.x[:: max(1, self._replica.x.numel() // SAMPLED)]
        before = seen.clone()
        yield
        if differ(before, seen, steps=1):
            warnings.warn(
                "the script ended without training.finish(), and only its end has merged the last updates: "
                "what it tested, saved or printed was another model. Call training.finish() after the loop",
                stacklevel=4,
            )

    def _look_at_data(self, mark: PassMark | None) -> None:
        if self._same_data is not None and not self._same_data.is_over:
            drive(self._same_data.look(mark))

    def _compare_with_saved(self) -> None:
        """In a run that was resumed: raise ValueError for other data, and warn of another order."""
        goes_on, self._replica.passes.goes_on = self._replica.passes.goes_on, None
        if goes_on is None or goes_on.was_done or self._engine.incarnation:
            return
        own, saved, _ = goes_on
        if not own.is_cut_like(saved):
            raise ValueError(
                f"this run goes on from a checkpoint in a pass over {saved}, and its loop now reads {own}: "
                "resume with the same data and batches, or begin a new run in another folder"
            )
        if not own.is_in_order(saved):
            warnings.warn(
                f"this run goes on from a checkpoint in a pass over {saved}, which come in another order "
                "now: some come twice in this pass, and some never. Seed what shuffles or chooses them",
                stacklevel=4,
            )

    def _look_for_equal_batches(self) -> None:
        if self._first is None:
            return
        drive(self._first.show(self._replica.gradients))
        pair = self._first.equal()
        if self._first.is_over:  # a look at every step would cost time
            self._first = None
        if pair is not None:
            warnings.warn(
                f"workers {pair[0]} and {pair[1]} computed the same first gradient: they train on the same "
                "batches, which teaches no more than one of them. Read the data through shoal.shard(loader), "
                "or give each worker other samples by training.rank.",
                stacklevel=5,
            )


class FirstGradients:
    """Finds workers whose first gradients are the same: then they train on the same batches.

    All start from the same weights. Every worker sends a fingerprint to worker 0, which waits for nobody.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[str, int] = {}  # fingerprint -> the first worker that had it
        first = len(engine.identity.first_workers)
        self._missing = first if first > 1 else 0
        self._is_done = self._missing == 0 or engine.is_server

    @property
    def is_over(self) -> bool:
        """Whether this worker has nothing more to show, and nothing to wait for."""
        return self._is_done and (self._engine.rank > 0 or self._missing <= 0)

    async def show(self, gradients: Sequence[Tensor]) -> None:
        """Tell worker 0 of this worker's gradient, if it is the first that counts."""
        if self._is_done or (mark := _fingerprint(gradients)) is None:
            return
        self._is_done = True
        if self._engine.rank == 0:
            self._note(mark, 0)
        else:
            await self._engine.channel.send(0, Message(FIRST, (torch.frombuffer(mark, dtype=torch.uint8),)))

    def equal(self) -> Pair | None:
        """Two workers that have shown the same gradient, at worker 0 and once; else None. Never waits."""
        if self._engine.rank or not self._is_done or not self._missing:
            return None
        for m in self._engine.mailbox.poll(FIRST):
            if (before := self._note(m.body.numpy().tobytes(), m.src)) is not None:
                self._missing = 0
                return before, m.src
        return None

    def _note(self, mark: bytes | bytearray, rank: int) -> int | None:
        self._missing -= 1
        before = self._seen.setdefault(bytes(mark).hex(), rank)
        return None if before == rank else before


def _fingerprint(gradients: Sequence[Tensor]) -> bytearray | None:
    """A fingerprint of gradients; None if they are zero, or mixed precision overflowed."""
    parts = [g.detach().reshape(-1)[:MOST_ELEMENTS].float().cpu() for g in gradients if not g.is_sparse]
    if not all(bool(part.isfinite().all()) for part in parts) or not any(bool(p.any()) for p in parts):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.numpy().tobytes())
    return bytearray(digest.digest())
