"""Ledger: the answers a server gave to each client, so that a repeated request is acted on once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core.transport import Message
from shoal.engine.protocol import Ack, FencedOff, Pull, typed

WINDOW = 64
"""Answers remembered for each client, which never has more requests under way than that."""


@dataclass(slots=True)
class Account:
    """One incarnation of a client: its newest answers, and the number below which they were forgotten."""

    incarnation: int = 0
    forgotten: int = 0
    answers: dict[int, Message] = field(default_factory=dict)


_NONE = Account()
"""The account of a client that was never answered: to be read only."""


class Ledger:
    """Requests are told apart by client, incarnation and sequence number. A plain value: it can be saved."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}

    def answer_to(self, m: Message) -> Message | None:
        """None for a request that is new; else what to answer instead of doing it.

        A repeated request gets its first answer; one of an earlier incarnation is refused.
        """
        if self.has_fenced(m):
            return FencedOff(seq=m.seq)
        account = self._accounts.get(m.src, _NONE)
        if m.incarnation > account.incarnation or isinstance(m, Pull):  # a pull changes nothing
            return None
        if m.seq <= account.forgotten:  # nobody waits for it any more
            return Ack(seq=m.seq)
        return account.answers.get(m.seq)

    def has_fenced(self, m: Message) -> bool:
        """Whether `m` is of a former incarnation of its client."""
        return m.incarnation < self._accounts.get(m.src, _NONE).incarnation

    def has_gone_on(self, m: Message) -> bool:
        """Whether something that its client asked after `m` was answered already."""
        return m.seq < max(self._accounts.get(m.src, _NONE).answers, default=0)

    def is_successor(self, m: Message) -> bool:
        """Whether `m` is the first that is heard of a later incarnation of its client."""
        return m.incarnation > self._accounts.get(m.src, _NONE).incarnation

    def record(self, m: Message, answer: Message) -> None:
        """Remember how `m` was answered."""
        account = self._accounts.get(m.src)
        if account is None:
            account = self._accounts[m.src] = Account(m.incarnation)
        account.answers[m.seq] = answer
        while len(account.answers) > WINDOW:
            oldest = min(account.answers)
            account.forgotten = max(account.forgotten, oldest)
            del account.answers[oldest]

    def start_over(self) -> None:
        """All clients resume from a checkpoint, as first incarnations: only their pushes stay known."""
        for account in self._accounts.values():
            account.incarnation = 0
            account.answers = {seq: a for seq, a in account.answers.items() if isinstance(a, Ack)}

    def fence(self, rank: int, since: int = 0) -> None:
        """Take nothing more from this client until it comes back as a later incarnation, `since` or after."""
        account = self._accounts.get(rank, _NONE)
        self._accounts[rank] = Account(max(since, account.incarnation + 1))

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            str(rank): {
                "incarnation": account.incarnation,
                "forgotten": account.forgotten,
                "answers": [
                    [a.seq, a.tag, a.version, a.body.tolist() if a.parts else None]
                    for a in account.answers.values()
                ],
            }
            for rank, account in self._accounts.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._accounts = {
            int(rank): Account(
                saved["incarnation"],
                saved["forgotten"],
                {
                    seq: typed(
                        Message(tag, () if body is None else (torch.tensor(body),), seq=seq, version=version)
                    )
                    for seq, tag, version, body in saved["answers"]
                },
            )
            for rank, saved in state.items()
        }
