"""Comings: what must be right in a loop to which workers come back, and what is said of those who went."""

from __future__ import annotations

import warnings

from torch import nn

from shoal.api.agreement import (
    OPTIONS,
    first_difference,
    how_it_came,
    merge_present_buffers,
    other_options,
    tell_options,
)
from shoal.api.loop_data import LoopData
from shoal.api.same_weights import SameWeights
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.launch.drive import drive
from shoal.replicas.attached import AttachedReplica
from shoal.vocabulary.strategy import Sends, Strategy


class Comings:
    """One worker's loop among workers that come and go. `buffers` is how those of `model` are merged."""

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        replica: AttachedReplica,
        data: LoopData,
        model: nn.Module,
        buffers: str,
    ) -> None:
        assert engine.membership is not None, "nobody comes or goes in this run"
        self._engine = engine
        self._members = members = engine.membership
        self._replica = replica
        replica.others_need_averages = True
        self._data = data
        self._model, self._buffers = model, buffers
        self._steps_alike = strategy.sends is Sends.MEAN_GRADIENTS
        name = type(strategy).__name__
        self._same_weights = SameWeights(engine, replica, name) if strategy.ends_equal else None
        if self._steps_alike:
            members.handlers[OPTIONS] = self._compare
        engine.last_round = self.last_round

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that took part in the last average."""
        last = self._members.outcome
        if last is None:  # before the first average
            return self._engine.rank == min(self._members.present) and not self._engine.incarnation
        return self._engine.rank == min(last.contributors)

    def check(self) -> None:
        """Before the first step of a worker that is back: raise ValueError if it reads other data."""
        goes_on = self._data.passes.goes_on
        if goes_on and (difference := goes_on.own.difference(goes_on.theirs)) is not None:
            came = f"{self._engine.name} {how_it_came(self._engine.identity, self._engine.rank)}"
            raise ValueError(f"{came}, and it {difference}: all workers must go through the same data")
        if self._steps_alike:
            drive(tell_options(self._engine, self._members.others, self._replica.options))

    async def last_round(self) -> None:
        """Compare weights, merge the buffers of those who are there, and warn of what nobody has done."""
        if self._same_weights is not None:
            await self._same_weights.compare()
        await merge_present_buffers(self._engine, self._members, self._model, self._buffers)
        if (left := self._data.passes.left_over) and self.is_first:
            warnings.warn(
                f"{left} samples that killed workers were dealt after the last average before the end of the "
                "loop are not in the model",
                stacklevel=4,
            )

    async def _compare(self, m: Message) -> None:
        """One that joined from elsewhere is told in return: it gives up, and not those whose run it is."""
        me, differing = self._engine.identity, first_difference(m, self._replica.options)
        if differing is None or self._engine.progress.has_ended:
            return
        sender, here = (m.src, differing[0]), (me.rank, differing[1])
        if m.src in me.first_workers:
            pair = (sender, here) if me.rank in me.first_workers else (here, sender)
            raise other_options(self._engine, *pair)
        if me.rank in me.first_workers:
            await tell_options(self._engine, [m.src], self._replica.options)
