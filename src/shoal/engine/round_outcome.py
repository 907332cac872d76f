"""RoundOutcome: what came of an average of workers that come and go, and the message that carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.transport import Message
from shoal.engine.elastic_messages import RoundResult


@dataclass(frozen=True)
class RoundOutcome:
    """What came of a round: all members have the same."""

    average: Tensor
    total: float
    contributors: tuple[int, ...]
    dealt: tuple[int, ...]  # to whom batches are dealt from the next edge on

    def message(self, round: int, epoch: int) -> RoundResult:
        """The outcome for a member that lacks it."""
        ranks = [torch.tensor(ranks, dtype=torch.int64) for ranks in (self.contributors, self.dealt)]
        return RoundResult(parts=(self.average, *ranks), seq=round, count=self.total, version=epoch)

    @classmethod
    def of(cls, m: Message, like: Tensor) -> RoundOutcome:
        """The outcome in a message."""
        average, contributors, dealt = m.parts
        return cls(average.to(like.device), m.count, tuple(contributors.tolist()), tuple(dealt.tolist()))

    @classmethod
    def of_state(cls, state: dict[str, Any], like: Tensor) -> RoundOutcome:
        """The outcome in the state of a worker, as its `vars`."""
        ranks = tuple(state["contributors"]), tuple(state["dealt"])
        return cls(state["average"].to(like.device), state["total"], *ranks)
