"""gRPC: lines break at any moment. What arrives is whole and in order; every notice has its place."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from grpc_nodes import WAYS, nodes, receive
from harness import drive, in_threads

from sampling import mostly_soak
from shoal.core.transport import JOINED, LEFT, LOST, Message

pytestmark = pytest.mark.usefixtures("grpc_core")

SIZE = 4
CALM_SECONDS = 2.5  # the longest pause between two attempts to join again, twice


class Talker:
    """A node that talks to all others, and takes down what it hears that cannot be."""

    def __init__(self, t: Any, seed: int) -> None:
        self.t = t
        self.rng = random.Random(f"{seed} {t.rank}")
        self.peers = [rank for rank in range(SIZE) if rank != t.rank]
        self.said = dict.fromkeys(self.peers, 0)
        self.heard = dict.fromkeys(self.peers, 0)
        self.here = set(self.peers)
        self.farewells: set[int] = set()
        self.faults: list[str] = []
        self.losses = 0

    def say(self, tag: str, peer: int, elements: int) -> None:
        self.said[peer] += 1
        x = torch.full((elements,), float(self.said[peer]))
        drive(self.t.send(peer, Message(tag, (x,), seq=self.said[peer])))
        x.fill_(-1.0)

    def hear(self, m: Message) -> None:
        if m.tag in (LOST, LEFT):
            self.expect(m.src in self.here, "was announced as gone twice", m)
            self.here.discard(m.src)
            self.losses += 1
        elif m.tag == JOINED:
            self.expect(m.src not in self.here, "joined although it was here", m)
            self.here.add(m.src)
        else:
            self.expect(m.src in self.here, "spoke although it was gone", m)
            self.expect(m.seq > self.heard[m.src], f"repeated itself after {self.heard[m.src]}", m)
            self.expect(bool((m.body == m.seq).all()), "was torn", m)
            self.heard[m.src] = m.seq
            if m.tag == "farewell":
                self.farewells.add(m.src)

    def expect(self, right: bool, what: str, m: Message) -> None:
        if not right:
            self.faults.append(f"at node {self.t.rank}, node {m.src} {what}: {m.tag} {m.seq}")

    def talk(self, until: float) -> list[str]:
        while time.monotonic() < until:
            self.say("talk", self.rng.choice(self.peers), self.rng.choice((0, 1, 1000, 200_000)))
            for m in self.t.drain():
                self.hear(m)
        time.sleep(CALM_SECONDS)
        for m in self.t.drain():
            self.hear(m)
        for peer in self.peers:
            self.say("farewell", peer, 1)
        while self.farewells < {*self.peers}:
            self.hear(receive(self.t))
        return self.faults


def break_lines(transports: list[Any], rng: random.Random, until: float) -> None:
    """Now from the one end, now from the other."""
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.05, 0.5))
        t = rng.choice(transports)
        if t._hub is not None:
            t._hub.lose(rng.choice([*t._hub._by_rank.values()]), "the cable was pulled")
        for client in t._clients.values():
            if client._calls is not None:
                client._calls.cut("the cable was pulled")


def storm(hubs: tuple[int, ...], seed: int, seconds: float, share: bool | None) -> None:
    with nodes(SIZE, hubs, share_memory=share) as (transports, _):
        talkers = [Talker(t, seed) for t in transports]
        until = time.monotonic() + seconds
        breaker = threading.Thread(target=break_lines, args=(transports, random.Random(seed), until - 0.5))
        breaker.start()
        faults = in_threads(SIZE, lambda rank: talkers[rank].talk(until), seconds + 60)
        breaker.join()
        assert [fault for some in faults for fault in some] == []
        assert sum(talker.losses for talker in talkers) > 0
        assert all(talker.here == {*talker.peers} for talker in talkers)


@pytest.mark.slow
@pytest.mark.parametrize("share", mostly_soak([*WAYS.values()], 1))
def test_lines_that_break_lose_and_repeat_nothing_out_of_turn(share: bool | None) -> None:
    storm((2, 0), seed=0, seconds=1.5, share=share)


@pytest.mark.soak
@pytest.mark.parametrize("share", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("hubs", [(0,), (3,), (1, 2), (2, 0)], ids=str)
def test_lines_that_break_for_longer(hubs: tuple[int, ...], seed: int, share: bool | None) -> None:
    storm(hubs, seed, seconds=10, share=share)
