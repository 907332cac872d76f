"""Strategy: what an algorithm answers. It says how workers are kept together, and holds no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import ClassVar

from torch import Tensor

from shoal.core.codec import Codec, Identity
from shoal.core.identity import SERVER
from shoal.core.limits import at_least
from shoal.core.replica import NoMoreSteps
from shoal.engine.membership_errors import Demoted
from shoal.vocabulary.node import Node


class Sends(Enum):
    """What a strategy's messages carry: it decides which codecs make sense."""

    MEAN_GRADIENTS = "gradients that all workers average at every step"
    GRADIENTS = "gradients"
    DIFFERENCES = "differences of models"
    WHOLE_GRADIENTS = "gradients of the whole data"  # exactly
    MODELS = "models"  # exactly
    MEMORY = "additions to shared memory"  # exactly
    COMPRESSED = "differences that it has compressed itself"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Deal:
    """How the training data is dealt out: step by step to all workers, unless a field says otherwise."""

    fixed: bool = False  # every worker keeps the same share in every epoch
    whole: bool = False  # every worker takes all of it, in an order of its own
    blocks: int | None = None  # so many blocks, each cut into a split for every worker
    portions: bool = False  # no worker has a share: a server hands the batches of each pass to whoever asks


@dataclass(frozen=True)
class Setting:
    """What a strategy is asked to work with."""

    workers: int
    codec: Codec = field(default_factory=Identity)
    durability: str = "memory"
    own_loop: bool = False  # the user's training loop, which owns the data
    shards: int = 1  # nodes that make up each server, with a slice of the model each


@dataclass(frozen=True)
class Strategy(ABC):
    """One way of training on many workers. Frozen: hyper-parameters only; all state lives in the node.

    A subclass sets these where they differ from the defaults; see docs/extending.md.
    """

    sends: ClassVar[Sends] = Sends.GRADIENTS
    survives: ClassVar[bool] = False  # whether workers go on without one that died, though there is no server
    independent: ClassVar[bool] = False  # whether workers have models of their own, and all predict together
    one_sided: ClassVar[bool] = False  # whether workers change the server's memory without its help
    plain_sgd_only: ClassVar[bool] = False  # whether it takes a gradient's step itself, as `x -= lr * g`
    own_optimizer: ClassVar[bool] = False  # whether no optimizer of the user's takes any step
    keeps_changes: ClassVar[bool] = True  # of weights, that a loop makes beside its optimizer; no server does
    ends_equal: ClassVar[bool] = False  # whether workers, however long their loops, end with equal weights
    default_codec: ClassVar[str] = "none"  # how messages are compressed where nobody says so
    recovers: ClassVar[str] = "journal"  # the strongest durability its server supports: memory, or none

    @property
    def servers(self) -> int:
        """How many servers it needs beside the workers. Each may be several nodes that own a slice each."""
        return 0

    @property
    def steps_at_server(self) -> bool:
        """Whether its servers run the user's optimizer, each on its slice of the model."""
        return False

    @property
    def one_rate(self) -> bool:
        """Whether it, or its servers, have a rule of their own, with one learning rate for all parameters."""
        return False

    @property
    def mixes_steps(self) -> bool:
        """Whether steps are mixed that may be of different optimizers.

        So it is where nobody waits for all, and with a velocity or a learning rate for the whole model.
        """
        return False

    @property
    def looks_at(self) -> str:
        """What it looks at that every worker must have whole, in words; "" if nothing."""
        return ""

    @property
    def deal(self) -> Deal:
        """How the training data is dealt out."""
        return Deal()

    @property
    def is_elastic(self) -> bool:
        """Whether workers average among themselves, so that they can go on without one that dies."""
        return not (self.servers or self.survives or self.independent) and self.deal == Deal()

    def steps_per_update(self, workers: int) -> float:
        """How many workers' steps move the model as far as one step of one worker.

        All of them where they are averaged. `scale_lr="auto"` makes up for it by the learning rate.
        """
        return workers

    def optimizer_steps(self, workers: int) -> float:
        """How many steps an optimizer, and thus its count, takes for one step of every worker."""
        return 1

    def check(self, setting: Setting) -> None:
        """Raise ValueError for a setting that these options do not suit; extend it for your own options."""
        if setting.durability == "journal" and self.recovers != "journal":
            raise ValueError(
                f"a server of {type(self).__name__} cannot be put together again from a journal; "
                "take durability 'memory', and checkpoints"
            )
        if setting.own_loop and self.deal.blocks is not None:
            raise ValueError(
                f"blocks={self.deal.blocks} cuts up the data of run() and compare; in a loop of your own, "
                "shard deals it out: take period"
            )
        self._check_codec(setting.codec)

    @abstractmethod
    async def worker(self, w: Node) -> None:
        """What each worker does, step by step."""

    async def finish(self, w: Node) -> None:
        """What a worker does when no step is left: hand over what it still holds, take the trained model."""
        return

    async def server(self, s: Node) -> None:
        """What the server does, if the strategy has one."""
        raise NotImplementedError(f"{type(self).__name__} has no server")

    async def live(self, node: Node) -> None:
        """A node's whole life, worker or server."""
        engine = node.engine
        if engine.identity.is_server:
            engine.service.begin()
        if self.one_sided:
            await engine.one_sided.open()
        if engine.identity.is_server:
            await self.server(node)
            return
        members = engine.membership
        while members is not None:
            try:
                if members.is_joining:
                    await engine.work.join()
                await self._work(node)
                if engine.last_round is not None:
                    await engine.last_round()
                await members.part()
                return
            except Demoted:
                continue
        await self._work(node)

    async def _work(self, node: Node) -> None:
        """Be a worker, until nobody has a step left and this node has the trained model."""
        engine = node.engine
        with suppress(NoMoreSteps):
            await self.worker(node)
        await engine.client.settle()
        await engine.averages.agree(self.solution(node))
        await self.finish(node)

    def solution(self, node: Node) -> Tensor:
        """The model to evaluate and save, read from the node that holds it."""
        return node.x

    def _check_codec(self, codec: Codec) -> None:
        """Raise ValueError for a codec that would never be used, or does not suit what is sent."""
        name = type(self).__name__
        if self.sends in _USELESS and not codec.exact:
            raise ValueError(_USELESS[self.sends].format(name=name, codec=codec))
        if codec.for_gradients and self.sends not in (Sends.GRADIENTS, Sends.MEAN_GRADIENTS):
            raise ValueError(
                f"{codec} is made for gradients, and {name} sends {self.sends.value}; "
                "take 'top_k' or 'one_bit'"
            )
        if codec.needs_products and self.sends is not Sends.MEAN_GRADIENTS:
            raise ValueError(
                f"{codec} is for gradients that workers average among themselves at every step, and "
                f"{name} does something else; take strategy 'sync', or codec 'low_rank'"
            )
        if codec.needs_all and (self.servers or self.survives):
            raise ValueError(
                f"{codec} needs an average over all workers, and {name} forms none; take "
                "strategy 'sync', or a codec that needs none, as 'ternary' without shared=true"
            )


_USELESS = {
    Sends.WHOLE_GRADIENTS: "{name} compares losses and gradients along a line, so gradients travel as they "
    "are and {codec} would do nothing; take 'downpour'",
    Sends.MODELS: "{name} sends models as they are, so {codec} would do nothing; take 'choco'",
    Sends.MEMORY: "{name} adds to memory as it is, so {codec} would do nothing",
    Sends.COMPRESSED: "{name} compresses its messages itself, so {codec} would do nothing",
    Sends.NOTHING: "{name} sends nothing, so {codec} would do nothing",
}


class Blockwise(Strategy):
    """Local steps in blocks: `period` of them, or with `blocks` one pass over a split of the data."""

    sends = Sends.DIFFERENCES
    ends_equal = True

    period: int
    warmup: int | None
    blocks: int | None

    def check_blocks(self) -> None:
        """Raise ValueError for lengths that cannot be; call it from __post_init__."""
        at_least(1, period=self.period, blocks=self.blocks)
        if self.blocks is not None and self.period != type(self).period:
            raise ValueError(
                f"blocks={self.blocks} and period={self.period}: with blocks, the local steps between two "
                "averages are one pass over a split; leave period out"
            )

    @property
    def deal(self) -> Deal:
        """As its option says."""
        return Deal(blocks=self.blocks)

    def block_steps(self, w: Node) -> int:
        """Local steps in a block."""
        steps = self.period if self.blocks is None else w.split_steps
        if steps is None:
            raise ValueError(f"blocks={self.blocks}: the data is not cut into splits here")
        if self.blocks is not None and (self.warmup or 0) % steps:
            raise ValueError(f"warmup={self.warmup} ends within a split, which has {steps} steps")
        return steps


@dataclass(frozen=True)
class Central(Strategy):
    """Workers pull the model, take one gradient and push it; the server decides what becomes of it."""

    @property
    def servers(self) -> int:
        """One, which may be several nodes that own a slice each."""
        return 1

    @property
    def steps_at_server(self) -> bool:
        """It does, with `Node.descend`."""
        return True

    @property
    def may_drop(self) -> bool:
        """Whether the server may leave pushes out that come too late."""
        return False

    def steps_per_update(self, workers: int) -> float:
        """1: every push is a step. A server that averages pushes says so."""
        return 1

    def optimizer_steps(self, workers: int) -> float:
        """One for each update by the server."""
        return workers / self.steps_per_update(workers)

    async def worker(self, w: Node) -> None:
        """Pull, compute, push; each waits for the one before."""
        async for _ in w.steps():
            await w.pull(SERVER, out=w.x)
            g = await w.grad()
            await w.push(SERVER, g, counts=w.unmerged > 0, may_drop=self.may_drop)

    async def finish(self, w: Node) -> None:
        """Take the trained model."""
        await w.take_result()


@dataclass(frozen=True)
class Decentral(Strategy):
    """Workers talk to each other, without a server, and go on without one that died."""

    sends: ClassVar[Sends] = Sends.MODELS
    survives: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = False  # whether workers wait for each other's messages, round by round

    async def _work(self, node: Node) -> None:
        returns = node.engine.returns
        returns.share = partial(self.share, node)
        if node.incarnation and node.size > 1:
            await returns.come_back(self.in_rounds, partial(self.take_share, node))
        await super()._work(node)

    def share(self, w: Node) -> dict[str, Tensor]:
        """What one that died and is back goes on from: a copy of this worker's solution."""
        return {"x": self.solution(w)}

    def take_share(self, w: Node, share: Mapping[str, Tensor]) -> None:
        """Go on from what another shared."""
        w.x.copy_(share["x"])
        self.solution(w).copy_(w.x)

    async def finish(self, w: Node) -> None:
        """Wait until all are done, answering them; then take the mean of all models."""
        await w.part()
        await self.meet(w)

    async def meet(self, w: Node) -> None:
        """Replace the solution, and the model, by the mean over all workers of the solution."""
        solution = self.solution(w)
        solution.copy_(await w.average(solution))
        w.x.copy_(solution)
