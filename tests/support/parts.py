"""Parts of an engine in virtual time, each built by hand: no Node, no Engine, no strategy."""

from dataclasses import dataclass, field

import torch

from shoal.core.codec import Identity
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.engine.channel import Channel
from shoal.engine.client import Client
from shoal.engine.coding import Coding
from shoal.engine.gradients import Gradients
from shoal.engine.group import Group
from shoal.engine.mailbox import Mailbox
from shoal.engine.one_sided import OneSided
from shoal.engine.progress import Progress
from shoal.engine.rounds import Rounds
from shoal.engine.variables import Variables
from shoal.sim import Kernel, Network
from shoal.sim.transport import Switch
from shoal.testing.problems import Slope


@dataclass
class Parts:
    """What most parts are made of, at one node."""

    me: NodeIdentity
    channel: Channel
    replica: object
    progress: Progress = field(init=False)

    def __post_init__(self):
        me, channel, replica = self.me, self.channel, self.replica
        self.progress = Progress(me.workers)
        self.variables = Variables()
        self.mailbox = Mailbox(channel, me, self.progress)
        self.coding = Coding(Identity(), channel, like=replica.x, rank=me.rank, workers=me.workers)
        self.one_sided = OneSided(replica, me, channel)
        self.group = Group(me, channel, self.mailbox, self.coding, self.variables, replica)
        self.gradients = Gradients(replica, me, channel, self.mailbox, self.progress)
        rng = torch.Generator().manual_seed(me.rank)
        self.rounds = Rounds(me, channel, self.mailbox, self.progress, replica, lambda: rng)
        self.client = Client(me, channel, self.mailbox, self.coding, self.progress, replica, self.one_sided)


def play(*bodies, servers=0, shards=1, latency=0.25, keeper=False):
    """Run one coroutine function for each node on its parts, the keeper last; what they return, by rank."""
    kernel, said = Kernel(), {}
    switch = Switch(kernel, Network(latency=latency), seed=0)
    workers = len(bodies) - servers * shards - keeper
    start = torch.zeros(2, dtype=torch.float64)

    async def life(rank):
        me = NodeIdentity(rank, workers, servers, shards, elastic=keeper)
        replica = Parameters(start.clone()) if me.is_server else Slope().replica(rank, start)
        parts = Parts(me, Channel(switch.ends[rank], me), replica)
        said[rank] = await bodies[rank](parts)
        await switch.ends[rank].close()

    for rank in range(len(bodies)):
        switch.add().process = kernel.spawn(life(rank), lambda rank=rank: f"node {rank} waits")
    for end in switch.ends:
        for other in switch.ends:
            end.acquaint(other)
    try:
        kernel.run()
    finally:
        kernel.close()
    return said


async def nothing(p):
    """A node that leaves at once."""


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)
