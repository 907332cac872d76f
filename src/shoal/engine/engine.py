"""Engine: the parts of one node, put together. Each part gets what it needs and owns its state alone.

channel      sends, receives, meters             coding     the codec, and the state of its streams
mailbox      arrivals, requests, who is gone     client     a worker's half of push and pull
progress     steps and samples so far            service    a server's half of push and pull
variables    tensors that the algorithm keeps    averages   means over all workers
gradients    computes, answering meanwhile       rounds     what peers give each other
one_sided    memory that peers read and change   work       which batch comes next
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

from torch import Generator, Tensor

from shoal.core.codec import Codec
from shoal.core.identity import NodeIdentity
from shoal.core.meter import Meter
from shoal.core.replica import NOISE, HoldsMore, LastDeal, Redeals, Replica
from shoal.core.seeds import stream
from shoal.core.transport import Message, Transport
from shoal.core.vector import Layout
from shoal.engine.averages import Averages
from shoal.engine.balance import Balance
from shoal.engine.channel import Channel
from shoal.engine.client import Client
from shoal.engine.coding import Coding
from shoal.engine.edges import Edges
from shoal.engine.goodbye import Goodbye
from shoal.engine.gradients import Gradients
from shoal.engine.group import Group, Mean
from shoal.engine.log import Keeping, Log
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Membership
from shoal.engine.one_sided import OneSided
from shoal.engine.pool import Pool
from shoal.engine.progress import Progress
from shoal.engine.returns import Returns
from shoal.engine.rounds import Rounds
from shoal.engine.service import Service
from shoal.engine.underway import Background
from shoal.engine.variables import Variables
from shoal.engine.work import Work

Hook: TypeAlias = "Callable[[Engine], Awaitable[None]]"
"""Awaited between two steps of a worker, and at a server when all workers saved a checkpoint."""


class Engine:
    """All parts of one node. `Node` gives an algorithm its verbs; launchers and observers look at the parts.

    A server's replica holds its slice of the vector, which begins at `begins` of the whole `layout`.
    `duration` tells how many seconds of virtual time a gradient of so many samples takes. The `steps` of a
    worker are `passes` over its share of the data, by default one each.
    """

    def __init__(
        self,
        transport: Transport,
        replica: Replica,
        identity: NodeIdentity,
        *,
        mean: Mean,
        codec: Codec,
        seed: int = 0,
        steps: int | None = None,
        passes: int | None = None,
        timeout: float | None = None,
        retry: float | None = None,
        recovery: float = 0.0,
        log: Log | None = None,
        layout: Layout | None = None,
        begins: int = 0,
        duration: Callable[[Engine, int], float] | None = None,
        background: Background | None = None,
        between_steps: Hook | None = None,
        balanced: bool = False,
        observers: Sequence[Instrument] = (),
    ) -> None:
        self.identity = me = identity
        self.replica = replica
        self.layout = layout
        self.passes = steps if passes is None else passes
        self._seed = seed
        self.channel = channel = Channel(transport, me, timeout)
        self.progress = progress = Progress(me.workers)
        self.variables = Variables()
        self.mailbox = mailbox = Mailbox(channel, me, progress, retry=retry, recovery=recovery)
        place = {"rank": me.rank, "workers": len(me.first_workers), "begins": begins}
        self.coding = coding = Coding(codec, channel, like=replica.x, layout=layout, seed=seed, **place)
        self.one_sided = OneSided(replica, me, channel)
        self.client = Client(me, channel, mailbox, coding, progress, replica, self.one_sided)
        self.gradients = Gradients(replica, me, channel, mailbox, progress, background)
        self.rounds = Rounds(me, channel, mailbox, progress, replica, lambda: self.rng)
        self.group = Group(me, channel, mailbox, coding, self.variables, replica)
        self.averages = Averages(
            mean, self.group, mailbox, progress, self.gradients, replica, ends_known=steps is not None
        )
        self.work = Work(me, channel, progress, replica, self.client, self.rounds, self.averages, steps)
        self.returns = Returns(me, channel, progress, self.rounds, self.work)
        if balanced and not me.is_server and me.workers > 1:
            self.work.balance = Balance(
                me, channel, mailbox, progress, self.variables, replica, self.work.is_last
            )
        self.membership = self._join_roster() if me.elastic and not me.is_server else None
        keeping = Keeping(self.state, self.load, self._bound(between_steps), log)
        pool = Pool(me.workers, steps or 0) if me.rank == me.workers else None
        parts = me, channel, mailbox, coding, progress, replica, self.one_sided
        self.service = Service(*parts, keeping, pool)
        self.work.between_steps = self._bound(between_steps)
        self.last_round: Callable[[], Awaitable[None]] | None = None  # before workers that come and go part
        self.gradients.duration = None if duration is None else partial(duration, self)
        self._show_to(observers)

    @cached_property
    def rng(self) -> Generator:
        """What the algorithm draws from; made when it is first needed, as most algorithms draw nothing."""
        return stream(self._seed, "algorithm", self.identity.rank)

    # -- at a glance ---------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The node's number; workers come first, then servers."""
        return self.identity.rank

    @property
    def name(self) -> str:
        """How messages to people call the node."""
        return self.identity.name

    @property
    def incarnation(self) -> int:
        """How often the node was restarted after a crash."""
        return self.identity.incarnation

    @property
    def is_server(self) -> bool:
        """Whether the node serves."""
        return self.identity.is_server

    @property
    def x(self) -> Tensor:
        """The parameters that it holds."""
        return self.replica.x

    @property
    def t(self) -> int:
        """Steps done."""
        return self.progress.t

    @property
    def version(self) -> int:
        """At a server: versions of the model since the start."""
        return self.progress.version

    @property
    def merged(self) -> float:
        """Samples in the model that it holds, of all workers."""
        return self.progress.merged

    @property
    def samples(self) -> int:
        """Samples that this worker has computed gradients of."""
        return self.progress.samples

    @property
    def meter(self) -> Meter:
        """The node's running totals."""
        return self.channel.meter

    @property
    def transport(self) -> Transport:
        """The node's end of the network."""
        return self.channel.transport

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The node's whole state between two steps, part by part."""
        return {
            "x": self.replica.x,
            "replica": self.replica.state_dict(),
            "rng": self.rng.get_state(),
            "crew": self._crew(),
            "counts": self._counts(),
            "kinds": self.variables.kinds(),
            **{name: getattr(self, name).state() for name in _SAVED},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.replica.x.copy_(state["x"])
        self.replica.load_state_dict(state["replica"])
        self.rng.set_state(state["rng"])
        for name in _SAVED:
            getattr(self, name).load(state[name])
        if (deal := state["crew"]["deal"]) is not None and isinstance(self.replica, Redeals):
            self.replica.take_deal(deal)
            if deal["begin"][0]:  # to other workers than the first, so it may be of another length
                self._find_end()
        self.averages.to_resume = state["crew"]["open"]
        if self.work.edges is not None:
            began, *handed = state["crew"].get("blocks") or [self.progress.block_began]
            self.work.edges.go_on(began, handed)
        self.meter.steps = self.progress.t

    # -- other nodes than before ---------------------------------------------------------------

    def hand_over(self) -> dict[str, Any]:
        """What the run goes on from when more workers join in: see `take_over`."""
        return {
            "workers": self.identity.workers,
            "x": self.replica.x,
            "replica": self.replica.state_dict(),
            "rng": self.rng.get_state(),
            "variables": self.variables.shared(),
            "progress": self.progress.state(),
            "client": self.client.state(),
        }

    def take_over(
        self, left: dict[str, Any], step: int, *, own: bool, clocks: Sequence[int] | None = None
    ) -> None:
        """Begin before `step` with what this node handed over, or what another worker did if this one is new.

        Other variables start afresh, and so do the codec's states. A new worker has random streams and a
        count of samples of its own. `clocks` says how many batches of each worker are in a server's model.
        """
        me, replica, before = self.identity, left["replica"], left["progress"]
        self.replica.x.copy_(left["x"])
        self.replica.load_state_dict(replica if own else {k: v for k, v in replica.items() if k != NOISE})
        self.variables.load(left["variables"])
        self.progress.begin_at(step, before, before["unmerged"] if own else 0.0)
        self.progress.credit(before["samples"] if own else 0)
        shift = me.workers - left["workers"]  # servers come after the workers, who are more now
        self.client.load({str(int(rank) + shift): version for rank, version in left["client"].items()})
        self.service.begin_at(clocks or [step] * me.workers, before["merged"])
        if own:
            self.rng.set_state(left["rng"])
        if not me.is_server and self.passes is not None:  # the loop of a user finds its place itself
            self.replica.seek(me.rank, step)
        self.meter.steps = self.progress.t

    def deal_anew(self, deal: dict[str, Any] | None, last: LastDeal) -> None:
        """From the present step on, deal what others have left of the data, as `Redeals.redeal` does."""
        me, replica = self.identity, self.replica
        assert isinstance(replica, Redeals)
        replica.take_deal(deal)
        replica.redeal(me.rank, len(me.first_workers), self.progress.t, last)
        self._find_end()
        if self.work.edges is not None:
            self.work.edges.block_began = self.progress.block_began

    def go_by(self, deal: dict[str, Any]) -> None:
        """This worker is started again in a run that was resumed, in which data is dealt like this."""
        assert isinstance(self.replica, Redeals)
        self.replica.take_deal(deal)
        if self.passes is not None:
            self.work.share = self.replica.end_of(self.passes)

    def _counts(self) -> dict[str, float | None]:
        """Samples in the model: those that this worker, or to this server all have handed over.

        Where workers come and go, also those of all, which no worker can add up.
        """
        done = self.progress
        given = self.service.samples if self.is_server else done.samples - done.unmerged
        return {"given": given, "merged": None if self.membership is None else done.merged}

    def _crew(self) -> dict[str, Any]:
        """Who takes part, and how the data is dealt; among peers also how far each is in its share."""
        rounds = 0 if self.membership is None else self.membership.completed
        blocks = [] if self.work.edges is None else self.work.edges.blocks
        averages = {"rounds": rounds, "open": self.averages.open, "blocks": blocks}
        crew = {"members": list(self.members), "deal": self.deal(), **averages}
        if self.returns.share is None:
            return crew
        places = [self.progress.place_of(rank) for rank in range(self.identity.workers)]
        places[self.rank] = self.progress.t - self.rounds.shift
        return {**crew, "places": places}

    def _find_end(self) -> None:
        if self.passes is not None and isinstance(self.replica, Redeals):
            self.work.last_step = self.replica.end_of(self.passes)

    def deal(self) -> dict[str, Any] | None:
        """How the data is dealt, as plain values; None where that cannot change."""
        return self.replica.deal() if isinstance(self.replica, Redeals) else None

    # -- workers that come and go --------------------------------------------------------------

    @property
    def members(self) -> Sequence[int]:
        """The workers that take part: that batches are dealt to, or that a server saves a checkpoint with."""
        if self.membership is not None:
            return self.membership.dealt
        if self.is_server:
            return sorted(self.service.savers.members)
        if self.identity.servers:
            return range(self.identity.workers)
        return sorted({self.rank, *self.rounds.others})

    def excuse(self, finished: Sequence[int]) -> None:
        """Those workers had come to the end before this node was started again."""
        self.service.excuse(finished)
        if finished and self.work.edges is not None:
            self.work.edges.close()

    async def say_goodbye(self) -> bool:
        """Leave a run that goes on; whether the others know. If not, they must see this node vanish."""
        assert self.membership is not None, "nobody leaves a run whose workers do not come and go"
        return await Goodbye(self.identity, self.channel, self.mailbox, self.membership).say()

    def _join_roster(self) -> Membership:
        """Have averages and edges of rounds follow those who come and go."""
        me, channel, mailbox, averages = self.identity, self.channel, self.mailbox, self.averages
        averages.membership = members = Membership(me, channel, mailbox, self.group)
        books = self.progress, averages, self.replica, self.passes
        self.work.edges = Edges(me, channel, mailbox, members, *books, self._give, self._take)
        return members

    def _give(self) -> dict[str, Any]:
        """What a worker that joins goes on from, taken at the edge of a round."""
        return {
            "x": self.replica.x,
            "replica": {k: v for k, v in self.replica.state_dict().items() if k != NOISE},
            "variables": self.variables.shared(),
            "progress": self.progress.state(),
            "started": self.averages.started,
            "deal": self.deal(),
            "untrained": list(self.replica.untrained) if isinstance(self.replica, HoldsMore) else [],
        }

    def _take(self, left: dict[str, Any]) -> None:
        """Go on from what another worker gave."""
        self.replica.x.copy_(left["x"])
        self.replica.load_state_dict(left["replica"])
        self.variables.load(left["variables"])
        self.progress.begin_at(left["progress"]["step"], left["progress"])
        if isinstance(self.replica, Redeals):
            self.replica.take_deal(left["deal"])
        if isinstance(self.replica, HoldsMore):
            for mine, theirs in zip(self.replica.untrained, left["untrained"], strict=True):
                mine.copy_(theirs)
        self.averages.started, self.averages.open = left["started"], 0
        self.averages.to_resume = 0
        self.averages.under_way.clear()
        self.meter.steps = self.progress.t

    # -- inside --------------------------------------------------------------------------------

    def _bound(self, hook: Hook | None) -> Callable[[], Awaitable[None]] | None:
        return None if hook is None else partial(self.channel.await_apart, hook, self)

    def _show_to(self, observers: Sequence[Instrument]) -> None:
        """Have each observer called for what it listens to, and for nothing else: most listen to little."""

        def listeners(event: str) -> list[Any]:
            ignores = getattr(Instrument, event)
            return [
                partial(self.channel.call_apart, getattr(observer, event), self)
                for observer in observers
                if getattr(type(observer), event) is not ignores
            ]

        self.on_update: list[Any] = []
        if not observers:  # as for each of a thousand simulated workers
            return
        self.work.on_step = listeners("step")
        self.on_update = listeners("update")
        self.channel.on_send = listeners("send")
        self.channel.on_receive = listeners("receive")
        self.channel.on_fault = listeners("fault")


_SAVED = ("variables", "coding", "progress", "client", "mailbox", "service")


class Instrument:
    """An observer that ignores everything; subclass it and override what you want to be told."""

    def step(self, engine: Engine) -> None:
        """A worker finished a step, and what it merged after it."""

    def update(self, engine: Engine) -> None:
        """A server applied an update."""

    def send(self, engine: Engine, dst: int, m: Message) -> None:
        """A message was handed to the transport."""

    def receive(self, engine: Engine, m: Message) -> None:
        """A message was taken from the transport."""

    def fault(self, engine: Engine, what: str) -> None:
        """Something went wrong that the node survived."""
