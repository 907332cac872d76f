"""What becomes of a worker's work when others come or go, as exceptions inside the engine."""

from __future__ import annotations

from shoal.core.errors import PeerLost


class EpochChanged(Exception):
    """A change has arrived in the middle of an average, which cannot be completed as it was begun."""


class LeftEarly(PeerLost):
    """A member has ended in order, and will not come to a round that this worker waits in."""


class Demoted(Exception):
    """The keeper does not count this worker among the members: it must join again."""


class RunIsOver(Exception):
    """A worker comes to join, or would have to, when there is nothing left to do."""
