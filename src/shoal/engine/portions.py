"""Portions: which portions of a pass over the data are free, out, claimed and delivered."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from math import fsum, inf, isfinite
from typing import Any

NOTHING = -1
"""In the place of a portion: there is none to compute now; push what you hold, and ask again."""

BUNDLES = 1 << 20
"""Numbers of bundles that one incarnation of a worker has for itself."""


class Verdict(IntEnum):
    """The answer to a claim, or to the word that a bundle was pushed."""

    REFUSED = 0  # another worker was first, or the pass is over: throw the gradient away
    GRANTED = 1
    VOID = 2  # others have taken over what the whole bundle holds: throw all of it away


@dataclass
class Claimed:
    """Portions that a worker has claimed and not pushed yet."""

    number: int
    heard: float  # when the worker was last heard of
    portions: list[int] = field(default_factory=list)


class Portions:
    """The portions of one pass after the other, each of which counts once.

    A portion is handed to whoever asks; when none is left, those that are out longest are handed to a second
    worker, and to one more whenever nobody has claimed them for `lease` seconds since. Whoever has computed
    one claims it, and only the first claim is granted. It is delivered when the worker has pushed it, among
    others: until then it goes back to the queue if the worker is lost, or is not heard of for `lease` seconds
    while everybody waits for it.
    """

    def __init__(self, workers: int, lease: float = inf, now: Callable[[], float] = lambda: 0.0) -> None:
        self.number = 0  # of the pass
        self.finished = False  # no pass follows
        self._workers = workers
        self._lease, self._now = lease, now
        self._clocks: Counter[int] = Counter()  # rank -> portions handed to it so far
        self._begin(())

    def _begin(self, portions: Iterable[int]) -> None:
        self._free = deque(portions)
        self._total = len(self._free)
        self._holders: dict[int, list[int]] = {}  # portion -> who computes it, since nobody has claimed it
        self._handed: dict[int, float] = {}  # when each of them was last handed out, longest ago first
        self._bundles: dict[int, Claimed] = {}  # rank -> what it has claimed; longest silent first
        self._losses: dict[int, tuple[float, float]] = {}  # claimed portion -> loss, samples
        self._delivered = 0
        self._void: set[tuple[int, int]] = set()  # rank, number of the bundle
        self._last: dict[tuple[int, int], int] = {}  # rank, incarnation -> its last bundle that counts
        self.is_spoilt = False  # a loss is not finite: the others do not matter any more

    def open(self, portions: Iterable[int]) -> int:
        """Begin the next pass, and return its number."""
        self._begin(portions)
        self.number += 1
        return self.number

    def end(self) -> None:
        """No pass follows."""
        self._begin(())
        self.finished = True

    # -- what a worker asks --------------------------------------------------------------------

    def take(self, rank: int) -> tuple[tuple[int, int], int] | None:
        """The pass and the portion for this worker, and its clock; None if there is nothing for it now.

        NOTHING in place of a portion has it push first: near the end, so that nobody waits for a push until
        the next portion is computed; and when none is left.
        """
        self._hear(rank)
        if rank in self._bundles and len(self._free) <= self._workers:
            return (self.number, NOTHING), self._clocks[rank]
        portion = self._next_for(rank)
        if portion is None:
            return None
        holders = self._holders.setdefault(portion, [])
        holders.append(rank)
        self._handed.pop(portion, None)
        self._handed[portion] = self._now()
        self._clocks[rank] += 1
        return (self.number, portion), self._clocks[rank] - 1

    def claim(
        self, rank: int, number: int, portion: int, bundle: int, loss: float, samples: float
    ) -> Verdict:
        """This worker has computed a portion, and would add it to a bundle."""
        self._hear(rank)
        if (rank, bundle) in self._void:
            return Verdict.VOID
        if number != self.number or portion not in self._holders:
            return Verdict.REFUSED
        if not isfinite(loss):
            self.is_spoilt = True
            return Verdict.REFUSED
        del self._holders[portion], self._handed[portion]
        self._losses[portion] = loss, samples
        self._bundles.setdefault(rank, Claimed(bundle, self._now())).portions.append(portion)
        return Verdict.GRANTED

    def deliver(self, rank: int, number: int, bundle: int) -> Verdict:
        """This worker has pushed a bundle, and every server has it."""
        held = self._bundles.get(rank)
        if number != self.number or held is None or held.number != bundle:
            return Verdict.VOID
        del self._bundles[rank]
        self._delivered += len(held.portions)
        self._last[rank, bundle // BUNDLES] = bundle
        return Verdict.GRANTED

    def give_up(self, rank: int) -> None:
        """The worker is gone: what it computed, and what it claimed and did not deliver, is free again."""
        for portion, holders in list(self._holders.items()):
            if rank in holders:
                holders.remove(rank)
                if not holders:
                    del self._holders[portion], self._handed[portion]
                    self._free.appendleft(portion)
        self._void_bundle(rank)

    # -- what became of the pass ---------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether every portion is delivered, or it does not matter any more."""
        return self.is_spoilt or (self._total > 0 and self._delivered == self._total)

    @property
    def loss(self) -> float:
        """The mean loss over all samples: the same bits, whoever computed which portion, and when."""
        if self.is_spoilt:
            return inf
        return fsum(loss * samples for loss, samples in self._losses.values()) / self.samples

    @property
    def samples(self) -> float:
        """Samples of the portions that were claimed."""
        return fsum(samples for _, samples in self._losses.values())

    @property
    def deliveries(self) -> tuple[tuple[int, int], ...]:
        """The last bundle that counts of each worker, by rank."""
        return tuple((rank, bundle) for (rank, _), bundle in self._last.items())

    # -- as the pool of a server ---------------------------------------------------------------

    @property
    def has_free(self) -> bool:
        """Whether somebody may be given something."""
        return not self.finished and not self.is_complete

    def commit(self, rank: int, clock: int) -> None:
        """Steps say nothing here: claims do."""

    def state(self) -> dict[str, Any]:
        """Nothing: a pass that was interrupted begins again."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing, see `state`."""

    # -- inside --------------------------------------------------------------------------------

    def _next_for(self, rank: int) -> int | None:
        """A portion that nobody has, or a second copy, or one that a silent worker has kept too long."""
        if not self._free:
            single = (p for p in self._handed if len(self._holders[p]) == 1)  # longest out first
            copy = next((p for p in single if rank not in self._holders[p]), None)
            if copy is not None:
                return copy
            self._end_leases()
        return self._free.popleft() if self._free else self._late_for(rank)

    def _late_for(self, rank: int) -> int | None:
        """A portion whose workers, two or more, may all hang: handed out longest ago, and not to this one."""
        since = self._now() - self._lease
        late = (p for p, handed in self._handed.items() if handed < since and rank not in self._holders[p])
        return next(late, None)

    def _hear(self, rank: int) -> None:
        if rank in self._bundles:
            held = self._bundles[rank] = self._bundles.pop(rank)
            held.heard = self._now()

    def _end_leases(self) -> None:
        """Take back what workers have claimed that nobody has heard of for too long."""
        late = [rank for rank, held in self._bundles.items() if held.heard + self._lease < self._now()]
        for rank in late:
            self._void_bundle(rank)

    def _void_bundle(self, rank: int) -> None:
        held = self._bundles.pop(rank, None)
        if held is not None:
            self._void.add((rank, held.number))
            for portion in held.portions:
                del self._losses[portion]
                self._free.appendleft(portion)
