"""The simulator keeps every promise that real transports keep."""

import pytest
import torch

from shoal.core.transport import Message
from shoal.sim import Kernel, Network
from shoal.sim.transport import Switch
from shoal.testing.conformance import CHECKS

NETWORKS = {
    "ideal": Network(),
    "slow": Network.parse("1Gbit,1ms"),
    "lossy": Network.parse("1Gbit,1ms,5%"),
}


def world_on(network):
    def world(size, body):
        kernel = Kernel()
        switch = Switch(kernel, network, seed=0)
        ends = [switch.add() for _ in range(size)]
        returned = [None] * size

        async def life(rank):
            returned[rank] = await body(ends[rank])

        for rank, end in enumerate(ends):
            end.process = kernel.spawn(life(rank), lambda rank=rank: f"node {rank} waits")
        try:
            kernel.run()
        finally:
            kernel.close()
        return returned

    return world


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.whole
def test_the_simulator_conforms(check, network):
    check(world_on(NETWORKS[network]))


@pytest.mark.parametrize("is_settled", [True, False])
def test_what_is_settled_travels_without_a_copy(is_settled):
    v = torch.zeros(3)

    async def body(end):
        if end.rank == 0:
            await end.send(1, Message("v", (v,), is_settled=is_settled))
            return v.fill_(1.0)
        return (await end.recv()).body

    sent, received = world_on(Network.parse("1Gbit,1ms"))(2, body)
    assert (received is sent) == is_settled
    assert received.tolist() == ([1.0] * 3 if is_settled else [0.0] * 3)


def test_a_fault_for_nobody_is_refused():
    from shoal import Faults, Sync
    from shoal.testing import Slope, simulate

    with pytest.raises(ValueError, match="there is no worker 2 with a step 5"):
        simulate(Sync(), Slope(), workers=2, faults=Faults().crash(rank=2, step=5))
