"""Topologies: who talks to whom in which round, where workers have no server.

A topology is a word with options: 'ring', 'torus:rows=2', 'random:seed=3', 'file:graph.txt'. It is worked out
from ranks and the number of the round alone, so all workers agree on it without a message.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.catalogue import Catalogue
from shoal.core.seeds import stream


@dataclass(frozen=True)
class Topology(ABC):
    """The neighbours of each of so many workers. Frozen: options only."""

    @property
    def symmetric(self) -> bool:
        """Whether everybody hears from those it sends to, and from nobody else."""
        return True

    @property
    def static(self) -> bool:
        """Whether neighbours are the same in every round."""
        return True

    def check(self, workers: int) -> None:
        """Raise ValueError for a number of workers that it cannot have. A single one always fits."""
        return

    @abstractmethod
    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        """Whom `rank` sends to in round `t`, in rank order."""

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        """Whom `rank` hears from in round `t`, in rank order."""
        return self.out_of(rank, workers, t)

    def weights(self, rank: int, workers: int, t: int) -> dict[int, float]:
        """How much `rank` takes of each neighbour's model in round `t`; what is missing to 1 is its own.

        Metropolis-Hastings: 1 / (1 + the larger of both degrees). Of all workers together they are a
        symmetric, doubly stochastic matrix, so mixing by them conserves the sum. Symmetric topologies only.
        """
        if not self.symmetric:
            raise ValueError(f"{self} has edges that lead one way only, so it has no symmetric weights")
        mine = self.out_of(rank, workers, t)
        return {k: 1 / (1 + max(len(mine), len(self.out_of(k, workers, t)))) for k in mine}


@dataclass(frozen=True)
class Ring(Topology):
    """Two neighbours: the one before and the one after."""

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank - 1, rank + 1))


@dataclass(frozen=True)
class Torus(Topology):
    """Four neighbours on a grid whose edges are joined."""

    rows: int | None = None  # None: as many as make it the most square

    def check(self, workers: int) -> None:
        fits = [d for d in range(2, workers) if workers % d == 0]
        if workers > 1 and not fits:
            raise ValueError(
                f"{workers} workers make a ring, not a torus; "
                f"take topology 'ring', or {max(4, workers + 1)} workers"
            )
        if workers > 1 and self.rows is not None and self.rows not in fits:
            raise ValueError(
                f"rows={self.rows} does not cut {workers} workers into a torus; "
                f"take rows={' or '.join(map(str, fits))}"
            )

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        rows = self.rows or max(d for d in range(1, workers + 1) if d * d <= workers and workers % d == 0)
        columns = workers // rows
        row, column = divmod(rank, columns)
        beside = [row * columns + (column + step) % columns for step in (-1, 1)]
        return _others(rank, workers, [rank - columns, rank + columns, *beside])


@dataclass(frozen=True)
class Hypercube(Topology):
    """Those whose rank differs in one binary digit."""

    def check(self, workers: int) -> None:
        below = 1 << (workers.bit_length() - 1)
        if workers != below:
            raise ValueError(
                f"a hypercube has 2, 4, 8, ... workers, not {workers}; "
                f"take {below} or {2 * below} of them, or topology 'ring'"
            )

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank ^ 1 << digit for digit in range((workers - 1).bit_length())))


@dataclass(frozen=True)
class Exponential(Topology):
    """One way, to those 1, 2, 4, ... places further on."""

    @property
    def symmetric(self) -> bool:
        return False

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank + hop for hop in _hops(workers)))

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank - hop for hop in _hops(workers)))


@dataclass(frozen=True)
class OnePeer(Topology):
    """The exponential graph, one of its hops in each round."""

    @property
    def symmetric(self) -> bool:
        return False

    @property
    def static(self) -> bool:
        return False

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, [rank + hop for hop in _hops(workers, t)])

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, [rank - hop for hop in _hops(workers, t)])


@dataclass(frozen=True)
class Complete(Topology):
    """Everybody talks to everybody."""

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, range(workers))


@dataclass(frozen=True)
class RandomPairs(Topology):
    """New pairs in every round, drawn by all alike."""

    seed: int = 0

    @property
    def static(self) -> bool:
        return False

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        import torch  # here: checking the word of a topology needs no torch

        order = torch.randperm(workers, generator=stream(self.seed, "pairs", t)).tolist()
        place = order.index(rank) ^ 1
        return [order[place]] if place < workers else []


@dataclass(frozen=True)
class File(Topology):
    """A graph of your own, file:PATH, with lines 'i j' or 'i -> j'."""

    path: str = ""
    edges: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)  # (from, to) -> line

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("topology 'file' needs the path of a graph, as in file:graph.txt")
        object.__setattr__(self, "edges", _read(self.path))

    @property
    def symmetric(self) -> bool:
        return all((j, i) in self.edges for i, j in self.edges)

    def check(self, workers: int) -> None:
        for edge, line in self.edges.items():
            if max(edge) >= workers:
                raise ValueError(
                    f"{self.path}, line {line}: there is no worker {max(edge)} among {workers}, from 0 on"
                )
        for k in cut_off(lambda i: self.out_of(i, workers, 0), workers):
            raise ValueError(f"{self.path} is not connected: no path leads from worker 0 to worker {k}")
        for k in cut_off(lambda i: self.into(i, workers, 0), workers):
            raise ValueError(f"{self.path} is not connected: no path leads from worker {k} to worker 0")

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return sorted(j for i, j in self.edges if i == rank)

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        return sorted(i for i, j in self.edges if j == rank)


TOPOLOGIES: Catalogue[Topology] = Catalogue(
    "topology",
    {
        "ring": Ring,
        "torus": Torus,
        "hypercube": Hypercube,
        "exponential": Exponential,
        "one_peer": OnePeer,
        "complete": Complete,
        "random": RandomPairs,
        "file": File,
    },
)


def named(text: str) -> Topology:
    """The topology that a word stands for, with its options if it has any: 'torus:rows=2'."""
    word, _, rest = text.partition(":")
    if word == "file":
        return File(rest)
    return TOPOLOGIES.read(text)


def both_ways(text: str) -> Topology:
    """The same, for who mixes both ways: raises ValueError for a topology whose edges lead one way."""
    found = named(text)
    if not found.symmetric:
        raise ValueError(
            f"topology {text!r} has edges that lead one way only; take one that leads both ways, "
            "as ring, torus, hypercube, complete or random, or strategy 'sgp', which needs none"
        )
    return found


def cut_off(near: Callable[[int], Iterable[int]], workers: int) -> list[int]:
    """Who is not found from worker 0 by going to those who are near, again and again."""
    found, fresh = {0}, {0}
    while fresh:
        fresh = {k for i in fresh for k in near(i)} - found
        found |= fresh
    return sorted(set(range(workers)) - found)


def _others(rank: int, workers: int, near: Iterable[int]) -> list[int]:
    """Ranks without oneself, wrapped around, each once and in order."""
    return sorted({k % workers for k in near} - {rank})


def _hops(workers: int, t: int | None = None) -> list[int]:
    """1, 2, 4, ... below the number of workers; or the one of round `t`."""
    hops = [1 << power for power in range((workers - 1).bit_length())]
    return hops if t is None or not hops else [hops[t % len(hops)]]


def _read(path: str) -> dict[tuple[int, int], int]:
    """The edges of a file, both directions of one that leads both ways, with the line each stands in."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"topology 'file:{path}' cannot be read: {problem}") from None
    edges: dict[tuple[int, int], int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\d+)\s*(->|\s)\s*(\d+)", text)
        if match is None:
            raise ValueError(f"{path}, line {number}: {text!r} is neither an edge 'i j' nor 'i -> j'")
        i, j = int(match[1]), int(match[3])
        if i == j:
            raise ValueError(f"{path}, line {number}: an edge joins two workers, not {i} with itself")
        edges.setdefault((i, j), number)
        if match[2] != "->":
            edges.setdefault((j, i), number)
    return edges
