"""What a worker that joins a script's run must have in common with it: strategy, codec and model."""

from __future__ import annotations

from itertools import zip_longest

from torch import nn

from shoal.core.codec import Codec
from shoal.core.errors import ShoalError
from shoal.launch.keeper_process import told_model
from shoal.replicas.attached import AttachedReplica
from shoal.transports.rendezvous import Store
from shoal.vocabulary.strategy import Strategy

NOTHING = "nothing more"


def describe(strategy: Strategy, codec: Codec, model: nn.Module, replica: AttachedReplica) -> list[str]:
    """One line for the strategy, one for the codec, and one for each tensor of the model."""
    trained = {id(p) for p in replica.parameters}
    parameters = (
        f"{'parameter' if id(p) in trained else 'frozen'} {name} {tuple(p.shape)} {p.dtype}"
        for name, p in model.named_parameters()
    )
    buffers = (f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers())
    return [f"strategy {strategy!r}", f"codec {codec!r}", *parameters, *buffers]


def check_same(store: Store, own: list[str]) -> None:
    """Raise ShoalError unless the run that this worker joins has told the same lines."""
    for theirs, mine in zip_longest(told_model(store), own, fillvalue=NOTHING):
        if theirs != mine:
            raise ShoalError(
                f"this is another model than the run's, which has {theirs} where this script has {mine}; "
                "join with the same code"
            )
