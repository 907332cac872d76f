"""The deep belief network: RBMs on top of one another (Hinton, Osindero & Teh 2006)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.programs.models.rbm import RBM

CHUNK = 10_000  # rows that go up at once


class BeliefNet(nn.Module):
    """A stack of RBMs; the hidden units of one are the visible ones of the next.

    Every RBM has a visible bias of its own; `share` gives a copy of it to the one below.
    """

    def __init__(self, layers: Sequence[RBM]) -> None:
        super().__init__()
        for below, above in pairwise(layers):
            hidden, visible = below.bias.numel(), above.visible_bias.numel()
            if hidden != visible:
                raise ValueError(f"an RBM with {visible} visible units cannot stand on {hidden} hidden ones")
        self.layers = nn.ModuleList(layers)

    @property
    def sizes(self) -> list[int]:
        """Units of each layer, the visible one first."""
        rbms = self._rbms()
        return [rbms[0].visible_bias.numel(), *(rbm.bias.numel() for rbm in rbms)] if rbms else []

    def forward(self, x: Tensor) -> Tensor:
        """The means of the top layer: mu_l = sigm(b_l + W_l mu_(l-1)), from mu_0 = x upwards."""
        for rbm in self._rbms():
            x = rbm.hidden(x)
        return x

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """The same for many rows, without gradient and some thousand at a time."""
        return torch.cat([self(part) for part in torch.split(x, CHUNK)]) if len(x) else self(x)

    @torch.no_grad()
    def dream(self, x: Tensor, steps: int) -> Tensor:
        """What the net sees after so many steps of the chain at its top, begun where the rows x lead.

        The two top layers are sampled; from there means go down, which makes the better pictures.
        """
        *lower, top = self._rbms()
        if not lower and steps:  # of the last step its mean, not a sample
            return top.visible(torch.bernoulli(top.hidden(top.gibbs(x, steps - 1))))
        for rbm in lower:
            x = rbm.hidden(x)
        x = top.gibbs(x, steps)
        for rbm in reversed(lower):
            x = rbm.visible(x)
        return x

    @torch.no_grad()
    def share(self, level: int) -> None:
        """Give the visible bias of an RBM to the one below as its hidden bias: b_(l-1) is c_l."""
        rbms = self._rbms()
        rbms[level - 1].bias.copy_(rbms[level].visible_bias)

    def weights(self) -> dict[str, Tensor]:
        """W and b of each layer, by the names they have in the unrolled net."""
        named: dict[str, Tensor] = {}
        for number, rbm in enumerate(self._rbms(), start=1):
            if rbm.units == "gaussian" and bool((rbm.sigma != 1).any()):
                raise ValueError(
                    "a net with sigma other than 1 is not unrolled; standardise the data instead"
                )
            named |= {f"layer{number}.weight": rbm.weight.detach(), f"layer{number}.bias": rbm.bias.detach()}
        return named

    def unroll(self, classes: int, dropout: float = 0.0, input_dropout: float = 0.0) -> nn.Sequential:
        """The net as a perceptron: its layers are copies of these, the output layer is drawn anew."""
        net = perceptron([*self.sizes, classes], dropout, input_dropout)
        net.load_state_dict(self.weights(), strict=False)
        return net

    def _rbms(self) -> list[RBM]:
        return [layer for layer in self.layers if isinstance(layer, RBM)]


def perceptron(sizes: Sequence[int], dropout: float = 0.0, input_dropout: float = 0.0) -> nn.Sequential:
    """Layers of sigmoid units and a linear output: f(x) = V mu_L(x), for a softmax to follow."""
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
