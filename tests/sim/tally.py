"""Tally: a model that counts how often each sample is in it, exactly, whoever comes and goes."""

import torch

from marks import Tally
from shoal.core.replica import Gradient
from shoal.engine.engine import Instrument
from shoal.replicas.batches import Batches
from shoal.sim import Compute, Faults, Simulation


class TallyReplica:
    """Its gradient counts the samples of the batch, downwards: the model goes up by one for each."""

    lr = 1.0
    changed = None

    def __init__(self, rank, workers, samples, batch, seed, fixed=False):
        self.x = torch.zeros(samples, dtype=torch.float64)
        ids = torch.arange(samples)
        self.batches = Batches(ids, ids, batch=batch, rank=rank, workers=workers, seed=seed, fixed=fixed)

    async def gradient(self):
        ids, _ = self.batches.next()
        return Gradient(-torch.bincount(ids, minlength=len(self.x)).double(), len(ids), None)

    def descend(self, g):
        self.x -= g

    def seek(self, owner, place):
        self.batches.seek(owner, place)

    def reset_momentum(self):
        pass

    def state_dict(self):
        return {"position": self.batches.position}

    def load_state_dict(self, state):
        self.batches.position = state["position"]

    def redeal(self, *change):
        self.batches.redeal(*change)

    def end_of(self, passes):
        return self.batches.end_of(passes)

    def deal(self):
        return self.batches.deal()

    def take_deal(self, deal):
        self.batches.take_deal(deal)


class Watched(Simulation):
    """Sees whether the model was lost, as all who had it died or left, and writes down what is wrong.

    A worker's count of completed rounds went back, or one was given up that nothing had happened to.
    """

    all_members_died = False  # or left: nobody had the model at a time
    had_a_model = False  # a worker, when the keeper ended a run that was not over, or after that
    _has_given_up = False

    def __init__(self, *args, **options):
        self._completed = {}
        self._harmed, self._admitted = {}, {}  # rank -> when something last happened to it, and it was let in
        self.wrong = []
        super().__init__(*args, observers=[Rounds(self)], **options)
        self._switch.links.on_break = self._harm

    def _harm(self, *ranks):
        self._harmed.update(dict.fromkeys(ranks, self.seconds))

    def _bury(self, rank):
        super()._bury(rank)
        self._harm(rank)
        if self.keeper is not None:
            self._count_members(self.keeper.roster)

    def _keeper(self, incarnation):
        keeper = super()._keeper(incarnation)
        roster = keeper.roster
        begin, suspect, admit = roster.begin_epoch, roster.suspect, roster.admit
        let_go, live = keeper._let_go, keeper.live

        def begin_epoch():
            begin()
            self._count_members(roster)

        def admitted(rank, incarnation):
            before = dict(roster.joiners)
            may = admit(rank, incarnation)
            if before != roster.joiners:
                self._admitted[rank] = self.seconds
            return may

        def suspected(rank, other, epoch):
            before = {**roster.members, **roster.joiners}
            suspect(rank, other, epoch)
            if other in before and other not in {**roster.members, **roster.joiners} and rank != other:
                self._look_for_a_cause(rank, other, before[other])

        async def gone(m):
            await let_go(m)
            self._count_members(roster)

        async def lived():
            await live()
            self._has_given_up = not roster.is_over
            self.had_a_model |= self._has_given_up and self._somebody_has_state(roster)

        keeper._let_go, keeper.live = gone, lived
        roster.begin_epoch, roster.suspect, roster.admit = begin_epoch, suspected, admitted
        return keeper

    def _look_for_a_cause(self, rank, other, incarnation):
        if self._is_dead(other, incarnation) or self._switch.links.is_broken(rank, other):
            return
        if self._harmed.get(other, -1.0) < self._admitted.get(other, 0.0):
            self.wrong.append(f"worker {other} was given up at {self.seconds:g} s, though nothing happened")

    @property
    def has_lost_the_model(self):
        return self.all_members_died and not self.had_a_model

    def _spawn(self, node):
        if node.membership is not None:
            enter = node.membership.enter

            def enters(*state):
                enter(*state)
                self.had_a_model |= self._has_given_up

            node.membership.enter = enters
        super()._spawn(node)

    def _count_members(self, roster):
        self.all_members_died |= not self._somebody_has_state(roster)

    def _somebody_has_state(self, roster):
        members, joiners, let_in = roster.lists
        let_in = {**dict.fromkeys(roster.members, 0), **dict(let_in)}
        return any(self._has_state(*who, let_in[who[0]]) for who in (*members, *joiners))

    def _has_state(self, rank, incarnation, let_in):
        here = self.nodes[rank].membership
        has_state = not here.is_joining and here._state_of >= let_in
        return has_state and not self._is_dead(rank, incarnation)

    def _is_dead(self, rank, incarnation):
        return self._ends[rank].is_gone or self.nodes[rank].incarnation > incarnation

    def note(self, engine):
        process, completed = (engine.rank, engine.incarnation), engine.membership.completed
        if completed < self._completed.get(process, 0):
            self.wrong.append(
                f"worker {engine.rank} went from {self._completed[process]} to {completed} rounds"
            )
        self._completed[process] = completed


class Rounds(Instrument):
    def __init__(self, run):
        self._run = run

    def step(self, engine):
        if engine.membership is not None:
            self._run.note(engine)


class Stuck(Exception):
    """A run was not over long after the last fault."""


def tally(
    faults=None,
    *,
    workers=4,
    begins_with=None,
    samples=50,
    batch=3,
    epochs=2,
    period=1,
    seed=0,
    strategy=None,
    before=None,
    elastic=True,
    **options,
):
    """Run it, and return the simulation. Raises Stuck if it is not over after LONG virtual seconds.

    `before` is called with the nodes before they begin.
    """
    fixed, dealt = strategy is not None and strategy.deal.fixed, begins_with or workers
    first = TallyReplica(0, dealt, samples, batch, seed, fixed)
    run = Watched(
        strategy or Tally(period),
        lambda rank: TallyReplica(rank, dealt, samples, batch, seed, fixed),
        workers=workers,
        begins_with=begins_with,
        steps=first.batches.end_of(epochs),
        passes=epochs,
        compute=options.pop("compute", None) or Compute(mean=1.0, jitter=0.1),
        faults=faults or Faults(),
        seed=seed,
        elastic=elastic,
        **options,
    )

    def give_up():
        raise Stuck(f"not over after {LONG:g} s")

    run.kernel.at(LONG, give_up)
    if before is not None:
        before(run.nodes)
    return run.run()


LONG = 1000.0


def at_the_end(run):
    """The workers that got to the end."""
    nodes = [run.nodes[rank] for rank in run.finished if rank < run.workers]
    return [node for node in nodes if not node.membership.is_joining]
