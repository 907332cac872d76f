"""Simulation: a strategy on many nodes in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import combinations
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shoal.collectives import stripes
from shoal.core.codec import Codec, Identity
from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters, Replica
from shoal.core.vector import Layout
from shoal.engine.channel import Channel
from shoal.engine.engine import Engine, Hook, Instrument
from shoal.engine.group import Mean
from shoal.engine.keeper import Keeper
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership_errors import RunIsOver
from shoal.engine.progress import Progress
from shoal.sim.disk import Disk
from shoal.sim.faults import Crash, Departure, Faults, Weather
from shoal.sim.hardware import Machine
from shoal.sim.kernel import Kernel, Resumable, rare_collections
from shoal.sim.models import Compute, Network, Pace
from shoal.sim.sharing import SharingTransport
from shoal.sim.transport import SimTransport, Switch
from shoal.sim.vector_work import CountedSteps
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Setting, Strategy


def _kind_on(machine: Machine | None) -> type[SimTransport]:
    return SharingTransport if machine is not None and machine.maps_memory else SimTransport


class Simulation:
    """The nodes of a run in virtual time.

    `replica(rank)` makes the replica of a worker, whose `steps` are `passes` over its share of the data, by
    default one each. Each server consists of `shards` nodes and starts with the parameters `centre`, by
    default those of worker 0; `served(identity)` makes the replica of such a node, by default one with plain
    SGD. `disk(rank)` makes the log of a server. An elastic run may begin with fewer workers than it has
    places: `begins_with` of them; `Faults().join(…)` has others come. With fewer than `min_workers` those who
    are left wait for more. If its keeper `relays`, workers lose each other when it dies, as over gRPC. With
    `batch`, a gradient of `batch` samples takes the time that `compute` says, and others take more or less;
    without it all take the same. `machine` says what takes time beside gradients and wires: without it,
    nothing does. The same arguments give the same run, bit for bit: see `digest`.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Callable[[int], Replica],
        *,
        workers: int,
        steps: int,
        passes: int | None = None,
        shards: int = 1,
        centre: Tensor | None = None,
        served: Callable[[NodeIdentity], Parameters] | None = None,
        network: Network | None = None,
        compute: Compute | None = None,
        batch: int | None = None,
        faults: Faults | None = None,
        weather: Weather | None = None,
        machine: Machine | None = None,
        disk: Callable[[int], Disk] | None = None,
        retry: float | None = None,
        layout: Layout | None = None,
        codec: Codec | None = None,
        mean: Mean = stripes,
        seed: int = 0,
        between_steps: Hook | None = None,
        balanced: bool = False,
        elastic: bool = False,
        begins_with: int | None = None,
        min_workers: int = 1,
        relays: bool = False,
        observers: Sequence[Instrument] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: a run needs at least 1 worker")
        strategy.check(Setting(workers, codec or Identity(), shards=shards))
        nodes = workers + strategy.servers * shards
        self.strategy = strategy
        self.workers = workers
        self.kernel = Kernel()
        self._replica = replica
        self._served = served or self._plainly_served
        self._steps, self._batch = steps, batch
        self._shards, self._elastic, self._begins_with = shards, elastic, begins_with
        self._min_workers, self._relays = min_workers, relays
        self._compute = compute or Compute()
        self._faults = faults or Faults()
        self._check_faults(nodes, disk is not None)
        self._compute.check(workers)
        self._switch = Switch(self.kernel, network or Network(), seed, weather, machine, _kind_on(machine))
        self._disks = {rank: disk(rank) for rank in range(workers, nodes)} if disk else {}
        self._common: dict[str, Any] = {
            "mean": mean,
            "codec": codec or Identity(),
            "layout": layout,
            "seed": seed,
            "steps": steps,
            "passes": passes,
            "retry": retry,
            "recovery": self._faults.recovery,
            "between_steps": self._leaving(between_steps),
            "balanced": balanced,
            "observers": observers,
        }
        first = replica(0)
        self._centre = (first.x if centre is None else centre).detach().clone()
        with rare_collections():
            self._ends = [self._switch.add() for _ in range(nodes)]
            self.nodes = [self._make(rank, 0, first if rank == 0 else None) for rank in range(nodes)]
        self.keeper = self._first_keeper() if elastic else None
        for server in self._ends[workers:]:
            for end in self._ends[:workers]:
                end.acquaint(server)

    def _make(self, rank: int, incarnation: int, own: Replica | None = None) -> Engine:
        """Make a node in its initial state; `own` is its replica if that exists already."""
        end, me = self._ends[rank], self.identity(rank, incarnation)
        if me.is_server:
            begins = me.own_slice(self._centre.numel()).start
            server = self._served(me)
            return Engine(end, server, me, log=self._disks.get(rank), begins=begins, **self._common)
        duration = self._duration(Pace(self._compute, rank, self._common["seed"]))
        worker = self._replica(rank) if own is None else own
        mean = copy(self._common["mean"])  # it may hold memory of its worker
        return Engine(end, worker, me, duration=duration, **{**self._common, "mean": mean})

    def _check_faults(self, nodes: int, servers_write: bool) -> None:
        elastic = self._elastic
        if not elastic and (self._faults.leaves or self._relays or self._min_workers > 1):
            raise ValueError(
                "workers leave an elastic run alone, and it alone has a keeper that waits or relays"
            )
        writers = [*(range(self.workers, nodes) if servers_write else ()), *([nodes] if elastic else ())]
        self._faults.check(self.workers, nodes + elastic, writers, self._open_places())
        if self._faults.partitions and self.strategy.one_sided:
            raise ValueError(f"{type(self.strategy).__name__} shares memory, which a partition cannot cut")

    def _open_places(self) -> range:
        """The ranks of workers that nobody has at the start."""
        begins = self._begins_with
        if begins is not None and not (self._elastic and 1 <= begins <= self.workers):
            raise ValueError(
                f"begins_with={begins}: an elastic run begins with 1 to {self.workers} workers, any other "
                "with all"
            )
        return range(self.workers if begins is None else begins, self.workers)

    def _first_keeper(self) -> Keeper:
        """Add the keeper, and have it and each worker hear when another comes back, as on a real mesh."""
        self._disks[len(self._ends)] = Disk()
        keeper = self._switch.add()
        for end, other in combinations([*self._ends[: self.workers], keeper], 2):
            end.acquaint(other)
        self._ends.append(keeper)
        if self._relays:
            self._switch.links.pass_through(keeper.rank)
        return self._keeper(0)

    def _keeper(self, incarnation: int) -> Keeper:
        """Make the keeper of a run whose workers come and go; it is the last node."""
        me = self.identity(len(self._ends) - 1, incarnation)
        channel = Channel(self._ends[me.rank], me)
        mailbox = Mailbox(channel, me, Progress(me.workers), recovery=self._faults.recovery)
        return Keeper(me, channel, mailbox, self._disks[me.rank], self._min_workers, self._relays)

    def _plainly_served(self, me: NodeIdentity) -> Parameters:
        return Parameters.of_server(me, self._centre)

    def identity(self, rank: int, incarnation: int = 0) -> NodeIdentity:
        """The identity of the node of that rank."""
        place = self.workers, self.strategy.servers, self._shards, incarnation
        return NodeIdentity(rank, *place, elastic=self._elastic, begins_with=self._begins_with)

    def run(self) -> Simulation:
        """Advance virtual time until every node is done, and return the simulation itself."""
        try:
            with rare_collections():
                self._begin()
                self.kernel.run()
        finally:
            self.kernel.close()
        return self

    def _begin(self) -> None:
        """Spawn the nodes that are there from the start, and plan the faults."""
        for node in self.nodes:
            if node.is_server or node.rank in node.identity.first_workers:
                self._spawn(node)
            else:
                self._ends[node.rank].stay_away()
        if self.keeper is not None:
            self._spawn_keeper(self.keeper)
        self._plan_faults()

    def _plan_faults(self) -> None:
        faults, at = self._faults, self.kernel.at
        for rank, moment in faults.kills:
            at(moment, partial(self._kill, rank))
        for rank, moment in faults.joins:
            at(moment, partial(self._restart, rank))
        for partition in faults.partitions:
            self._switch.links.plan(partition, faults.patience)
        for rank, moment, by in faults.clock_jumps:
            at(moment, partial(self._ends[rank].move_clock, by))
        for rank in {rank for rank, _, _ in faults.slow_disks}:
            self._disks[rank].write = partial(self._write, rank)

    def _write(self, rank: int) -> tuple[bool, bool]:
        """Have a node wait for its disk where that is slow; whether the disk was busy, and is now."""
        end = self._ends[rank]
        was_busy = end.is_writing
        end.write_until(self._faults.write_ends(rank, self.kernel.now))
        return was_busy, end.is_writing

    def worker(self, rank: int) -> Engine:
        """The worker of that rank."""
        return self.nodes[rank]

    @property
    def server(self) -> Engine:
        """The (first) server."""
        return self.nodes[self.workers]

    @property
    def solution(self) -> Tensor:
        """The parameters of the (first) server, its shards concatenated."""
        return torch.cat([node.x for node in self.nodes[self.workers : self.workers + self._shards]])

    @property
    def finished(self) -> list[int]:
        """The ranks of the nodes that have ended normally, neither killed nor crashed."""
        return [end.rank for end in self._ends if end.has_left]

    @property
    def seconds(self) -> float:
        """Virtual seconds since the start."""
        return self.kernel.now

    def digest(self) -> str:
        """A fingerprint of every message and of the final parameters of every node."""
        total = hashlib.blake2b(self._switch.digest().encode(), digest_size=16)
        for node in self.nodes:
            total.update(node.x.detach().cpu().numpy().tobytes())
        return total.hexdigest()

    def _duration(self, pace: Pace) -> Callable[[Engine, int], float]:
        has_faults = bool(self._faults.crashes or self._faults.pauses)

        def duration(engine: Engine, samples: int) -> float:
            planned, restarted = 0.0, engine.identity.incarnation
            if has_faults and not restarted:  # each happens once
                planned = self._faults.delay(engine.rank, engine.t)
            if pace.is_new:
                pace.begin_at(0 if restarted else engine.progress.clock)
            batches = 1.0 if self._batch is None else self._compute.of(samples, self._batch)
            return pace.next() * batches + planned

        return duration

    def _spawn(self, node: Engine) -> None:
        end = self._ends[node.rank]
        life: Resumable = self._life(node, end)
        if end.vector_work is not None:
            life = CountedSteps(life, end.vector_work)
        end.process = self.kernel.spawn(life, self._describe(node))

    async def _life(self, node: Engine, end: SimTransport) -> None:
        try:
            with suppress(RunIsOver):
                await self.strategy.live(Node(node))
            await end.close()
        except PeerLost:
            if not (
                node.identity.incarnation and any(server.has_left for server in self._ends[self.workers :])
            ):
                raise
            await end.close()  # it restarted after a server had finished
        except Crash:
            self._bury(node.rank)
        except Departure:
            if not await node.say_goodbye():
                end.vanish(self._faults.noticed_after)
            await end.close()

    def _leaving(self, hook: Hook | None) -> Hook | None:
        """The hook between two steps, which has workers leave when they are to."""
        leaves = self._faults.leaves
        if not leaves:
            return hook

        async def between_steps(engine: Engine) -> None:
            if any(rank == engine.rank and self.kernel.now >= moment for rank, moment in leaves):
                raise Departure
            if hook is not None:
                await hook(engine)

        return between_steps

    def _spawn_keeper(self, keeper: Keeper) -> None:
        end = self._ends[keeper.identity.rank]

        async def life() -> None:
            await keeper.live()
            await end.close()

        def describe() -> str:
            return f"the keeper waits at epoch {keeper.roster.epoch}"

        end.process = self.kernel.spawn(life(), describe)

    def _kill(self, rank: int) -> None:
        """End a node wherever it is, unless it has ended."""
        process = self._ends[rank].process
        if process is not None and not process.ended:
            process.end()
            self._bury(rank)

    def _bury(self, rank: int) -> None:
        """Handle the crash of a node: its peers notice it, and it may restart."""
        self._ends[rank].vanish(self._faults.noticed_after)
        self._switch.links.lose(rank, self._faults.noticed_after)
        if rank in self._disks:
            if self._ends[rank].is_writing:
                self._disks[rank].undo_snapshot()
            self._disks[rank].drop_unsynced()
        if isfinite(self._faults.restart_after):
            self.kernel.expect(self._faults.restart_after, lambda: self._restart(rank))

    def _restart(self, rank: int) -> None:
        if rank == len(self.nodes):
            assert self.keeper is not None, "somebody has died in its place"
            incarnation = self.keeper.identity.incarnation + 1
            self._ends[rank].revive(incarnation)
            self._switch.links.regain(rank)
            self.keeper = self._keeper(incarnation)
            self._spawn_keeper(self.keeper)
        else:
            before, incarnation = self.nodes[rank], self.nodes[rank].incarnation + 1
            self._ends[rank].revive(incarnation)
            self.nodes[rank] = self._make(rank, incarnation)
            if not self._elastic and not before.identity.is_server and (deal := before.deal()) is not None:
                self.nodes[rank].go_by(deal)
            self._spawn(self.nodes[rank])

    def _describe(self, node: Engine) -> Callable[[], str]:
        def text() -> str:
            me, mailbox = node.identity, node.mailbox
            absent = "".join(f" ({me.name_of(r)} {how})" for r, how in mailbox.gone.items())
            return f"{me.name} waits for {mailbox.waiting or 'its turn'} at step {node.t}{absent}"

        return text
