"""The deep belief network: a stack of RBMs (Hinton, Osindero & Teh 2006)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.programs.models.rbm import RBM

CHUNK = 10_000  # rows computed at once


class BeliefNet(nn.Module):
    """A stack of RBMs; the hidden units of each are the visible units of the next.

    Every RBM has its own visible bias; `share` copies it to the RBM below.
    """

    def __init__(self, layers: Sequence[RBM]) -> None:
        super().__init__()
        for below, above in pairwise(layers):
            hidden, visible = below.bias.numel(), above.visible_bias.numel()
            if hidden != visible:
                raise ValueError(f"an RBM with {visible} visible units cannot stand on {hidden} hidden units")
        self.layers = nn.ModuleList(layers)

    @property
    def sizes(self) -> list[int]:
        """The number of units in each layer, visible layer first."""
        rbms = self._rbms()
        return [rbms[0].visible_bias.numel(), *(rbm.bias.numel() for rbm in rbms)] if rbms else []

    def forward(self, x: Tensor) -> Tensor:
        """The means of the top layer: mu_l = sigm(b_l + W_l mu_(l-1)), from mu_0 = x upwards."""
        for rbm in self._rbms():
            x = rbm.hidden(x)
        return x

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """The same for many rows, without gradients and CHUNK rows at a time."""
        return torch.cat([self(part) for part in torch.split(x, CHUNK)]) if len(x) else self(x)

    @torch.no_grad()
    def dream(self, x: Tensor, steps: int) -> Tensor:
        """Visible means after `steps` of Gibbs sampling in the top RBM, started from the rows `x`.

        The two top layers are sampled; the layers below take means, which gives clearer pictures.
        """
        *lower, top = self._rbms()
        if not lower and steps:  # the last step gives its mean, not a sample
            return top.visible(torch.bernoulli(top.hidden(top.gibbs(x, steps - 1))))
        for rbm in lower:
            x = rbm.hidden(x)
        x = top.gibbs(x, steps)
        for rbm in reversed(lower):
            x = rbm.visible(x)
        return x

    @torch.no_grad()
    def share(self, level: int) -> None:
        """Copy the visible bias of an RBM to the hidden bias of the one below: b_(l-1) = c_l."""
        rbms = self._rbms()
        rbms[level - 1].bias.copy_(rbms[level].visible_bias)

    def weights(self) -> dict[str, Tensor]:
        """W and b of each layer, by their names in the unrolled network."""
        named: dict[str, Tensor] = {}
        for number, rbm in enumerate(self._rbms(), start=1):
            if rbm.units == "gaussian" and bool((rbm.sigma != 1).any()):
                raise ValueError(
                    "a network with sigma other than 1 cannot be unrolled; standardise the data instead"
                )
            named |= {f"layer{number}.weight": rbm.weight.detach(), f"layer{number}.bias": rbm.bias.detach()}
        return named

    def unroll(self, classes: int, dropout: float = 0.0, input_dropout: float = 0.0) -> nn.Sequential:
        """A perceptron whose hidden layers are copies of these; its output layer is freshly initialised."""
        net = perceptron([*self.sizes, classes], dropout, input_dropout)
        net.load_state_dict(self.weights(), strict=False)
        return net

    def _rbms(self) -> list[RBM]:
        return [layer for layer in self.layers if isinstance(layer, RBM)]


def perceptron(sizes: Sequence[int], dropout: float = 0.0, input_dropout: float = 0.0) -> nn.Sequential:
    """Sigmoid layers and a linear output: f(x) = V mu_L(x), the input of a softmax."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if input_dropout:
        parts["dropout0"] = nn.Dropout(input_dropout)
    for number, (below, above) in enumerate(pairwise(sizes[:-1]), start=1):
        parts[f"layer{number}"] = nn.Linear(below, above)
        parts[f"sigmoid{number}"] = nn.Sigmoid()
        if dropout:
            parts[f"dropout{number}"] = nn.Dropout(dropout)
    parts["output"] = nn.Linear(sizes[-2], sizes[-1])
    return nn.Sequential(parts)
