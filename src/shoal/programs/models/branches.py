"""Branches: a network with several inputs, each of which goes through the same encoder at its own place.

The places are devices (`BranchModel`, in one process) or workers (`propagate`, a process each). Either way
each place has a copy of the encoder's weights, and the gradients of all copies are added up.
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
"""Tag of what an input has become at the worker that encodes it."""

ERROR = "error"
"""Tag of the gradient of the loss with respect to that."""

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class BranchModel(nn.Module):
    """Each input through one shared encoder; the codes side by side through a head.

    Branch k is computed on `devices[k]`, the head where the weights are. A branch that is elsewhere takes a
    copy of the encoder's weights along in every step; back-propagation adds up what the copies learn.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, devices: Sequence[str] = ("cpu", "cpu")) -> None:
        super().__init__()
        if not devices:
            raise ValueError("devices names none; take one for each branch, such as ('cuda:0', 'cuda:1')")
        self.encoder = encoder
        self.head = head
        self.devices = tuple(torch.device(device) for device in devices)

    @property
    def home(self) -> torch.device:
        """Where the weights are, and where branches are merged."""
        return next(self.parameters()).device

    def forward(self, *inputs: Tensor) -> Tensor:
        """One tensor for each branch, samples first -> what the head makes of their codes."""
        if len(inputs) != len(self.devices):
            raise ValueError(f"{len(inputs)} inputs for {len(self.devices)} branches; give one to each")
        return self.merge([self.encode(k, x) for k, x in enumerate(inputs)])  # devices compute at once

    def encode(self, branch: int, x: Tensor) -> Tensor:
        """The code of one input, on its branch's own device."""
        device = self.devices[branch]
        if device == self.home:
            return cast(Tensor, self.encoder(x.to(device)))
        weights = {**dict(self.encoder.named_parameters()), **dict(self.encoder.named_buffers())}
        copies = {name: weight.to(device) for name, weight in weights.items()}
        return cast(Tensor, functional_call(self.encoder, copies, (x.to(device),)))

    def merge(self, codes: Sequence[Tensor]) -> Tensor:
        """What the head makes of the codes of all branches."""
        return cast(Tensor, self.head(torch.cat([code.to(self.home) for code in codes], dim=-1)))


class LastState(nn.Module):
    """An LSTM that reads a sequence to its end (Hochreiter & Schmidhuber 1997): its last state."""

    def __init__(self, inputs: int = 256, states: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, states, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, inputs) -> (batch, states)."""
        _, (last, _) = self.lstm(x)
        return cast(Tensor, last[-1])


def pair(devices: Sequence[str] = ("cpu", "cpu")) -> BranchModel:
    """Two sequences of 256 numbers a step through one LSTM(64), merged into one score; 82,561 parameters."""
    return BranchModel(LastState(256, 64), nn.Linear(2 * 64, 1), devices)


async def propagate(
    w: Node, model: BranchModel, inputs: Sequence[Tensor], y: Tensor, loss: Loss
) -> float | None:
    """Back-propagation with the branches at several workers; returns the loss at worker 0, which merges.

    Worker k encodes inputs k, k + workers, and so on, and looks at no other; labels are worker 0's. Each is
    left with gradients whose average over the workers is the gradient of the loss: that average is what the
    strategy `sync` takes at the step that follows, and no other strategy will do.
    """
    if w.size > len(model.devices):
        raise ValueError(
            f"{w.size} workers for {len(model.devices)} branches; start at most one for each branch"
        )
    codes = {k: model.encode(k, inputs[k]) for k in range(w.rank, len(model.devices), w.size)}
    value = None
    if w.rank == 0:
        value, errors = await _merge(w, model, codes, y, loss)
    else:
        errors = await _hand_over(w, codes)
    # `sync` divides by the number of workers, but what the copies of a weight learn is to be added up
    torch.autograd.backward(list(codes.values()), [w.size * errors[k] for k in codes])
    return value


async def _merge(
    w: Node, model: BranchModel, codes: dict[int, Tensor], y: Tensor, loss: Loss
) -> tuple[float, dict[int, Tensor]]:
    """The loss, and its gradient with respect to each code, of which others get theirs; the head learns."""
    leaves = []
    for k in range(len(model.devices)):
        code = codes[k].detach() if k in codes else (await w.recv(CODE, k % w.size)).body.view(len(y), -1)
        leaves.append(code.requires_grad_())
    value = loss(model.merge(leaves), y.to(model.home))
    errors = torch.autograd.grad(value, leaves, retain_graph=True)  # before the head's: others wait for them
    for k, error in enumerate(errors):
        if k not in codes:
            await w.send(k % w.size, Message(ERROR, (error.flatten(),)))
    torch.autograd.backward(w.size * value)
    return value.item(), dict(enumerate(errors))


async def _hand_over(w: Node, codes: dict[int, Tensor]) -> dict[int, Tensor]:
    """Send the codes to worker 0, and wait for what it has to say about them."""
    for code in codes.values():
        await w.send(0, Message(CODE, (code.detach().flatten().cpu(),)))
    return {k: (await w.recv(ERROR, 0)).body.view_as(code).to(code.device) for k, code in codes.items()}
