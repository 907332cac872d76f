"""Passes: which batches of a user's training data each worker is dealt, while workers come and go.

A pass over the data is dealt out in steps, one batch for each worker. Every worker knows what all are dealt,
so that those who are there can deal again what one that died was dealt since the last average.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.replicas.batches import steps_per_epoch

LOOKED_AT = 64
"""Items of a pass by which two workers tell whether they go through the same data in the same order."""


class PassMark(NamedTuple):
    """By what workers tell whether they read the same data in a pass."""

    number: int
    items: int | None  # None for a stream
    batch: int | None
    drop_last: bool
    digest: str
    first: str = ""  # a digest of the first batch of a stream

    @classmethod
    def of(
        cls,
        number: int,
        order: Sequence[Any] | None,
        batch: int | None,
        drop_last: bool,
        dataset: object = None,
    ) -> PassMark:
        """The mark of a pass over these items of a data set."""
        looked_at = [_some(order or ()), *_chosen(dataset)]
        digest = hashlib.sha256(repr(looked_at).encode()).hexdigest()
        items, size = None if order is None else len(order), None if batch is None else int(batch)
        return cls(number, items, size, drop_last, digest)

    def __str__(self) -> str:
        items = (
            "a stream"
            if self.items is None
            else f"{self.items} {'batches' if self.batch is None else 'samples'}"
        )
        whole = "whole " if self.drop_last else ""
        return items + ("" if self.batch is None else f" in {whole}batches of {self.batch}")

    def difference(self, theirs: PassMark) -> str | None:
        """How this differs from that of the others, in words; None if it does not, as far as one can tell."""
        if self[1:4] != theirs[1:4]:
            return f"reads {self}, and the others read {theirs}"
        if self.number == theirs.number and self.digest != theirs.digest:
            return f"reads {self}, which are not those of the others or have another order"
        return None

    def is_cut_like(self, saved: PassMark) -> bool:
        """Whether it has as many samples, in batches of one size, as the same pass when it was saved."""
        chosen_by_the_loader = self.batch is saved.batch is None  # then batches may be as many as they like
        return self.number != saved.number or chosen_by_the_loader or self[1:4] == saved[1:4]

    def is_in_order(self, saved: PassMark) -> bool:
        """Whether it has the items that the same pass had when it was saved, as far as one can tell."""
        return self.number != saved.number or (self.items, self.digest) == (saved.items, saved.digest)


class GoesOn(NamedTuple):
    """A pass that goes on where another process, or this worker's predecessor, was in it."""

    own: PassMark
    theirs: PassMark
    was_done: bool  # whether nothing of it was left


def _chosen(dataset: object, depth: int = 8) -> Iterator[list[Any]]:
    """Some indices of a subset, as random_split makes them, and of those inside it."""
    held = getattr(dataset, "__dict__", {})
    parts = held.get("datasets")
    indices: Any = held.get("indices")
    if isinstance(indices, Sequence) or getattr(indices, "ndim", 0) == 1:
        yield [len(indices), *_some(indices)]
    inside = [held.get("dataset"), *(parts if isinstance(parts, (list, tuple)) else ())]
    for part in inside if depth else ():
        yield from _chosen(part, depth - 1)


def _some(items: Sequence[Any]) -> list[Any]:
    """Items at even distances."""
    return [_plain(item) for item in items[:: max(1, len(items) // LOOKED_AT)]]


def _plain(item: Any) -> Any:
    """An item as a value that is written alike in every process."""
    if isinstance(item, (list, tuple)):
        return [_plain(part) for part in item]
    if hasattr(item, "tolist"):
        return item.tolist()
    return item if isinstance(item, (int, float, str, bytes)) else type(item).__name__


@dataclass(frozen=True, eq=False)
class Dealing:
    """The rest of a pass, dealt to so many workers.

    `items` are samples, of which each batch takes `batch`; without `batch` they are batches. None stands for
    a stream, whose batches nobody knows beforehand.
    """

    items: Sequence[Any] | None
    batch: int | None = None
    drop_last: bool = False
    workers: int = 1

    @property
    def steps(self) -> int:
        """Batches of each worker; the last may be empty for some, if there are not enough items."""
        assert self.items is not None, "nobody knows how long a stream is"
        number = len(self.items)
        if self.batch is None:
            return -(-number // self.workers)
        if self.drop_last:
            return number // (self.batch * self.workers)
        return min(1, number) if number < self.workers else steps_per_epoch(number, self.batch, self.workers)

    def taken(self, steps: int) -> int:
        """How many items so many steps take."""
        if self.items is None:
            return steps * self.workers
        if steps >= self.steps:
            return len(self.items)
        return steps * self.workers * (self.batch or 1)

    def share(self, place: int, step: int) -> list[Any]:
        """The items of the worker at `place` in one step; the last step takes the remainder."""
        assert self.items is not None, "nobody knows what comes in a stream"
        size = self.workers * (self.batch or 1)
        is_last = step == self.steps - 1 and not (self.drop_last and self.batch)
        return list(self.items[step * size : None if is_last else (step + 1) * size][place :: self.workers])

    def shares(self, place: int, begin: int = 0) -> list[list[Any]]:
        """Those of all steps from `begin` on."""
        return [self.share(place, step) for step in range(begin, self.steps)]

    def check_is_enough(self) -> None:
        """Raise ValueError if there are too few samples to begin a pass with."""
        if self.items is not None and self.batch is not None and not self.drop_last:
            steps_per_epoch(len(self.items), self.batch, self.workers)


class Passes:
    """One worker's place in the passes over its training data.

    Without `shared` data every worker has its own, which nobody else can take over.
    """

    def __init__(self, place: int = 0, workers: int = 1) -> None:
        self.place, self.workers = place, workers
        self.batches = 0  # that this worker was dealt in all
        self.leaves_early = False  # whether the loop has left a pass before its end
        self._to_skip = 0  # batches that come next, and that this worker's predecessor has done
        self.lost = 0  # batches that died with a worker: nobody can deal them again
        self.dealing: Dealing | None = None  # that the loop reads at present
        self.done = 0  # steps of it
        self._number = 0  # of the pass
        self._reading = 0  # the pass that the loop has begun last
        self._taken = 0  # items of it that were dealt before this dealing
        self._again: list[Any] = []  # items that come before the others: they were dealt to one that died
        self._order: Sequence[Any] | None = None
        self._is_shared = True
        self.mark: PassMark | None = None  # of the pass that the loop has begun last, if all share it
        self._theirs: PassMark | None = None  # in the state that this worker goes on from
        self.goes_on: GoesOn | None = None  # what came of that
        self._log: deque[tuple[int, Dealing, int]] = deque()  # since the last average: step, what was dealt
        self._known_from: float = 0  # the first step of which it is known what was dealt
        self._dealt_to = workers  # the steps done in the state that this worker goes on from
        self._gone: dict[int, int] = {}  # place among them -> its last so many batches, which are dealt again
        self._steps: list[int] = []  # of that state: those to which the batches since the last average belong

    def __str__(self) -> str:
        if not self._is_shared:
            return "data of its own"
        again = f", {len(self._again)} of them once more" if self._again else ""
        return f"batch {self.batches} (pass {self._number + 1}, {self._taken} dealt so far{again})"

    # -- the loop reads ------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        order: Sequence[Any] | None,
        batch: int | None = None,
        drop_last: bool = False,
        shared: bool = True,
        dataset: object = None,
    ) -> bool:
        """The loop begins that pass, over these items of `dataset`. False if others have done it already."""
        if number < self._number:
            return False
        if number > self._number:
            self.lost += sum(self._gone.values())  # of a pass that is over
            self._dealt_to, self._gone = self.workers, {}
            is_known = self.dealing is not None and self.dealing.items is not None
            self.leaves_early = self.leaves_early or (is_known and any(self.left()))
            self._settle()
            self._number, self._taken = number, 0
        self._order, self._is_shared, self._reading = order, shared, number
        self.mark = PassMark.of(number, order, batch, drop_last, dataset) if shared else None
        if self.mark is not None and self._theirs is not None:
            self._go_on_from(self._theirs)
        self._settle_with_others(batch, drop_last)
        self.dealing = self._dealt(batch, drop_last)
        if not self._taken and not self._again:
            self.dealing.check_is_enough()
        if self._to_skip and order is not None:
            self._skip_now(min(self._to_skip, sum(map(bool, self.left()))))
        return True

    @property
    def is_dealt(self) -> bool:
        """Whether the loop reads its data so that what is left can be dealt to other workers."""
        return self._is_shared and self.batches > 0

    def is_at(self, number: int) -> bool:
        """Whether the loop has not begun another pass since, beside this one."""
        return self._reading == number

    def left(self) -> list[list[Any]]:
        """What this worker is dealt from here on, step by step."""
        if self.dealing is None:
            return []
        return self.dealing.shares(self.place if self._is_shared else 0, self.done)

    def is_own(self, index: int) -> bool:
        """Whether the batch at `index` of a stream comes next at this worker."""
        if self.dealing is None:
            return False
        place = self.place if self._is_shared else 0
        return index == self._taken + self.done * self.dealing.workers + place

    def skip(self, batches: int) -> None:
        """This worker was started again, and its predecessor has done its first so many batches."""
        self._to_skip = batches

    @property
    def behind(self) -> int:
        """The batches that were read, by this worker or its predecessor."""
        return self.batches + self._to_skip

    def skips(self) -> bool:
        """Whether the batch of a stream that comes next was done by this worker's predecessor."""
        if self._to_skip:
            self._skip_now(1)
            return True
        return False

    def is_short(self, length: int) -> bool:
        """Whether a stream of that length has a batch for others in this step, and none for this worker."""
        return self._is_shared and self._taken + self.done * self.workers < length

    def note_first(self, digest: str) -> None:
        """The loop has read the first batch of a stream, of which nothing else tells beforehand."""
        if self.mark is not None:
            self.mark = self.mark._replace(first=digest)

    def take(self, step: int, since: int) -> None:
        """The loop gets its next batch before `step`; the last average was before step `since`."""
        assert self.dealing is not None, "no pass has begun"
        while self._log and self._log[0][0] < since:
            self._log.popleft()
        if self._known_from == math.inf:
            self._known_from = step
        self._log.append((step, self.dealing, self.done))
        self.done += 1
        self.batches += 1

    # -- workers come and go -------------------------------------------------------------------

    def redeal(self, place: int, workers: int, undone: Mapping[int, Sequence[int]]) -> None:
        """From here on deal to so many workers, of whom this is number `place`.

        What was dealt in the `undone` steps of each of the former places comes next, once more. Before the
        loop has come to the pass of the state that it goes on from, they are the last batches of that.
        """
        if self.dealing is None and self._known_from == math.inf:
            self._gone = {k: sum(t in steps for t in self._steps) for k, steps in undone.items() if steps}
            self.place, self.workers = place, workers
            return
        again = [(dealing, k, n) for t, dealing, n in self._log for k, steps in undone.items() if t in steps]
        self._log.clear()
        self.lost += sum(t < self._known_from for steps in undone.values() for t in steps)
        if not self._is_shared:
            self.lost += len(again)
            self.place, self.workers = place, workers
            return
        self._settle()
        for dealing, k, n in again:
            if dealing.items is None:
                self.lost += 1
            else:
                self._again += dealing.share(k, n)
        self.place, self.workers = place, workers
        if self.dealing is not None:
            self.dealing = self._dealt(self.dealing.batch, self.dealing.drop_last)

    @property
    def left_over(self) -> int:
        """Items that were dealt to workers that died, and that nobody has taken since."""
        if self.dealing is None or self.dealing.items is None:
            return len(self._again)
        return max(0, len(self._again) - self.dealing.taken(self.done))

    def state(self) -> dict[str, Any]:
        """Where this worker is, as plain values."""
        return {
            "number": self._number,
            "taken": self._taken,
            "again": list(self._again),
            "done": self.done,
            "workers": self.workers,
            "log": [step for step, _, _ in self._log],
            "shared": self._is_shared,
            "batches": self.batches,
            "is_dealt": self.is_dealt,
            "to_skip": self._to_skip,
            "leaves_early": self.leaves_early,
            "mark": list(mark) if (mark := self.mark or self._theirs) else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave; the loop begins anew, or has begun an earlier pass."""
        if state["number"] > self._number:
            self.dealing = None  # the rest of the pass that the loop reads is no longer this worker's
        self._number, self._taken, self._again = state["number"], state["taken"], list(state["again"])
        self.done, self._is_shared, self.batches = state["done"], state["shared"], state["batches"]
        self._to_skip, self.leaves_early = state["to_skip"], state["leaves_early"]
        self._dealt_to, self._gone, self._steps = state["workers"], {}, state["log"]
        self._theirs = PassMark(*state["mark"]) if state.get("mark") else None
        self._log.clear()
        self._known_from = math.inf
        if self.dealing is not None:
            self.dealing = self._dealt(self.dealing.batch, self.dealing.drop_last)

    # -- inside --------------------------------------------------------------------------------

    def _go_on_from(self, theirs: PassMark) -> None:
        """The loop begins the pass in which this worker's state was taken, or a later one."""
        assert self.mark is not None
        self._theirs = None
        self.goes_on = GoesOn(self.mark, theirs, self._was_done(theirs))
        if self.goes_on.was_done and not self.mark.is_cut_like(theirs):
            self._taken, self._again, self.done = len(self._order or ()), [], 0

    def _was_done(self, theirs: PassMark) -> bool:
        """Whether nothing was left of that pass, which is the one that begins."""
        if theirs.items is None or self.mark is None or theirs.number != self.mark.number:
            return False
        rest = range(theirs.items - self._taken + len(self._again))
        return self.done >= Dealing(rest, theirs.batch, theirs.drop_last, self._dealt_to).steps

    def _settle_with_others(self, batch: int | None, drop_last: bool) -> None:
        """Count the steps done as taken if they were dealt to other workers than there are now."""
        if self._is_shared and (self._dealt_to != self.workers or self._gone):
            here, self.workers = self.workers, self._dealt_to
            self.dealing, done = self._dealt(batch, drop_last), self.done
            gone = [(k, n) for k, last in self._gone.items() for n in range(done - last, done)]
            known = [(k, n) for k, n in gone if n >= 0 and self.dealing.items is not None]
            again = [item for k, n in known for item in self.dealing.share(k, n)]
            self.lost += len(gone) - len(known)
            self._settle()
            self._again += again
            self.workers, self._gone = here, {}
        self._dealt_to = self.workers

    def _skip_now(self, batches: int) -> None:
        self._to_skip -= batches
        self.done += batches
        self.batches += batches

    def _settle(self) -> None:
        """Count the steps of this dealing as taken."""
        if self.dealing is not None:
            taken = self.dealing.taken(self.done)
            self._taken += max(0, taken - len(self._again))
            self._again = self._again[taken:]
        self.done = 0

    def _dealt(self, batch: int | None, drop_last: bool) -> Dealing:
        """The rest of the pass, dealt to those who are there."""
        rest = None if self._order is None else [*self._again, *self._order[self._taken :]]
        return Dealing(rest, batch, drop_last, self.workers if self._is_shared else 1)
