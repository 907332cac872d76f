"""OpenPlaces: the places of a run that workers from elsewhere may take, as its keeper grants them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.launch.versions import version
from shoal.storage.whole_files import write_whole
from shoal.transports.rendezvous import Store, hub_key

FILE = "places.json"
"""Where a keeper notes the last incarnation of each place: its successor must not grant one twice."""

VACANT = "vacant"
"""The file in which a launcher leaves the last incarnation of a worker that it does not start again."""

CAME, GONE = "came", "gone"
"""Events of a place itself, beside those that its holder sends."""

SENT = ("progress", "done")
"""Events that the holder of a place may send."""

Told = Callable[[int, dict[str, Any]], None]


def vacate(folder: Path, rank: int, incarnation: int) -> None:
    """Have others take the place of a worker that has died, and is not started again."""
    write_whole(folder / f"{VACANT}.{rank}", str(incarnation).encode(), synced=False)


class OpenPlaces:
    """Grants the places of these `ranks`, each to one process at a time, with the settings of the run.

    Places of workers that have died and are not started again come after them: see `vacate`.

    `tell` is called with a rank and an event. Threads of the gRPC server call these methods.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        folder: Path,
        settings: Callable[[], Mapping[str, Any]],
        tell: Told,
    ) -> None:
        self.is_over: Callable[[], bool] = lambda: False  # whether nobody may join any more
        self._ranks = tuple(ranks)
        self._folder, self._file = folder, folder / FILE
        self._settings = settings
        self._tell = tell
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, int] = {}  # number of a grant -> rank
        self._incarnations = self._remembered()

    @property
    def taken(self) -> set[int]:
        """The places that somebody has had, and may still have."""
        return set(self._incarnations)

    def grant(self, asked: bytes, caller: str, present: Set[int]) -> tuple[int, bytes]:
        """A place, by a number of its own, and what to tell who gets it.

        Raises ShoalError with the reason if there is none.
        """
        request = read_words(asked)
        self._check(request)
        with self._lock:
            rank, incarnation = self._again(request) or self._next(present)
            number = next(self._numbers)
            self._held[number] = rank
        self._tell(rank, {"event": CAME, "from": caller, "incarnation": incarnation})
        told = {**self._settings(), "rank": rank, "incarnation": incarnation}
        return number, json.dumps(told).encode()

    def hear(self, grant: int, said: bytes) -> None:
        """Pass on an event of who holds that place. Raises ShoalError if it is none."""
        event = read_words(said)
        if event.get("event") not in SENT:
            raise ShoalError(f"{event.get('event')!r} is no event of a worker")
        self._tell(self._held[grant], event)

    def free(self, grant: int) -> None:
        """Who held that place has gone."""
        with self._lock:
            rank = self._held.pop(grant)
        self._tell(rank, {"event": GONE})

    def invite(self, store: Store, keeper: int, hint: str) -> str:
        """What to type to join, in a sentence. The store has the address of the keeper, of that rank."""
        address = store.get(hub_key(keeper)).decode()
        number = "1 place is" if len(self._ranks) == 1 else f"{len(self._ranks)} places are"
        return f"{number} open; to join: shoal join {address} {hint}"

    def _check(self, request: Mapping[str, Any]) -> None:
        if request.get("version") != (own := version()):
            raise ShoalError(
                f"it has another Shoal ({own}) than this one ({request.get('version')}); install the same one"
            )
        if self.is_over():
            raise ShoalError("the run is about to end")

    def _again(self, request: Mapping[str, Any]) -> tuple[int, int] | None:
        """The place that a process has already, which asks for it because the keeper was away."""
        rank, incarnation = request.get("rank"), request.get("incarnation")
        if not isinstance(rank, int) or self._incarnations.get(rank) != incarnation:
            return None
        return rank, self._incarnations[rank]

    def _next(self, present: Set[int]) -> tuple[int, int]:
        """The first place that nobody has, and the next incarnation in it."""
        given_up = {int(file.suffix[1:]): int(file.read_text()) for file in self._folder.glob(f"{VACANT}.*")}
        ranks = [*self._ranks, *sorted(given_up)]
        free = [rank for rank in ranks if rank not in present and rank not in self._held.values()]
        if not free:
            raise ShoalError("all its places are taken")
        incarnation = max(self._incarnations.get(free[0], 0), given_up.get(free[0], 0)) + 1
        self._incarnations[free[0]] = incarnation
        write_whole(self._file, json.dumps([*self._incarnations.items()]).encode(), synced=False)
        return free[0], incarnation

    def _remembered(self) -> dict[int, int]:
        return dict(json.loads(self._file.read_bytes())) if self._file.exists() else {}


def read_words(said: bytes) -> dict[str, Any]:
    """What came over the wire as JSON. Raises ShoalError for anything else."""
    try:
        words = json.loads(said)
    except ValueError:
        words = None
    if not isinstance(words, dict):
        raise ShoalError("what was sent is not a JSON object")
    return words
