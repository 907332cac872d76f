"""A worker dies while all add up: whoever is left without a sum hears who it was, and nobody waits on."""

import pytest
import torch
from adding import add

from shoal.collectives import ALGORITHMS, averaging
from shoal.core.errors import PeerLost
from shoal.sim import Compute, Faults, Network
from shoal.strategies import Sync
from shoal.testing.problems import Slope, simulate

NETWORK = Network(latency=1.0, bandwidth=1000.0)

each = pytest.mark.parametrize("name", ALGORITHMS)


def vectors(workers):
    return [torch.full((60,), float(k + 1), dtype=torch.float64) for k in range(workers)]


@each
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_who_dies_in_a_sum_is_named_unless_nobody_misses_it(name, workers):
    total = add(name, vectors(workers), network=NETWORK)
    named = [
        is_named(name, workers, rank, total.seconds * part / 5, total.worker(0).x)
        for rank in range(workers)
        for part in range(5)
    ]
    assert any(named) or (name, workers) == ("butterfly", 2)  # the one message leaves at once


def is_named(name, workers, rank, moment, total):
    """Whether the sum fails; if it does not, the others have it."""
    try:
        run = add(
            name, vectors(workers), network=NETWORK, faults=Faults(noticed_after=0.25).kill(rank, moment)
        )
    except PeerLost as lost:
        return f"worker {rank} was lost before" in str(lost) or pytest.fail(
            f"somebody else was named: {lost}"
        )
    others = run.nodes[:rank] + run.nodes[rank + 1 :]
    assert all(torch.equal(node.x, total) for node in others)
    return False


@each
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("step", [0, 3])
def test_who_crashes_in_a_step_is_named_with_it(name, workers, step):
    for rank in range(workers):
        with pytest.raises(PeerLost, match=f"worker {rank} was lost before .* .which is at step {step}"):
            simulate(
                Sync(),
                Slope(),
                workers=workers,
                steps=9,
                compute=Compute(mean=1.0),
                faults=Faults().crash(rank=rank, step=step),
                mean=averaging(ALGORITHMS[name].sum),
            )
