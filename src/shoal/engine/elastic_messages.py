"""The messages by which workers that average among themselves come, go and stay in step.

    worker -> keeper    Join | Settled | Suspects | Leaves | Finished
    keeper -> worker    Change (epoch, members, joiners and when they were let in) | RunOver
    worker -> worker    Present (rounds completed) | RoundResult | StateHead, StatePart | Leaves | Finished

`version` is the epoch in all of them, as it is in every message of a collective. The lists are of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.transport import Message

STATELESS = -1
"""Where a joiner without state stands in the roll call."""


@dataclass(slots=True)
class Join(Message):
    """A process that has no state asks to become a worker.

    `seq` is 1 if, by the epoch that it has heard of, somebody may be giving it some.
    """

    tag: str = "join"


@dataclass(slots=True)
class Settled(Message):
    """A joiner has its state, and takes part from now on."""

    tag: str = "settled"


@dataclass(slots=True)
class Suspects(Message):
    """The sender has lost its connection to the worker whose rank is in `seq`."""

    tag: str = "suspects"


@dataclass(slots=True)
class Leaves(Message):
    """The sender wants to leave in the middle of the run, and waits for an epoch without it."""

    tag: str = "leaves"


@dataclass(slots=True)
class Finished(Message):
    """The sender has nothing left to do; `seq` is the number of rounds that it has completed."""

    tag: str = "finished"


@dataclass(slots=True)
class Change(Message):
    """A new epoch: its members, who have state, and its joiners, who are to get some unless they have it.

    A part for each has their ranks and incarnations; a third, the joiners and the epochs that let them in.
    A worker of this epoch that is not in the lists was dropped, while too few are left to begin another.
    """

    tag: str = "change"


@dataclass(slots=True)
class RunOver(Message):
    """To a process that wants to join: the run has ended, or nobody is left to join.

    To one that leaves: nobody begins an epoch without it, as too few would be left.
    """

    tag: str = "run over"


@dataclass(slots=True)
class Present(Message):
    """The roll call of an epoch: `seq` is the number of rounds that the sender has completed.

    Of a joiner that has no state yet it is `STATELESS`.
    """

    tag: str = "present"


@dataclass(slots=True)
class RoundResult(Message):
    """What came of round `seq`: the average, then who contributed, then who takes part from there on.

    `count` is the total weight.
    """

    tag: str = "round result"


@dataclass(slots=True)
class Dealt(Message):
    """To the first who contributed to round `seq`: where the sender is in the data, in words."""

    tag: str = "dealt"


@dataclass(slots=True)
class StateHead(Message):
    """To a joiner: the state as JSON, whose tensors follow; `seq` is how many."""

    tag: str = "state"


@dataclass(slots=True)
class StatePart(Message):
    """To a joiner: tensor number `seq` of the state."""

    tag: str = "state part"


TAGS = frozenset(
    kind().tag
    for kind in (
        *(Join, Settled, Suspects, Leaves, Finished, Change, RunOver),
        *(Present, RoundResult, Dealt, StateHead, StatePart),
    )
)
"""Messages that belong to no collective."""
