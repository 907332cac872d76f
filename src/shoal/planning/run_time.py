"""Seconds, bytes and memory of a whole run, by formulas: no event is simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, sqrt
from statistics import NormalDist

from shoal.core.sparse_vectors import SparseCodec
from shoal.planning.contenders import Contender
from shoal.planning.mean_time import RoundCost, mean_round, sparse_round
from shoal.planning.message_time import Wire
from shoal.planning.peer_time import Peers
from shoal.planning.server_time import Served
from shoal.planning.workload import UNCOMPRESSED, CodecCost, Site, Surroundings, Workload
from shoal.sim import Compute
from shoal.topologies import named
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class RunCost:
    """What a run costs by the formulas."""

    seconds: float  # of an epoch
    nbytes: float  # that all nodes send in an epoch
    memory: float  # bytes that the fullest node keeps, beside data and activations
    steps: float  # of each worker in an epoch
    waiting: float  # seconds of an epoch in which a worker does not compute

    @property
    def busy(self) -> float:
        """Seconds of a step in which a worker computes."""
        return (self.seconds - self.waiting) / self.steps if self.steps else 0.0


def expected_largest(of: int) -> float:
    """The mean of the largest of so many standard normal draws (Blom 1958); exact to a few per cent."""
    return NormalDist().inv_cdf((of - 0.375) / (of + 0.25)) if of > 1 else 0.0


def run_cost(
    contender: Contender, workload: Workload, surroundings: Surroundings, epochs: int = 1
) -> RunCost:
    """The cost of an epoch, in a run of so many."""
    return _Formulas(contender, workload, surroundings, epochs).cost


@dataclass(frozen=True)
class _Formulas:
    contender: Contender
    workload: Workload
    surroundings: Surroundings
    epochs: int

    @property
    def cost(self) -> RunCost:
        steps, work = self.steps, self.busy * self.steps
        whole = self.run.times(1 / self.epochs)
        each = steps / self.epochs
        waiting = max(0.0, whole.seconds - work / self.epochs)
        return RunCost(whole.seconds, whole.nbytes, self.memory, each, waiting)

    @cached_property
    def strategy(self) -> Strategy:
        return self.contender.strategy

    @property
    def workers(self) -> int:
        return self.contender.workers

    @cached_property
    def steps(self) -> int:
        """Steps of each worker in the whole run."""
        samples, batch = self.workload.samples, self.workload.batch
        return self.epochs * max(1, -(-(samples - self.workers + 1) // (batch * self.workers)))

    @cached_property
    def codec(self) -> CodecCost:
        machine = self.wire.machine
        known = self.workload.codecs[self.contender.codec]
        return replace(known, encode=machine.encode, decode=machine.decode)

    @cached_property
    def site(self) -> Site:
        nodes = self.workers + self.strategy.servers * self.contender.servers
        return self.surroundings(nodes, self.contender.codec, nodes > self.workers)

    @cached_property
    def wire(self) -> Wire:
        return Wire(self.site.network, self.site.machine, busy=self.workers)

    @property
    def compute(self) -> Compute:
        return self.site.compute

    @cached_property
    def busy(self) -> float:
        """Seconds of a step, on average over the workers that are not slower than others."""
        samples, batch = self.workload.samples, self.workload.batch
        full = samples / (
            self.steps / self.epochs * self.workers * batch
        )  # the last step of an epoch is short
        part = self.compute.fixed + (1 - self.compute.fixed) * full
        return self.compute.mean * part * self.wire.slower

    @property
    def slow(self) -> float:
        """How many times as long the slowest worker takes."""
        there = [factor for rank, factor in self.compute.slow.items() if rank < self.workers]
        return max([1.0, *there])

    @property
    def helped(self) -> float:
        """How many times as long a step takes if faster workers do the batches of slower ones."""
        there = [factor for rank, factor in self.compute.slow.items() if rank < self.workers]
        return self.workers / (self.workers - len(there) + sum(1 / factor for factor in there))

    def block(self, steps: float, of: int) -> float:
        """Seconds until the slowest of so many workers has done its steps."""
        late = self.compute.jitter * expected_largest(of) * sqrt(steps)
        return self.busy * max(steps * self.slow, steps + late)

    # -- the run, by the family of its strategy ------------------------------------------------

    @property
    def run(self) -> RoundCost:
        """All steps of all workers."""
        strategy = self.strategy
        if self.workers == 1:
            return RoundCost(self.steps * self.busy)
        if strategy.servers:
            return self.served
        if strategy.survives:
            return self.among_peers
        return self.averaged

    @property
    def averaged(self) -> RoundCost:
        period = max(1, int(getattr(self.strategy, "period", 1)))
        first = int(getattr(self.strategy, "warmup", 0) or getattr(self.strategy, "switch", 0) or 0)
        first = min(first, self.steps)
        if fragments := int(getattr(self.strategy, "fragments", 0)):
            rest = self.streamed(fragments, period, self.steps - first)
        else:
            blocks = (self.steps - first) / period
            rest = RoundCost(self.block(period, self.workers)).times(blocks)
            once = RoundCost(self.own) + self.mean(self.workload.nbytes)
            rest += once.times(ceil(blocks))  # the last block may be cut short
        at_first = RoundCost(self.block(1, self.workers)) + self.mean(self.workload.nbytes)
        return at_first.times(first) + rest

    def streamed(self, fragments: int, period: int, steps: int) -> RoundCost:
        """Averages of parts of the model, of which `overlap` steps hide as much as they take."""
        gap = period / fragments
        hidden = int(getattr(self.strategy, "overlap", 0)) * self.busy
        part = self.mean(self.workload.nbytes / fragments)
        late = max(0.0, part.seconds - hidden) + self.own / fragments
        one = RoundCost(self.block(gap, self.workers) + late, part.nbytes)
        return one.times(steps / gap)

    def mean(self, nbytes: float) -> RoundCost:
        coder = self.contender.coder
        if isinstance(coder, SparseCodec) and coder.share is not None and coder.feedback != "double":
            return sparse_round(self.workers, nbytes, self.workload.itemsize, coder, self.codec, self.wire)
        return mean_round(self.workers, nbytes, self.codec, self.wire)

    @property
    def served(self) -> RoundCost:
        strategy = self.strategy
        shards = self.contender.servers
        all_of_them = Served(self.workers, shards, self.workload.nbytes, self.codec, self.wire)
        slowest = self.block(1, self.workers) + self.own
        if strategy.one_sided:
            return all_of_them.windowed(self.busy * self.slow + self.own).times(self.steps)
        if groups := int(getattr(strategy, "groups", 0)):
            return all_of_them.through(groups, slowest).times(self.steps)
        if getattr(strategy, "wait", hasattr(strategy, "backup")):
            return all_of_them.gathered(slowest).times(self.steps)
        pushes = max(1, int(getattr(strategy, "period", getattr(strategy, "n_push", 1))))
        pulls = max(1, int(getattr(strategy, "period", getattr(strategy, "n_fetch", 1))))
        hidden = bool(getattr(strategy, "overlap", False))
        steps = self.busy * self.slow + self.own / pushes
        one = all_of_them.turn(steps, 1 / pulls, 1 / pushes, hidden=hidden)
        return one.times(self.steps) + all_of_them.gathered(0.0)  # what is left, and the trained model

    @property
    def among_peers(self) -> RoundCost:
        """Among peers, who take the mean of their models in the end."""
        return self.rounds_of_peers + mean_round(self.workers, self.workload.nbytes, UNCOMPRESSED, self.wire)

    @property
    def rounds_of_peers(self) -> RoundCost:
        strategy, nbytes, period = (
            self.strategy,
            self.workload.nbytes,
            int(getattr(self.strategy, "period", 1)),
        )
        sent = self.codec.ratio * nbytes
        helped = self.busy * (self.helped if getattr(strategy, "help", False) else self.slow)
        graph = getattr(strategy, "topology", None)
        degree = len(named(graph).out_of(0, self.workers, 0)) if graph else 1
        coding = self.wire.slower * nbytes * (self.codec.encode + degree * self.codec.decode) + self.own
        helped += self.own / period
        if self.contender.word == "strom":
            coding = self.wire.slower * nbytes * (self.codec.encode + (self.workers - 1) * self.codec.decode)
            return (
                Peers(self.workers, self.workers - 1, sent, self.wire).told(helped + coding).times(self.steps)
            )
        if self.contender.word == "adpsgd":
            return Peers(self.workers, 1, sent, self.wire).swapped(helped).times(self.steps)
        if not getattr(strategy, "in_rounds", False):
            one = Peers(self.workers, 1, sent, self.wire).asked(period * helped)
            return one.times(self.steps / period)
        overlap = bool(getattr(strategy, "overlap", False))
        slowest = self.block(1, 1 if overlap else degree + 1) + coding  # overlap leaves a step of slack
        return (
            Peers(self.workers, degree, sent, self.wire).in_rounds(slowest, overlap=overlap).times(self.steps)
        )

    @property
    def own(self) -> float:
        """Seconds for what the strategy computes on vectors in an exchange, beside the average itself."""
        return self.wire.touching(self.workload.nbytes, OWN_PASSES[self.contender.word])

    # -- memory --------------------------------------------------------------------------------

    @property
    def memory(self) -> float:
        """Bytes of parameters, gradient, optimizer, error feedback and what the strategy keeps."""
        kept = 2.0 + self.workload.optimizer + self.codec.kept + VECTORS.get(self.contender.word, 1.0)
        if self.contender.word == "choco":
            kept += len(named("ring").out_of(0, self.workers, 0)) if self.workers > 1 else 0
        if self.contender.word == "dcasgd":
            kept += self.workers / self.contender.servers
        return kept * self.workload.nbytes


OWN_PASSES = {
    **{"single": 0, "sync": 0, "local": 11, "post_local": 11, "bmuf": 20, "slowmo": 17, "diloco": 18},
    **{"streaming_diloco": 18, "asgd": 7, "staleness_aware": 7, "ssp": 7, "dcasgd": 12, "downpour": 18},
    **{"softsync": 10, "easgd": 10, "eamsgd": 10, "sync_server": 14, "hierarchical": 24, "hogwild": 12},
    **{"gossip": 6, "gossipgrad": 6, "dpsgd": 12, "sgp": 15, "adpsgd": 13, "choco": 34, "strom": 6},
}
"""How often a strategy reads or writes a vector in an exchange, counted in the simulator."""

VECTORS = {"single": 0.0, "sync": 1.0, "bmuf": 3.0, "slowmo": 3.0, "diloco": 3.0, "streaming_diloco": 4.0}
"""Vectors of the model's length that a strategy keeps beside parameters and gradient; 1 if it is not here.

A message under way is one of them.
"""
