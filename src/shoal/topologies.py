"""Topologies: which workers exchange models in each round of a strategy without a server.

A topology is a name with options: 'ring', 'torus:rows=2', 'random:seed=3', 'file:graph.txt'. It depends only
on ranks and the number of the round, so all workers agree on it without messages.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.catalogue import Catalogue
from shoal.core.seeds import stream


@dataclass(frozen=True)
class Topology(ABC):
    """The neighbours of each worker in each round. Frozen: holds options only."""

    @property
    def symmetric(self) -> bool:
        """Whether every worker receives from exactly the workers it sends to."""
        return True

    @property
    def static(self) -> bool:
        """Whether the neighbours are the same in every round."""
        return True

    @property
    def of_all_rounds(self) -> Topology:
        """The topology with the edges of all rounds in each."""
        if not self.static:
            raise NotImplementedError(f"{type(self).__name__} changes, and must say which edges it ever has")
        return self

    def check(self, workers: int) -> None:
        """Raise ValueError if the topology does not exist for so many workers; 1 worker always fits."""
        return

    @abstractmethod
    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        """The workers that `rank` sends to in round `t`, in rank order."""

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        """The workers that `rank` receives from in round `t`, in rank order."""
        return self.out_of(rank, workers, t)

    def weights(self, rank: int, workers: int, t: int) -> dict[int, float]:
        """The weight of each neighbour's model for `rank` in round `t`; its own weight is the rest to 1.

        Metropolis-Hastings: 1 / (1 + the larger of both degrees). The weights of all workers form a
        symmetric, doubly stochastic matrix, so mixing conserves the sum. Symmetric topologies only.
        """
        if not self.symmetric:
            raise ValueError(f"{self} has edges that lead one way only, so it has no symmetric weights")
        mine = self.out_of(rank, workers, t)
        return {k: 1 / (1 + max(len(mine), len(self.out_of(k, workers, t)))) for k in mine}


@dataclass(frozen=True)
class Ring(Topology):
    """Two neighbours: the previous and the next rank."""

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank - 1, rank + 1))


@dataclass(frozen=True)
class Torus(Topology):
    """Four neighbours on a grid that wraps around."""

    rows: int | None = None  # None: as close to a square as possible

    def check(self, workers: int) -> None:
        fits = [d for d in range(2, workers) if workers % d == 0]
        if workers > 1 and not fits:
            raise ValueError(
                f"{workers} workers cannot form a torus, which needs 2 or more rows and columns; "
                f"take topology 'ring', or {max(4, workers + 1)} workers"
            )
        if workers > 1 and self.rows is not None and self.rows not in fits:
            raise ValueError(
                f"rows={self.rows} does not divide {workers} workers into a torus; "
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
    """The ranks that differ in one binary digit."""

    def check(self, workers: int) -> None:
        below = 1 << (workers.bit_length() - 1)
        if workers != below:
            raise ValueError(
                f"a hypercube has 2, 4, 8, ... workers, not {workers}; "
                f"take {below} or {2 * below} workers, or topology 'ring'"
            )

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank ^ 1 << digit for digit in range((workers - 1).bit_length())))


@dataclass(frozen=True)
class Exponential(Topology):
    """One-way edges to the ranks 1, 2, 4, ... further on."""

    @property
    def symmetric(self) -> bool:
        return False

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank + hop for hop in _hops(workers)))

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, (rank - hop for hop in _hops(workers)))


@dataclass(frozen=True)
class OnePeer(Topology):
    """The exponential graph, one edge per worker in each round."""

    @property
    def symmetric(self) -> bool:
        return False

    @property
    def static(self) -> bool:
        return False

    @property
    def of_all_rounds(self) -> Topology:
        return Exponential()

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, [rank + hop for hop in _hops(workers, t)])

    def into(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, [rank - hop for hop in _hops(workers, t)])


@dataclass(frozen=True)
class Complete(Topology):
    """Every worker exchanges with every other."""

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        return _others(rank, workers, range(workers))


@dataclass(frozen=True)
class RandomPairs(Topology):
    """New random pairs in every round."""

    seed: int = 0

    @property
    def static(self) -> bool:
        return False

    @property
    def of_all_rounds(self) -> Topology:
        return Complete()

    def out_of(self, rank: int, workers: int, t: int) -> list[int]:
        import torch  # here: checking the word of a topology needs no torch

        order = torch.randperm(workers, generator=stream(self.seed, "pairs", t)).tolist()
        partner = order.index(rank) ^ 1
        return [order[partner]] if partner < workers else []


@dataclass(frozen=True)
class GraphFile(Topology):
    """A graph from a file, file:PATH, with lines 'i j' or 'i -> j'."""

    path: str = ""
    edges: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)  # (from, to) -> line

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("topology 'file' needs the path of a file with edges, as in file:graph.txt")
        object.__setattr__(self, "edges", _read(self.path))

    @property
    def symmetric(self) -> bool:
        return all((j, i) in self.edges for i, j in self.edges)

    def check(self, workers: int) -> None:
        for edge, line in self.edges.items():
            if max(edge) >= workers:
                raise ValueError(
                    f"{self.path}, line {line}: there is no worker {max(edge)}; "
                    f"the {workers} workers are numbered from 0"
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
        "file": GraphFile,
    },
)


def named(text: str) -> Topology:
    """Read a topology from its name and options, such as 'torus:rows=2'."""
    word, _, rest = text.partition(":")
    if word == "file":
        return GraphFile(rest)
    return TOPOLOGIES.read(text)


def both_ways(text: str) -> Topology:
    """Read a symmetric topology; raises ValueError if it has one-way edges."""
    found = named(text)
    if not found.symmetric:
        raise ValueError(
            f"topology {text!r} has edges that lead one way only; take a symmetric topology (ring, torus, "
            "hypercube, complete or random), or strategy 'sgp', which accepts such edges"
        )
    return found


def cut_off(near: Callable[[int], Iterable[int]], workers: int) -> list[int]:
    """The workers that cannot be reached from worker 0 along the edges of `near`."""
    return sorted(set(range(workers)) - _reached(0, near))


def strongly_connected(topology: Topology, rank: int, workers: int, away: Container[int]) -> set[int]:
    """The workers that `rank` can reach and that can reach it, without those in `away`; itself too."""

    def here(ranks: Iterable[int]) -> list[int]:
        return [k for k in ranks if k not in away]

    whole = topology.of_all_rounds
    return _reached(rank, lambda k: here(whole.out_of(k, workers, 0))) & _reached(
        rank, lambda k: here(whole.into(k, workers, 0))
    )


def _reached(start: int, near: Callable[[int], Iterable[int]]) -> set[int]:
    found, fresh = {start}, {start}
    while fresh:
        fresh = {k for i in fresh for k in near(i)} - found
        found |= fresh
    return found


def _others(rank: int, workers: int, near: Iterable[int]) -> list[int]:
    """Distinct ranks modulo `workers` in order, without `rank` itself."""
    return sorted({k % workers for k in near} - {rank})


def _hops(workers: int, t: int | None = None) -> list[int]:
    """The hops 1, 2, 4, ... below the number of workers; with `t`, only the hop of that round."""
    hops = [1 << power for power in range((workers - 1).bit_length())]
    return hops if t is None or not hops else [hops[t % len(hops)]]


def _read(path: str) -> dict[tuple[int, int], int]:
    """Read edges from a file, with their line numbers; 'i j' gives both directions."""
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
            raise ValueError(f"{path}, line {number}: {text!r} is not an edge; write 'i j' or 'i -> j'")
        i, j = int(match[1]), int(match[3])
        if i == j:
            raise ValueError(f"{path}, line {number}: an edge cannot join worker {i} with itself")
        edges.setdefault((i, j), number)
        if match[2] != "->":
            edges.setdefault((j, i), number)
    return edges
