"""What nodes leave at the end of a leg, and who takes it over when the crew grows."""

from __future__ import annotations

import pytest
import torch

from shoal import BMUF, CheckpointError, Downpour
from shoal.core.identity import NodeIdentity
from shoal.sim import Compute, Simulation
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.leg_edge import LegEdge
from shoal.testing import Slope, simulate

STEPS = 4


def ended(strategy, workers=2, **options) -> Simulation:
    """A first leg."""
    return simulate(strategy, Slope(), workers=workers, steps=STEPS, compute=Compute(1.0), **options)


def fresh(strategy, workers=3, shards=1) -> Simulation:
    """The nodes of a second leg, which have not begun."""
    start = torch.zeros(2, dtype=torch.float64)
    return Simulation(
        strategy,
        lambda rank: Slope().replica(rank, start),
        workers=workers,
        steps=2 * STEPS,
        shards=shards,
        compute=Compute(1.0),
    )


def edge_of(done: Simulation, folder, left_out=()) -> LegEdge:
    edge = LegEdge(folder, STEPS, {"crew": "2@0,3@4"})
    for node in done.nodes:
        if node.rank not in left_out:
            edge.leave(node)
    assert not edge.is_sealed
    edge.seal()
    return edge


def test_nodes_of_the_next_leg_begin_with_the_model_the_steps_and_what_is_shared(tmp_path):
    bmuf = BMUF(period=2, warmup=0, momentum=0.5)
    done = ended(bmuf, start=[0.0, 0.0])
    edge, nodes = edge_of(done, tmp_path), fresh(bmuf).nodes
    for node in nodes:
        edge.enter(node)
        assert torch.equal(node.x, done.worker(0).x)
        assert node.t == STEPS and node.merged == 2 * STEPS
        assert node.variables.state().keys() == {"delta"}
        assert torch.equal(node.variables.state()["delta"], done.worker(0).variables.state()["delta"])
    assert [node.samples for node in nodes] == [STEPS, STEPS, 0]
    assert torch.equal(nodes[1].rng.get_state(), done.worker(1).rng.get_state())
    assert not torch.equal(nodes[2].rng.get_state(), nodes[0].rng.get_state())


def test_a_worker_that_was_killed_takes_over_from_one_that_was_not(tmp_path):
    done = ended(BMUF(period=2), start=[0.0, 0.0])
    edge, nodes = edge_of(done, tmp_path, left_out=[0]), fresh(BMUF(period=2)).nodes
    for node in nodes:
        edge.enter(node)
    assert [node.samples for node in nodes] == [0, STEPS, 0]
    assert all(torch.equal(node.x, done.worker(1).x) for node in nodes)


def test_shards_of_a_server_go_on_and_know_which_batches_are_in_the_model(tmp_path):
    downpour = Downpour(optimizer="momentum", n_fetch=3)
    done = ended(downpour, start=[0.0, 0.0], shards=2)
    edge, second = edge_of(done, tmp_path), fresh(downpour, shards=2)
    for node in second.nodes:
        edge.enter(node)
    assert torch.equal(second.solution, done.solution)
    for before, after in zip(done.nodes[2:], second.nodes[3:], strict=True):
        assert after.version == before.version == 2 * STEPS
        assert torch.equal(after.variables.state()["memory"], before.variables.state()["memory"])
    second.run()
    assert second.server.merged == 2 * STEPS + 3 * STEPS
    assert max(second.server.meter.staleness) <= 3 * 3, "what a worker has at first is the newest version"


def test_an_edge_that_is_damaged_or_of_another_run_is_refused(tmp_path):
    done = ended(BMUF(period=2), start=[0.0, 0.0])
    edge_of(done, tmp_path)
    with pytest.raises(CheckpointError, match=r"crew='2@0,3@4' \(now '2@0,3@5'\)"):
        LegEdge(tmp_path, STEPS, {"crew": "2@0,3@5"}).check()
    missing = LegEdge(tmp_path / "elsewhere", STEPS, {"crew": "2@0,3@4"})
    with pytest.raises(CheckpointError, match=r"what worker 0 goes on from in .* is missing or damaged"):
        missing.enter(fresh(BMUF(period=2)).nodes[0])


def test_a_folder_of_workers_that_were_groups_is_refused_without_groups_and_the_reverse(tmp_path):
    whole, part = Checkpoints(tmp_path, {}, 1), Checkpoints(tmp_path, {}, 2, position=0)
    part.write(3, NodeIdentity(0, 1), {})
    part.check()
    with pytest.raises(CheckpointError, match="another --group"):
        whole.check()
