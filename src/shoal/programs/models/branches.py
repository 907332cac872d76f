"""Branches: a network with several inputs and one shared encoder, computed in several places at once.

Branches run on several devices of one process (`BranchModel`) or on several workers (`propagate`). Every
device or worker has a copy of the encoder's weights, and the gradients of all copies are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.core.transport import Message
from shoal.vocabulary.node import Node

CODE = "code"
"""Tag of messages with the code of an input, from the worker that encodes it."""

ERROR = "error"
"""Tag of messages with the gradient of the loss with respect to a code."""

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class BranchModel(nn.Module):
    """Encodes each input with one shared encoder and passes the concatenated codes to a head.

    Branch k is computed on `devices[k]`, the head on the device of the weights. A branch on another device
    copies the encoder's weights there in every step; back-propagation sums the gradients of the copies.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, devices: Sequence[str] = ("cpu", "cpu")) -> None:
        super().__init__()
        if not devices:
            raise ValueError("devices is empty; name one for each branch, such as ('cuda:0', 'cuda:1')")
        self.encoder = encoder
        self.head = head
        self.devices = tuple(torch.device(device) for device in devices)

    @property
    def home(self) -> torch.device:
        """The device of the weights, where branches are merged."""
        return next(self.parameters()).device

    def forward(self, *inputs: Tensor) -> Tensor:
        """One input for each branch, batch dimension first -> the output of the head."""
        if len(inputs) != len(self.devices):
            raise ValueError(f"{len(inputs)} inputs for {len(self.devices)} branches; pass one for each")
        return self.merge([self.encode(k, x) for k, x in enumerate(inputs)])  # devices compute in parallel

    def encode(self, branch: int, x: Tensor) -> Tensor:
        """The code of one input, computed on the device of its branch."""
        device = self.devices[branch]
        if device == self.home:
            return cast(Tensor, self.encoder(x.to(device)))
        weights = {**dict(self.encoder.named_parameters()), **dict(self.encoder.named_buffers())}
        copies = {name: weight.to(device) for name, weight in weights.items()}
        return cast(Tensor, functional_call(self.encoder, copies, (x.to(device),)))

    def merge(self, codes: Sequence[Tensor]) -> Tensor:
        """The output of the head for the codes of all branches."""
        return cast(Tensor, self.head(torch.cat([code.to(self.home) for code in codes], dim=-1)))


class StackedBranches(nn.Module):
    """The same with one input tensor, which has the inputs of all branches in its second dimension."""

    def __init__(self, encoder: nn.Module, head: nn.Module, branches: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        """(batch, branches, …) -> the output of the head."""
        return cast(Tensor, self.head(torch.cat([self.encoder(one) for one in x.unbind(1)], dim=-1)))


class LastState(nn.Module):
    """The last state of an LSTM that reads a sequence (Hochreiter & Schmidhuber 1997)."""

    def __init__(self, inputs: int = 256, states: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, states, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, inputs) -> (batch, states)."""
        _, (last, _) = self.lstm(x)
        return cast(Tensor, last[-1])


def pair(devices: Sequence[str] = ("cpu", "cpu")) -> BranchModel:
    """Two sequences with 256 features through one LSTM(64), merged into one score; 82,561 parameters."""
    return BranchModel(LastState(256, 64), nn.Linear(2 * 64, 1), devices)


async def propagate(
    w: Node, model: BranchModel, inputs: Sequence[Tensor], y: Tensor, loss: Loss
) -> float | None:
    """Back-propagation with branches on several workers; returns the loss at worker 0, which has the head.

    Worker k encodes inputs k, k + workers, and so on, and ignores the others; only worker 0 needs labels.
    Afterwards the gradients of the workers average to the gradient of the loss. Use the strategy `sync`,
    which takes that average in the next step; no other strategy is correct here.
    """
    if w.size > len(model.devices):
        raise ValueError(
            f"{w.size} workers for {len(model.devices)} branches; start at most one worker for each branch"
        )
    codes = {k: model.encode(k, inputs[k]) for k in range(w.rank, len(model.devices), w.size)}
    value = None
    if w.rank == 0:
        value, errors = await _merge(w, model, codes, y, loss)
    else:
        errors = await _hand_over(w, codes)
    # `sync` divides by the number of workers, but the gradients of the copies must be summed
    torch.autograd.backward(list(codes.values()), [w.size * errors[k] for k in codes])
    return value


async def _merge(
    w: Node, model: BranchModel, codes: dict[int, Tensor], y: Tensor, loss: Loss
) -> tuple[float, dict[int, Tensor]]:
    """The loss and its gradient for each code; sends the gradients of other workers' codes to them."""
    leaves = []
    for k in range(len(model.devices)):
        code = codes[k].detach() if k in codes else (await w.recv(CODE, k % w.size)).body.view(len(y), -1)
        leaves.append(code.requires_grad_())
    value = loss(model.merge(leaves), y.to(model.home))
    errors = torch.autograd.grad(
        value, leaves, retain_graph=True
    )  # before the head's: other workers wait for them
    for k, error in enumerate(errors):
        if k not in codes:
            await w.send(k % w.size, Message(ERROR, (error.flatten(),)))
    torch.autograd.backward(w.size * value)
    return value.item(), dict(enumerate(errors))


async def _hand_over(w: Node, codes: dict[int, Tensor]) -> dict[int, Tensor]:
    """Send the codes to worker 0 and wait for their gradients."""
    for code in codes.values():
        await w.send(0, Message(CODE, (code.detach().flatten().cpu(),)))
    return {k: (await w.recv(ERROR, 0)).body.view_as(code).to(code.device) for k, code in codes.items()}
