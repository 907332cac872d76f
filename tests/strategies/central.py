"""What the tests of strategies with a server share: problems that tell whose gradient is where, observers."""

from collections import defaultdict
from dataclasses import dataclass, fields

import torch

from shoal.engine.engine import Instrument
from shoal.testing.problems import Problem


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return (x - 0.3 * rank) / 3 + torch.sin(x * (rank + 1) + step) / 7


class Whole(Problem):
    """Gradients of small whole numbers that depend on x, so that every order of arrival is another path."""

    def gradient(self, rank, step, x):
        place = torch.arange(len(x), dtype=x.dtype)
        return torch.remainder(3 * x + 5 * rank + step + place, 7) - 2


@dataclass(frozen=True)
class Census(Problem):
    """Element `rank * steps + step` counts that batch: the model tells how often each is in it."""

    steps: int = 1

    def gradient(self, rank, step, x):
        g = torch.zeros_like(x)
        g[rank * self.steps + step] = -1.0
        return g


class Trail(Instrument):
    """The server's model after each of its updates, and when they were."""

    def __init__(self):
        self.x = []
        self.at = []

    def update(self, node):
        if node.rank == node.identity.workers:
            self.at.append(node.transport.now())
            self.x.append(node.x.tolist() if node.x.numel() > 1 else node.x.item())


class Reads(Instrument):
    """What each worker was shown, and when."""

    def __init__(self):
        self.x = defaultdict(list)
        self.at = defaultdict(list)

    def receive(self, node, m):
        if m.tag == "reply" and not node.is_server:
            self.x[node.rank].append(m.body.tolist() if m.body.numel() > 1 else m.body.item())
            self.at[node.rank].append(node.transport.now())


class Lateness(Instrument):
    """How many versions behind each push was when it came to the server, in order of arrival."""

    def __init__(self):
        self.versions = []

    def receive(self, node, m):
        if m.tag == "push" and node.rank == node.identity.workers:
            self.versions.append(node.version - m.version)

    def in_the_middle(self):
        """Those of the middle of the run, when nobody has just begun or is about to end."""
        return self.versions[len(self.versions) // 8 : -len(self.versions) // 4]


def name(strategy):
    """The strategy with the options that are not the default ones, as a test's name."""
    told = [f"{f.name}={v}" for f in fields(strategy) if (v := getattr(strategy, f.name)) != f.default]
    return "-".join([type(strategy).__name__, *told])


def mean(values):
    return sum(values) / len(values)


def mean_staleness(histogram):
    return sum(late * n for late, n in histogram.items()) / sum(histogram.values())
