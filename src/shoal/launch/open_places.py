"""OpenPlaces: the places of a run that workers from elsewhere may take, as its keeper grants them."""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import ShoalError
from shoal.launch.versions import version
from shoal.storage.whole_files import write_whole
from shoal.transports.rendezvous import Store, hub_key

FILE = "places.json"
"""Where a keeper notes the tickets of all places: its successor must not grant one twice."""

VACANT = "vacant"
"""The file in which a launcher leaves the last incarnation of a worker that it does not start again."""

CAME, GONE = "came", "gone"
"""Events of a place itself, beside those that its holder sends."""

SENT = ("progress", "done")
"""Events that the holder of a place may send."""


class Ticket(NamedTuple):
    """The last in a place: by its secret it is known when it calls again."""

    incarnation: int
    secret: str
    is_held: bool


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
        self._tickets: dict[int, Ticket] = self._remembered()  # of the last in each place
        self.taken = {rank for rank, ticket in self._tickets.items() if ticket.is_held}
        """The places that somebody had when the predecessor of this keeper died."""

    def grant(self, asked: bytes, caller: str, present: Set[int]) -> tuple[int, bytes]:
        """A place, by a number of its own, and what to tell who gets it.

        Raises ShoalError with the reason if there is none.
        """
        request = read_words(asked)
        self._check(request)
        told = dict(self._settings())
        with self._lock:
            rank = self._again(request) if "rank" in request else self._next(present)
            number = next(self._numbers)
            self._held[number] = rank
            ticket = self._tickets[rank]
        self._tell(rank, {"event": CAME, "from": caller, "incarnation": ticket.incarnation})
        told |= {"rank": rank, "incarnation": ticket.incarnation, "secret": ticket.secret}
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
            if rank in self._held.values():
                return  # it has called again since
            self._note(rank, self._tickets[rank]._replace(is_held=False))
        self._tell(rank, {"event": GONE})

    def await_farewells(self, seconds: float) -> None:
        """Wait until everybody has given its place back, with all it had to say, but not for longer."""
        until = time.monotonic() + seconds
        while self._held and time.monotonic() < until:
            time.sleep(0.01)

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

    def _again(self, request: Mapping[str, Any]) -> int:
        """The place that a process has already, which asks for it because its line or the keeper was away."""
        rank, secret = request["rank"], str(request.get("secret"))
        ticket = self._tickets.get(rank) if isinstance(rank, int) else None
        if ticket is None or not hmac.compare_digest(ticket.secret.encode(), secret.encode()):
            raise ShoalError("its place was given to another")
        self._note(rank, ticket._replace(is_held=True))
        return int(rank)

    def _next(self, present: Set[int]) -> int:
        """The first place that nobody has, with a ticket for the next incarnation in it."""
        files = [file for file in self._folder.glob(f"{VACANT}.*") if file.suffix[1:].isdecimal()]
        given_up = {int(file.suffix[1:]): int(file.read_text()) for file in files}
        ranks = [*self._ranks, *sorted(given_up)]
        free = [rank for rank in ranks if rank not in present and rank not in self._held.values()]
        if not free:
            raise ShoalError("all its places are taken")
        last = self._tickets[free[0]].incarnation if free[0] in self._tickets else 0
        incarnation = max(last, given_up.get(free[0], 0)) + 1
        self._note(free[0], Ticket(incarnation, secrets.token_hex(16), is_held=True))
        return free[0]

    def _note(self, rank: int, ticket: Ticket) -> None:
        """Remember a ticket, also for a successor of this keeper."""
        self._tickets[rank] = ticket
        write_whole(self._file, json.dumps([*self._tickets.items()]).encode(), synced=False)

    def _remembered(self) -> dict[int, Ticket]:
        if not self._file.exists():
            return {}
        return {rank: Ticket(*ticket) for rank, ticket in json.loads(self._file.read_bytes())}


def read_words(said: bytes) -> dict[str, Any]:
    """What came over the wire as JSON. Raises ShoalError for anything else."""
    try:
        words = json.loads(said)
    except ValueError:
        words = None
    if not isinstance(words, dict):
        raise ShoalError("what was sent is not a JSON object")
    return words
