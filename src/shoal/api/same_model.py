"""What a worker that joins a script's run must have in common with it: strategy, codec, model, optimizer."""

from __future__ import annotations

from itertools import zip_longest

from torch import Tensor, nn

from shoal.core.codec import Codec
from shoal.core.errors import ShoalError
from shoal.launch.keeper_process import told_model
from shoal.replicas.attached import AttachedReplica
from shoal.transports.rendezvous import Store
from shoal.vocabulary.strategy import Strategy

NOTHING = "nothing more"


def describe(strategy: Strategy, codec: Codec, model: nn.Module, replica: AttachedReplica) -> list[str]:
    """One line for the strategy, the codec, each tensor of the model, and each option of the optimizers."""
    trained, groups = {id(p) for p in replica.parameters}, replica.groups
    parameters = (
        f"parameter {name} {_form(p)}, group {groups[id(p)]}"
        if id(p) in trained
        else f"frozen {name} {_form(p)}"
        for name, p in model.named_parameters()
    )
    buffers = (f"buffer {name} {_form(b)}" for name, b in model.named_buffers())
    return [f"strategy {strategy!r}", f"codec {codec!r}", *parameters, *buffers, *replica.options]


def check_same(store: Store, own: list[str]) -> None:
    """Raise ShoalError unless the run that this worker joins has told the same lines."""
    for theirs, mine in zip_longest(told_model(store), own, fillvalue=NOTHING):
        if theirs != mine:
            raise ShoalError(
                f"this would train something else than the run, which has {theirs} where this script has "
                f"{mine}; join with the same code"
            )


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
