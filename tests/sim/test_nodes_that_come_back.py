"""Nodes that die and come back: who is told what, and that nothing of the work is lost or done twice."""

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Disk, Faults, Link, Network
from shoal.strategies import ASGD, Downpour
from shoal.testing.problems import Slope, simulate


class Heard(Instrument):
    """What worker 0 sends and receives, in order."""

    def __init__(self):
        self.tags = []

    def send(self, node, dst, m):
        if node.rank == 0:
            self.tags.append(m.tag)

    def receive(self, node, m):
        if node.rank == 0:
            self.tags.append(m.tag)


def train(faults, strategy=None, workers=2, steps=4, **options):
    """Every gradient is 1 and takes a second, so the model counts what is in it."""
    compute = options.pop("compute", Compute(mean=1.0))
    return simulate(
        strategy or ASGD(),
        Slope(),
        workers=workers,
        steps=steps,
        compute=compute,
        faults=faults,
        disk=lambda rank: Disk(),
        **options,
    )


def test_a_server_that_comes_back_loses_nothing():
    run = train(Faults(restart_after=2.0).kill(2, 2.5))
    assert run.server.x.item() == -8
    assert run.server.incarnation == 1


def test_a_worker_that_comes_back_does_what_is_left():
    run = train(Faults(restart_after=0.5).kill(1, 1.5))
    assert run.server.x.item() == -8
    assert run.worker(1).incarnation == 1


def test_who_comes_back_before_anyone_has_noticed_is_known_as_a_successor():
    run = train(Faults(noticed_after=30.0, restart_after=0.5).kill(1, 1.5))
    assert run.server.x.item() == -8
    assert run.server.meter.faults == ["worker 1 was lost"]
    assert run.seconds < 30


def test_a_worker_that_died_and_came_back_while_the_server_was_dead_is_known_as_a_successor():
    faults = Faults(noticed_after=0.2, restart_after=2.0).kill(1, 1.45).kill(2, 1.5)
    run = train(faults)  # the worker is back at 3.45 s, the server at 3.5 s
    assert run.server.x.item() == -8
    assert "worker 1 was lost" in run.server.meter.faults


def test_a_server_that_comes_back_is_told_who_has_left_meanwhile():
    # a step takes 1.4 s, the word that all is done 0.2 s; the last pull is answered at 5.9 s
    run = train(Faults(restart_after=2.0).kill(2, 5.95), network=Network(latency=0.1))
    assert run.server.x.item() == -8
    assert run.server.incarnation == 1


def test_a_server_waits_for_workers_that_are_all_dead():
    run = train(Faults(restart_after=3.0).kill(0, 1.5).kill(1, 1.5))
    assert run.server.x.item() == -8
    assert run.server.incarnation == 0


def test_time_passes_while_nobody_is_alive():
    run = train(Faults(restart_after=3.0).kill(0, 1.5).kill(1, 1.5).kill(2, 1.5))
    assert run.server.x.item() == -8
    assert [node.incarnation for node in run.nodes] == [1, 1, 1]


def test_a_worker_that_comes_back_when_all_is_done_goes_home():
    run = train(Faults(restart_after=100.0).kill(1, 3.5))
    assert run.server.x.item() == -8
    assert run.worker(1).t == 0


def test_a_gradient_may_take_longer_than_a_server_is_waited_for():
    # the worker hears of the death of one shard while it waits for the other, of its return while it computes
    slow = {(0, 2): Link(latency=2.0), (2, 0): Link(latency=2.0)}
    run = train(
        Faults(noticed_after=0.2, restart_after=5.0).kill(1, 0.5),
        workers=1,
        start=[0.0, 0.0],
        shards=2,
        network=Network(links=slow),
        compute=Compute(mean=50.0),
    )
    assert run.solution.tolist() == [-4, -4]


def test_a_worker_that_asks_for_more_has_pushed_what_it_did():
    # worker 0 is done with its three batches at 3 s and dies while worker 1 is at its first
    run = train(
        Faults().kill(0, 5.0),
        Downpour(n_push=2, warmup=0),
        steps=3,
        compute=Compute(mean=1.0, slow={1: 10.0}),
    )
    assert run.server.x.item() == -6


def test_a_worker_asks_for_more_when_its_pushes_are_in():
    # or a push that came late would be missing, for its batch is no longer anybody's
    heard = Heard()
    overlap = Downpour(overlap=True, warmup=0)
    train(Faults(), overlap, workers=1, network=Network(latency=0.1), observers=[heard])
    assert heard.tags[-6:] == ["push", "ack", "more", "over", "pull", "reply"]
