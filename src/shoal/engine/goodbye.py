"""Goodbye: how a worker leaves a run that goes on without it."""

from __future__ import annotations

from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import Leaves, RunOver
from shoal.engine.mailbox import Mailbox
from shoal.engine.membership import Membership
from shoal.engine.membership_errors import Demoted, RunIsOver


class Goodbye:
    """One worker's departure, between two steps. What it has not handed over is dealt to the others."""

    def __init__(
        self, identity: NodeIdentity, channel: Channel, mailbox: Mailbox, membership: Membership
    ) -> None:
        self._keeper = identity.keeper
        self._others = [rank for rank in range(identity.workers) if rank != identity.rank]
        self._channel = channel
        self._mailbox = mailbox
        self._membership = membership

    async def say(self) -> bool:
        """Return when there is an epoch without this worker.

        False if there is none, as too few would be left: then the others must see this worker vanish, for
        one that closes its transport in order has come to the end.
        """
        self._membership.handlers[RunOver().tag] = self._note_refusal
        try:
            await self._await_epoch()
        except Demoted:
            return True
        except (RunIsOver, PeerLost):
            return False
        finally:
            self._membership.is_joining = True
        return True

    async def _await_epoch(self) -> None:
        """Tell everybody, in each epoch anew, until one begins without this worker or the run ends."""
        told, members = None, self._membership
        while not self._mailbox.has_left(self._keeper):
            if told == members.epoch:
                await members.wait("change")
                continue
            told = members.epoch
            for rank in self._others:  # also those who have joined since this worker last heard
                await self._channel.tell(rank, Leaves(version=told))
            await members.reports.tell(Leaves(version=told))

    async def _note_refusal(self, m: Message) -> None:
        raise RunIsOver
