"""A worker that dies and comes back: it pulls and goes on, does what is left, and holds up nobody."""

from dataclasses import dataclass, field

import pytest
import torch
from central import Census, name

from shoal.core.replica import Gradient
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.sim.disk import Disk
from shoal.strategies import (
    ASGD,
    DCASGD,
    EASGD,
    SSP,
    AsyncDiLoCo,
    DecoupledDiLoCo,
    Downpour,
    HALoS,
    Hierarchical,
    Hogwild,
    SoftSync,
    StalenessAware,
    SyncServer,
)
from shoal.testing.problems import Problem, Slope, VectorReplica, simulate

CENTRAL = [
    ASGD(),
    StalenessAware(),
    SoftSync(),
    SoftSync(wait=True),
    SSP(bound=0),
    SSP(bound=2),
    DCASGD(),
    SyncServer(),
    Hierarchical(groups=2),
    Hogwild(),
    Downpour(warmup=0),
    Downpour(overlap=True, warmup=0),
    AsyncDiLoCo(period=2),
    AsyncDiLoCo(period=3, grace=0.5),
    DecoupledDiLoCo(period=2, fragments=1, overlap=1, quorum=3),
    HALoS(period=2, exchange=2),
]


@dataclass(frozen=True)
class Places(Problem):
    """Flat ground; notes down where the gradients of each worker are taken."""

    taken: list = field(default_factory=list)

    def gradient(self, rank, step, x):
        self.taken.append(x.item())
        return torch.zeros_like(x)


class AtMost(Instrument):
    """Ends a run in which more goes wrong than was planned: it might go on for ever."""

    def __init__(self, faults):
        self.left = faults

    def fault(self, node, what):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError(f"at {node.transport.now():g} s {what} again")


class Forces(Instrument):
    """What workers that came back push, in that order."""

    def __init__(self):
        self.of_returned = []

    def send(self, node, dst, m):
        if m.tag == "push" and node.identity.incarnation:
            self.of_returned.append(m.body.item())


class Doer(VectorReplica):
    """Raises the element of the worker who does the batch, whosever batch it is."""

    async def gradient(self):
        g = torch.zeros_like(self.x)
        g[self._rank] = -1.0
        return Gradient(g, 1, 0.0)


class Shown(Instrument):
    """Each model that a worker was shown, with its rank and the updates it had sent by then."""

    def __init__(self):
        self.sent = {}
        self.models = []

    def send(self, node, dst, m):
        if m.tag == "push":
            self.sent[node.rank] = self.sent.get(node.rank, 0) + 1

    def receive(self, node, m):
        if m.tag == "reply" and not node.is_server:
            self.models.append((node.rank, self.sent.get(node.rank, 0), m.body.tolist()))


@pytest.mark.parametrize("moment", [0.0, 1.6, 2.9])
@pytest.mark.parametrize("strategy", CENTRAL, ids=name)
def test_every_batch_is_in_the_model_though_a_worker_comes_and_goes(strategy, moment):
    run = simulate(
        strategy,
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        compute=Compute(mean=1.0, jitter=0.3),
        network=Network(latency=0.0625),
        faults=Faults(noticed_after=0.25, restart_after=0.75).kill(rank=1, moment=moment),
    )
    assert all(share > 0 for share in run.server.x.tolist())
    assert run.worker(1).identity.incarnation == 1
    assert "worker 1 was lost" in run.server.meter.faults


def test_a_crash_that_was_planned_for_a_step_happens_once():
    # it comes back to the very step in which it vanished
    run = simulate(
        ASGD(),
        Slope(),
        workers=1,
        steps=4,
        compute=Compute(mean=1.0),
        faults=Faults(noticed_after=0.25, restart_after=0.75).crash(rank=0, step=2),
        observers=[AtMost(1)],
    )
    assert (run.server.x.item(), run.worker(0).identity.incarnation) == (-4.0, 1)


@pytest.mark.parametrize("strategy", [Downpour(n_fetch=3), Downpour(n_fetch=3, overlap=True)], ids=name)
def test_it_takes_no_gradient_where_the_run_once_began(strategy):
    # The workers are made at 100 and the server stands at 0, where they fetch; a step goes nowhere. The one
    # that comes back joins the other at its step 7, in the midst of a period: it has fetched nothing yet.
    problem = Places(lr=0.5)
    run = simulate(
        strategy,
        problem,
        workers=2,
        steps=9,
        start=[100.0],
        centre=[0.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults(noticed_after=0.25, restart_after=1.75).kill(rank=1, moment=6.0),
    )
    assert run.worker(1).identity.incarnation == 1
    assert problem.taken == [0.0] * len(problem.taken)


def test_it_does_not_pull_the_centre_back_to_where_the_run_once_began():
    # all go down by 1 at each step; who comes back begins at the centre, so the spring is slack
    forces = Forces()
    simulate(
        EASGD(rate=0.5, period=3),
        Slope(),
        workers=2,
        steps=9,
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults(noticed_after=0.25, restart_after=1.75).kill(rank=1, moment=6.0),
        observers=[forces],
    )
    assert forces.of_returned[0] == 0.0


def test_the_bound_of_ssp_does_not_hide_a_worker_s_own_update_when_another_comes_back():
    # A message takes 1/4 s, gradients 1, 1.9375 and 1 s. Worker 2 dies in its first step and asks for work
    # again at 5.5 s; until its next word comes, at 6 s, the server takes it for one that has done nothing.
    # Meanwhile worker 1's second and worker 0's third update come. Worker 1 reads next, and must see its two.
    shown = Shown()
    Simulation(
        SSP(bound=1),
        lambda rank: Doer(Slope(), rank, torch.zeros(3, dtype=torch.float64)),
        workers=3,
        steps=5,
        compute=Compute(mean=1.0, slow={1: 1.9375}),
        network=Network(latency=0.25),
        faults=Faults(noticed_after=0.25, restart_after=4.75).kill(rank=2, moment=0.5),
        observers=[shown],
    ).run()
    assert [model for rank, _, model in shown.models if rank == 2]  # it did come back
    for rank, sent, updates in shown.models:
        assert updates[rank] == sent


def test_a_tree_does_not_stand_still_when_a_worker_comes_back():
    # A message takes 1/4 s, a gradient 1 s; the two workers are a group each. Worker 1 dies at once and asks
    # the server for work at 1.875 s. From then on the server waits for it, while the other aggregator, who
    # sent its gradient at 1.75 s, waits for the server and hears nobody.
    run = simulate(
        Hierarchical(groups=2),
        Census(steps=3),
        workers=2,
        steps=3,
        start=[0.0] * 6,
        compute=Compute(mean=1.0),
        network=Network(latency=0.25),
        faults=Faults(noticed_after=0.25, restart_after=1.5).kill(rank=1, moment=0.125),
    )
    assert all(share > 0 for share in run.server.x.tolist())
    assert run.server.merged == 6


@pytest.mark.parametrize("moment", [12.6, 20.6, 21.6])
def test_a_shard_that_forgets_who_is_done_waits_for_nobody_who_is(moment):
    # Worker 1 is done at 8.6 s, and says so. The second shard dies later and has no snapshot: it must hear
    # again that worker 1 has nothing more to give, or the bound would hold worker 0 back for ever.
    run = simulate(
        SSP(bound=1),
        Slope(lr=0.1),
        workers=2,
        steps=8,
        start=[0.0, 0.0],
        shards=2,
        compute=Compute(mean=1.0, slow={0: 3.0}),
        network=Network(latency=0.0625),
        disk=lambda rank: Disk(keeps_every_update=False, snapshot_every=50),
        faults=Faults(noticed_after=0.25, restart_after=0.75).kill(rank=3, moment=moment),
    )
    assert run.nodes[3].identity.incarnation == 1
    assert run.nodes[2].x.item() == pytest.approx(-1.6)  # every update is in the shard that lived
