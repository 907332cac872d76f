"""AnyNode: the verbs that workers and servers have alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.core.identity import SERVER
from shoal.core.transport import Message
from shoal.core.vector import Piece, fragments
from shoal.engine.engine import Engine


class AnyNode:
    """A node's parameters, what its algorithm remembers, and messages to any other node."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # for launchers and observers; an algorithm needs the verbs alone
        self.rank = engine.identity.rank

    @property
    def size(self) -> int:
        """Workers in the run. Where they come and go, those of the last mean, until the next step begins."""
        members = self.engine.membership
        return self.engine.identity.workers if members is None else members.size

    @property
    def x(self) -> Tensor:
        """The parameters: a flat view on the model, changed in place only."""
        return self.engine.replica.x

    @x.setter
    def x(self, value: Tensor) -> None:
        if value is not self.engine.replica.x:  # `w.x -= v` has changed it in place already
            self.engine.replica.x.copy_(value)

    @property
    def rng(self) -> torch.Generator:
        """This node's random stream. It is checkpointed."""
        return self.engine.rng

    @property
    def lossy(self) -> bool:
        """Whether the codec loses anything."""
        return not self.engine.coding.codec.exact

    def keep(self, name: str, start: Tensor, shared: bool = False, mutual: bool = False) -> Tensor:
        """A variable of the algorithm that is checkpointed: a copy of `start`, or what was restored.

        Change it in place; the node holds on to the same tensor. Say `shared` if it is equal at all workers
        between two averages, or a server's memory: workers that join the run later then take it over. Say
        `mutual` if it must fit with what other workers keep: it starts afresh when their number changes.
        A server's memory is a vector of the length of its `x`, or no vector at all, but a number or a matrix.
        """
        return self.engine.variables.keep(name, start, shared, mutual)

    @property
    def pieces(self) -> list[Piece]:
        """The parameters, or parts of them, that `x` consists of; one piece where layers are not known."""
        coding, elements = self.engine.coding, self.x.numel()
        if coding.layout is None:
            return [Piece("x", self.x.shape, 0, elements, whole=True)]
        return coding.layout.pieces(coding.begins, coding.begins + elements)

    def fragments(self, number: int) -> list[list[slice]]:
        """`x` in so many parts, each a list of slices: whole layers where there are enough of them."""
        return fragments(self.x.numel(), number, self.engine.layout)

    async def send(self, dst: int, m: Message) -> None:
        """Send a message exactly. Does not wait for `dst`; tensors may be changed afterwards."""
        m.clock = m.clock or self.engine.rounds.place
        await self.engine.channel.send(self.engine.identity.rank_of(dst), m)

    async def recv(self, tag: str, src: int | None = None) -> Message:
        """The next message with that tag (from `src`); waits for it. Raises PeerLost if `src` goes first."""
        return await self.engine.mailbox.find(tag, self.size if src == SERVER else src)

    async def wait(self, seconds: float, tag: str) -> bool:
        """Let so many seconds pass, unless a message with that tag comes; whether one came. Takes it."""
        channel, came = self.engine.channel, []

        async def note(m: Message) -> None:
            came.append(m)

        until = channel.waited + seconds
        while not came and (left := until - channel.waited) > 0:
            await self.engine.mailbox.attend({tag: note}, left)
        return bool(came)

    def poll(self, tag: str) -> Iterator[Message]:
        """The messages with that tag that have arrived; never waits."""
        return self.engine.mailbox.poll(tag)

    def encode(self, key: str, v: Tensor, times: int = 1, feedback: bool = True) -> tuple[Tensor, ...]:
        """A difference as the codec writes it, to be sent `times` times in a message of your own.

        `key` names the stream; without `feedback` you add the compression error to the next one yourself.
        """
        return self.engine.coding.encode(key, v, 0, feeds=feedback, times=times)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The difference in a message that `encode` was used for."""
        return self.engine.coding.decode(parts, self.x.numel(), 0)
