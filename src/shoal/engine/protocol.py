"""The messages that nodes exchange below an algorithm: one type for each, with what it carries.

A request is repeated until it is answered; a server acts on it once, whatever the network repeats:

    Push   ->  Ack (version) | Late | Refused (reason)  acted on once, by client, incarnation and seq
    Pull   ->  Reply (state, version)                   answered by the algorithm, at once or later
    News   ->  Reply (parts of the state, version)      what changed since `version`; as a Pull otherwise
    Look   ->  Reply (state, version)                   answered at once, whatever the algorithm does
    Where  ->  Numbers (clock, batches, tensors)        how far a worker is that was started again
    More   ->  Grant (owner, place, clock) | Over       a batch of a worker that died; held until there is one
    Idle   ->  Ack                                      to the servers that keep no pool; so is Busy
    Instruction  ->  Numbers                            acted on once, as the algorithm says
    any    ->  FencedOff                                to a client that the servers gave up on

A type adds nothing to a Message but its meaning, so that a message that arrives takes its type in place.
Tags that are not listed here belong to strategies and collectives, each to the file that sends them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from shoal.core.transport import JOINED, LEFT, LOST, Message

Handlers: TypeAlias = Mapping[str, Callable[[Message], Awaitable[None]]]
"""Who deals with a message, by tag. A handler may send, and change what the gradient does not depend on."""


class Request:
    """A message that is repeated until it is answered."""

    __slots__ = ()


class Answer:
    """A message that ends a request; `seq` is the request's number."""

    __slots__ = ()


class Notice:
    """A message that only a transport delivers: about a peer, from that peer's rank."""

    __slots__ = ()


# -- requests of a client ------------------------------------------------------------------------------


@dataclass(slots=True)
class Push(Request, Message):
    """A difference: encoded parts, the samples and the rate behind it, the version it was made from."""

    tag: str = "push"

    @property
    def body(self) -> Tensor:
        """The difference, decoded."""
        return self.parts[0]

    @property
    def numbers(self) -> Tensor | None:
        """The numbers of the sender's optimizer, where it sent them."""
        return self.parts[1] if len(self.parts) > 1 else None


@dataclass(slots=True)
class PushWithNumbers(Push):
    """A push whose last part has the numbers of the sender's optimizer, which its rate does not tell."""

    tag: str = "push+"


@dataclass(slots=True)
class Pull(Request, Message):
    """A request for the state. `count` is 1 if the client waits for it, so that it may be read in place."""

    tag: str = "pull"


@dataclass(slots=True)
class News(Pull):
    """A request for what has changed since the version that the client has. `count` is 1 if it is urgent."""

    tag: str = "news"


@dataclass(slots=True)
class Look(Request, Message):
    """A request for the newest state, to look at: the algorithm is not told of it.

    With `count` a request for that one of the tensors that are not trained, from 1.
    """

    tag: str = "look"


@dataclass(slots=True)
class Where(Request, Message):
    """A worker of a user's own loop that was started again asks where its predecessor was."""

    tag: str = "where"


@dataclass(slots=True)
class More(Request, Message):
    """A worker that has done all its batches asks for one of a worker that died."""

    tag: str = "more"


@dataclass(slots=True)
class Idle(Request, Message):
    """A worker tells the servers without a pool that it asked for more."""

    tag: str = "idle"


@dataclass(slots=True)
class Busy(Request, Message):
    """A worker tells the servers without a pool that it got more."""

    tag: str = "busy"


@dataclass(slots=True)
class Instruction(Request, Message):
    """Something small that the algorithm has a server do, in words of its own."""

    tag: str = "instruction"


# -- answers of a server -------------------------------------------------------------------------------


@dataclass(slots=True)
class Ack(Answer, Message):
    """A push is in the server's state, whose version is `version` since then."""

    tag: str = "ack"


@dataclass(slots=True)
class Late(Ack):
    """The algorithm leaves a push out: it came too late."""

    tag: str = "ack-"


@dataclass(slots=True)
class Refused(Answer, Message):
    """A push was not applied; the part is the reason as UTF-8."""

    tag: str = "refused"


@dataclass(slots=True)
class FencedOff(Answer, Message):
    """The servers gave up on this client: others do its work."""

    tag: str = "fenced"


@dataclass(slots=True)
class Reply(Answer, Message):
    """The state that was pulled, and its version."""

    tag: str = "reply"


@dataclass(slots=True)
class Grant(Answer, Message):
    """A batch to do: owner of the share, place in it, and the clock at which to do it."""

    tag: str = "work"


@dataclass(slots=True)
class Over(Answer, Message):
    """Every batch is in the model."""

    tag: str = "over"


@dataclass(slots=True)
class Numbers(Answer, Message):
    """What came of an instruction, or where a worker was."""

    tag: str = "numbers"


@dataclass(slots=True)
class Wait(Message):
    """To a client that asks for more again: nothing is free yet, but the server is alive."""

    tag: str = "wait"


# -- what a worker reports to a server -----------------------------------------------------------------


@dataclass(slots=True)
class Report(Message):
    """`count` more samples of this worker are in the model, though it pushed nothing here."""

    tag: str = "noted"


@dataclass(slots=True)
class BatchesRead(Message):
    """Of a user's own loop that takes several for a step: `seq` are behind what this worker pushes next.

    Among peers, they are behind its first `count` steps.
    """

    tag: str = "batches"


@dataclass(slots=True)
class Checkpointed(Message):
    """A worker saved its state before the step numbered in `seq`."""

    tag: str = "checkpoint"


@dataclass(slots=True)
class ResumesFrom(Message):
    """To worker 0: `seq` is the newest step whose checkpoint the sender can read.

    Back from it: `seq` is the lowest of all, and `count` is 1 if all nodes have named that one.
    """

    tag: str = "resumes"


# -- what a server's algorithm hears besides pushes and pulls ------------------------------------------


@dataclass(slots=True)
class Fewer(Message):
    """Fewer workers contribute than before: see `Node.active`."""

    tag: str = "fewer"


@dataclass(slots=True)
class RolledBack(Message):
    """This server restarted from a snapshot; the updates since then are lost."""

    tag: str = "rolled_back"


# -- notices of a transport ----------------------------------------------------------------------------


@dataclass(slots=True)
class Left(Notice, Message):
    """A peer closed its transport in order."""

    tag: str = LEFT


@dataclass(slots=True)
class Lost(Notice, Message):
    """A peer vanished; `incarnation` is the one that did."""

    tag: str = LOST


@dataclass(slots=True)
class Joined(Notice, Message):
    """A lost peer is back, as `incarnation`. Messages under way to it are lost."""

    tag: str = JOINED


# -- between workers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Round(Message):
    """What a worker gives another in the round numbered in `seq`."""

    tag: str = "round"


@dataclass(slots=True)
class Back(Message):
    """A worker that was started again asks where things stand; `count` is 1 if it asks for the model."""

    tag: str = "back"


@dataclass(slots=True)
class Known(Message):
    """To one that is back: where the sender stands, batches done, first taken over, step, batches read."""

    tag: str = "known"


@dataclass(slots=True)
class Ready(Message):
    """One that was back takes part from the round in `seq` on."""

    tag: str = "ready"


@dataclass(slots=True)
class HelpOffer(Message):
    """A worker that has done its own share offers to do batches of another's."""

    tag: str = "help"


@dataclass(slots=True)
class HelpAnswer(Message):
    """Owner of the share, first place, the place after the last; empty if there is nothing to give."""

    tag: str = "helped"


@dataclass(slots=True)
class Attends(Message):
    """Before average number `seq`: `count` is 1 if this worker's data has ended."""

    tag: str = "comes"


@dataclass(slots=True)
class Contribution(Message):
    """What a worker brings to a merge of all workers' parts; `count` is its weight."""

    tag: str = "contribution"


@dataclass(slots=True)
class DataEnded(Message):
    """After the last average: the sender took `clock` gradients in all."""

    tag: str = "ended"


@dataclass(slots=True)
class Solution(Message):
    """The solution of a worker that had data to the end."""

    tag: str = "solution"


@dataclass(slots=True)
class PartialSum(Message):
    """Towards the root of the tree that forms the final mean: a sum, and how many it is of."""

    tag: str = "total"


@dataclass(slots=True)
class FinalMean(Message):
    """Back from the root of that tree."""

    tag: str = "average"


@dataclass(slots=True)
class Speed(Message):
    """`count` samples per second of computing, for load balancing."""

    tag: str = "speed"


_KINDS: dict[str, type[Message]] = {
    kind().tag: kind
    for kind in (
        *(Push, PushWithNumbers, Pull, News, Look, Where, More, Idle, Busy, Instruction),
        *(Ack, Late, Refused, FencedOff, Reply, Grant, Over, Numbers, Wait),
        *(Report, BatchesRead, Checkpointed),
        *(Fewer, RolledBack, Left, Lost, Joined),
    )
}


def typed(m: Message) -> Message:
    """The message itself, as the type that its tag says; one that belongs to an algorithm stays a Message."""
    kind = _KINDS.get(m.tag)
    if kind is not None and kind is not type(m):
        m.__class__ = kind
    return m
