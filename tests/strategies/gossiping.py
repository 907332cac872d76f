"""What the tests of gossip share: workers that begin at different places, and an observer of their paths."""

from collections import defaultdict

import torch

from shoal.engine.engine import Instrument
from shoal.sim import Simulation
from shoal.strategies import ADPSGD, CHOCO, DPSGD, SGP, Gossip, GossipGraD, NoLoCo
from shoal.testing.problems import Slope

EVERY = [
    Gossip(help=False),
    GossipGraD(),
    GossipGraD(partners="hypercube"),
    GossipGraD(mode="grad"),
    DPSGD(),
    DPSGD(topology="complete", overlap=False),
    DPSGD(topology="random"),
    SGP(),
    SGP(topology="exponential", overlap=1),
    SGP(topology="ring", overlap=2),
    ADPSGD(help=False),
    CHOCO(),
    NoLoCo(period=1),
    NoLoCo(period=2, group=3),
]
FLAT = Slope(gradients=(0.0,))


class Paths(Instrument):
    """Where each worker stands after each step, and what it keeps: at the end all take the mean."""

    def __init__(self):
        self.x = defaultdict(list)
        self.kept = defaultdict(list)

    def step(self, node):
        self.x[node.rank].append(node.x.item())
        self.kept[node.rank].append(
            {name: v.item() for name, v in node.variables.state().items() if v.numel() == 1}
        )

    def at(self, t):
        """Where all stand after step `t`."""
        return [self.x[rank][t] for rank in sorted(self.x)]

    def of(self, name, t):
        """What all keep under that name after step `t`."""
        return [self.kept[rank][t][name] for rank in sorted(self.kept)]


def begin(strategy, places, problem=FLAT, steps=1, **options):
    """Workers that begin at these places, and the observer of their paths; nothing has happened yet."""
    paths = Paths()

    def replica(rank):
        return problem.replica(rank, torch.tensor([places[rank]], dtype=torch.float64))

    simulation = Simulation(strategy, replica, workers=len(places), steps=steps, observers=[paths], **options)
    return simulation, paths


def watch(strategy, places, problem=FLAT, steps=1, **options):
    """The same, run to its end."""
    simulation, paths = begin(strategy, places, problem, steps, **options)
    return simulation.run(), paths


def ends(simulation):
    """Where all workers stand at the end."""
    return [simulation.worker(rank).x.item() for rank in range(simulation.workers)]


def graph(folder, lines):
    """A topology of these edges, by its word."""
    path = folder / "graph.txt"
    path.write_text("\n".join(lines))
    return f"file:{path}"
