"""Imported last by the fork server: its children then share its memory and end without tidying it up.

They also find every strategy imported, the options of all that has a word read from its source, and done
once what every node does first: what Python and torch keep of that is then shared, not made by each.

A collection of garbage writes to every object that it visits, and at its end a process takes back one by one
the hundreds of operators that torch has registered. Both copy most of what was shared until then.
"""

import gc
import hmac
import weakref

import torch
from torch.nn import functional as F

from power_cuts import expect_no_power_cut
from shoal.codecs import CODECS
from shoal.core import transport
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES
from shoal.testing import Slope, blobs, simulate
from shoal.transports.gloo import GlooTransport
from shoal.transports.grpc import GrpcTransport
from shoal.transports.sockets import SocketTransport


def rehearse() -> None:
    """Do what a node does, except back-propagation: torch refuses that to whoever is forked later."""
    task = blobs()
    data = task.data()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = task.model()
        F.cross_entropy(model(data.x), data.y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        simulate(STRATEGIES.make("sync"), Slope(), workers=2, steps=2)
    hmac.digest(b"key", b"message", "sha256")
    for kind in (SocketTransport, GlooTransport, GrpcTransport):
        issubclass(kind, transport.AllReduces)


for catalogue in (STRATEGIES, CODECS, TASKS):
    for word in catalogue:
        catalogue.check(word)
for word in STRATEGIES:
    assert STRATEGIES[word]
torch.set_num_threads(1)  # as in the tests themselves: threads wait for each other on busy cores
expect_no_power_cut()
rehearse()
gc.collect()
gc.freeze()
gc.set_threshold(20_000, 10, 10)  # as in the tests themselves
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
