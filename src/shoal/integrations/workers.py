"""Workers: who this process is in a run, for a framework that asks before anything is attached."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.api.attach import attach_at, choose_strategy
from shoal.api.attachment import Attachment
from shoal.api.meeting import Meeting
from shoal.core.codec import Codec
from shoal.core.errors import Unavailable
from shoal.launch.environment import Place
from shoal.replicas.optimizer import is_plain_sgd
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Sends, Strategy


class Workers:
    """This process among the workers of a run, before, during and after training.

    `framework` names the library in messages. A server of the strategy has a rank of `size` or more, and
    stays in attach(). Raises ValueError if the strategy does not fit how the processes were started.
    """

    def __init__(
        self,
        framework: str,
        strategy: Strategy | str | None,
        codec: Codec | str | None,
        options: dict[str, Any],
    ) -> None:
        if options and not isinstance(strategy, str):
            raise TypeError(f"pass {', '.join(options)} only with the name of a strategy")
        place = Place.find()
        if place.checkpoint is not None:
            raise ValueError(
                f"--checkpoint would save beside {framework}, which could not find its place again; use the "
                f"checkpoints of {framework} instead"
            )
        if place.group > 1:
            raise ValueError(
                f"--group {place.group}: {framework} has no mesh to give to Shoal; train in a loop of your "
                "own, with attach(..., mesh=mesh)"
            )
        if place.begins_with is not None:
            raise ValueError(
                f"--max-workers: {framework} owns the loop, and nobody who joins would find a place in it; "
                "train in a loop of your own, with shoal.attach"
            )
        self.framework = framework
        self.rank = place.rank
        self._given = STRATEGIES.read(strategy, **options) if isinstance(strategy, str) else strategy
        self._codec = codec
        self.strategy = choose_strategy(place, self._given)
        self.size = place.identity(self.strategy).workers
        self.meeting = Meeting(place, self.size)
        self.training: Attachment | None = None  # until it has finished

    @property
    def seat(self) -> tuple[int, int]:
        """This worker's rank, and the number of workers; a server, which reads no data, sits at 0."""
        return self.rank if self.rank < self.size else 0, self.size

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this host."""
        return int(os.environ.get("LOCAL_RANK", self.rank))

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that logs and saves."""
        return self.rank == 0

    def attach(
        self, model: nn.Module | Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Attachment:
        """Attach them; a server does not come back."""
        place = replace(Place.find(), returns=False)  # the framework's loop would not find its place again
        self.training = attach_at(place, model, optimizers, self._given, codec=self._codec)
        return self.training

    def finish(self) -> None:
        """Merge the last updates into the model of every worker, if anything is attached."""
        training, self.training = self.training, None
        if training is not None:
            training.finish()

    def abandon(self) -> None:
        """Leave without a result: training has failed."""
        training, self.training = self.training, None
        if training is not None:
            training.abandon()

    def common_model(self) -> AbstractContextManager[Any]:
        """Inside the block the attached model is what all workers have learnt together."""
        return nullcontext() if self.training is None else self.training.common_model()

    def check_can_load(self) -> None:
        """Raise ValueError if weights that are loaded now, after attach(), would be overwritten or mixed."""
        averages = self.strategy.sends in (Sends.MEAN_GRADIENTS, Sends.NOTHING)
        if self.training is not None and self.size > 1 and not averages:
            raise ValueError(
                f"{self.strategy} keeps a model of its own since the optimizer was set up, which weights "
                "that are loaded now would not reach; load them before"
            )

    def check_can_resume(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError if the state of an optimizer is where a checkpoint of the framework has none."""
        if not self.strategy.steps_at_server:
            return
        for optimizer in optimizers:
            if not is_plain_sgd(optimizer):
                raise ValueError(
                    f"{self.strategy} runs {type(optimizer).__name__} at its server, and a checkpoint of "
                    f"{self.framework} has no state of it; resume without a server, or with plain SGD"
                )

    def warn_of_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn before a checkpoint that cannot be resumed from."""
        if self.strategy.steps_at_server and not all(map(is_plain_sgd, optimizers)):
            warnings.warn(
                f"{self.strategy} runs the optimizer at its server: this checkpoint of {self.framework} has "
                "the weights, and no state of the optimizer",
                stacklevel=3,
            )


def missing(extra: str, library: str) -> Unavailable:
    """What to raise if the library of an integration is not installed."""
    return Unavailable(
        f"shoal.integrations.{extra} needs {library}. Install it with: pip install 'shoal[{extra}]'"
    )
