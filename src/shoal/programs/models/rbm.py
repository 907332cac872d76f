"""The restricted Boltzmann machine: contrastive divergence (Hinton 2002), persistent too (Tieleman 2008).

E(v, h) = -c.v - b.h - h'Wv for binary v and h. Gaussian visible units instead have
E(v, h) = sum (v - c)^2 / (2 sigma^2) - b.h - h'W(v / sigma): the weights see v / sigma, not v / sigma^2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNITS = ("binary", "gaussian")
POSITIVE = ("probability", "sample")


class RBM(nn.Module):
    """W, both biases, and the Gibbs chain that learning needs.

    In training, `forward` returns the contrast of each row: its free energy minus the free energy of the
    sample at the end of the chain. The gradient of the mean contrast is -(statistics of the data - statistics
    of the model), so a task with that loss learns by contrastive divergence with any optimizer, strategy and
    codec (except `factors`, which needs nn.Linear). The value of the contrast means nothing by itself. In
    evaluation, `forward` returns the result of `measure`.

    The chain takes `steps` steps (k of CD-k) from the data. With `chains`, that many persistent chains are
    kept in a buffer and continue from step to step; workers do not share them. The positive statistic takes
    the "probability" or a "sample" of the hidden units. Draws come from torch's global random generator.
    """

    sigma: Tensor
    fantasies: Tensor

    def __init__(
        self,
        visible: int,
        hidden: int,
        *,
        units: str = "binary",
        sigma: float | Tensor = 1.0,
        steps: int = 1,
        chains: int = 0,
        positive: str = "probability",
        scale: float = 0.01,
    ) -> None:
        super().__init__()
        _check(visible, hidden, units, sigma, steps, chains, positive)
        if scale == 0 and positive == "probability":
            raise ValueError(
                "scale=0: hidden units that start equal stay equal; take 0.01, or positive='sample'"
            )
        self.units, self.steps, self.positive = units, steps, positive
        self.weight = nn.Parameter(scale * torch.randn(hidden, visible))  # W
        self.bias = nn.Parameter(torch.zeros(hidden))  # b
        self.visible_bias = nn.Parameter(torch.zeros(visible))  # c
        if units == "gaussian":
            self.register_buffer("sigma", torch.as_tensor(sigma, dtype=torch.float32).expand(visible).clone())
        self.persistent = chains > 0
        if self.persistent:
            begin = torch.randn(chains, visible) if units == "gaussian" else _bits(chains, visible)
            self.register_buffer("fantasies", begin)

    # -- the two layers --------------------------------------------------------------------------

    def hidden_input(self, v: Tensor) -> Tensor:
        """The input of the hidden units: Wv + b."""
        return F.linear(v if self.units == "binary" else v / self.sigma, self.weight, self.bias)

    def hidden(self, v: Tensor) -> Tensor:
        """P(h = 1 | v)."""
        return torch.sigmoid(self.hidden_input(v))

    def visible(self, h: Tensor) -> Tensor:
        """The mean of v given h: for binary units P(v = 1 | h)."""
        received = h @ self.weight
        if self.units == "binary":
            return torch.sigmoid(received + self.visible_bias)
        return self.visible_bias + self.sigma * received

    def draw_visible(self, h: Tensor) -> Tensor:
        """A sample of v given h."""
        mean = self.visible(h)
        return torch.bernoulli(mean) if self.units == "binary" else mean + self.sigma * torch.randn_like(mean)

    @torch.no_grad()
    def gibbs(self, v: Tensor, steps: int) -> Tensor:
        """Samples of the visible units after `steps` steps of the Gibbs chain."""
        for _ in range(steps):
            v = self.draw_visible(torch.bernoulli(self.hidden(v)))
        return v

    # -- energies --------------------------------------------------------------------------------

    def free_energy(self, v: Tensor) -> Tensor:
        """F(v) = -log sum_h exp(-E(v, h)) of each row."""
        return self._visible_energy(v) - F.softplus(self.hidden_input(v)).sum(dim=-1)

    def energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h) of each row."""
        return self._visible_energy(v) - (h * self.hidden_input(v)).sum(dim=-1)

    def _visible_energy(self, v: Tensor) -> Tensor:
        if self.units == "binary":
            return -(v @ self.visible_bias)
        return ((v - self.visible_bias) / self.sigma).square().sum(dim=-1) / 2

    # -- learning --------------------------------------------------------------------------------

    def forward(self, v: Tensor) -> Tensor:
        """The contrast of each row in training; the result of `measure` in evaluation."""
        if not self.training:
            return self.measure(v)
        received = self.hidden_input(v)
        h = torch.bernoulli(torch.sigmoid(received.detach()))  # the chain needs a sample, not a probability
        explained = h * received if self.positive == "sample" else F.softplus(received)
        energy = self._visible_energy(v) - explained.sum(dim=-1)
        if self.persistent:
            return energy - self.free_energy(self._dream_on()).mean()
        with torch.no_grad():
            dreamt = self.gibbs(self.draw_visible(h), self.steps - 1)
        return energy - self.free_energy(dreamt)

    def _dream_on(self) -> Tensor:
        """Advance the persistent chains and return their samples."""
        dreamt = self.gibbs(self.fantasies, self.steps)
        self.fantasies.copy_(dreamt)
        return dreamt

    @torch.no_grad()
    def measure(self, v: Tensor) -> Tensor:
        """For each row: reconstruction error, free energy and, for binary units, pseudo-log-likelihood.

        The error is the cross-entropy between the row and its mean after one step up and down without
        sampling; for Gaussian units, half the squared distance in units of sigma. All are in nats.
        Deterministic, and changes no state.
        """
        received = self.hidden_input(v)
        free = self._visible_energy(v) - F.softplus(received).sum(dim=-1)
        h = torch.sigmoid(received)
        if self.units == "gaussian":
            error = ((v - self.visible(h)) / self.sigma).square().sum(dim=-1) / 2
            return torch.stack([error, free], dim=-1)
        logits = h @ self.weight + self.visible_bias
        error = F.binary_cross_entropy_with_logits(logits, v, reduction="none").sum(dim=-1)
        return torch.stack([error, free, self._pseudo_likelihood(v)], dim=-1)

    def _pseudo_likelihood(self, v: Tensor) -> Tensor:
        """The number of units times log p(v_j | all others) of one unit j, the next unit for each row.

        Flipping one unit changes each hidden input by one weight, so no second matrix product is needed.
        """
        v = v.round()
        units = self.visible_bias.numel()
        rows = v.reshape(-1, units)
        j = torch.arange(len(v), device=v.device) % units
        j = j.repeat_interleave(len(rows) // max(1, len(v)))  # rows of a pair flip the same unit
        change = (1 - 2 * rows.gather(1, j[:, None]))[:, 0]  # added to v_j
        received = self.hidden_input(rows)
        flipped = received + change[:, None] * self.weight.t()[j]
        gain = change * self.visible_bias[j] + (F.softplus(flipped) - F.softplus(received)).sum(dim=1)
        return units * F.logsigmoid(-gain).reshape(v.shape[:-1])  # gain = F(v) - F(v flipped)


def _bits(*shape: int) -> Tensor:
    return torch.bernoulli(torch.full(shape, 0.5))


def _check(
    visible: int, hidden: int, units: str, sigma: float | Tensor, steps: int, chains: int, positive: str
) -> None:
    if visible < 1 or hidden < 1:
        raise ValueError(f"visible={visible}, hidden={hidden}: an RBM needs at least 1 unit of each")
    if units not in UNITS:
        raise ValueError(f"units={units!r}: visible units are one of {', '.join(UNITS)}")
    if positive not in POSITIVE:
        raise ValueError(f"positive={positive!r}: the positive statistic is one of {', '.join(POSITIVE)}")
    if units == "binary" and not (torch.as_tensor(sigma) == 1).all():
        raise ValueError("sigma is for Gaussian visible units; take units='gaussian', or leave sigma out")
    if not (torch.as_tensor(sigma) > 0).all():
        raise ValueError(f"sigma={sigma}: a standard deviation must be positive")
    if steps < 1:
        raise ValueError(f"steps={steps}: the chain needs at least 1 step")
    if chains < 0:
        raise ValueError(
            f"chains={chains}: take 0 to start chains at the data, or the number of persistent ones"
        )
