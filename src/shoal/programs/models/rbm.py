"""The restricted Boltzmann machine: contrastive divergence (Hinton 2002), also persistent (Tieleman 2008).

E(v, h) = -c.v - b.h - h'Wv, with v and h of zeros and ones. Gaussian visible units instead have
E(v, h) = sum (v - c)^2 / (2 sigma^2) - b.h - h'W(v / sigma): the weights see v / sigma, not v / sigma^2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNITS = ("binary", "gaussian")
POSITIVE = ("probability", "sample")


class RBM(nn.Module):
    """W and both biases, and the chain of samples that learning needs.

    In training, `forward` gives each row its contrast: its free energy minus that of what the chain dreams.
    The gradient of its mean is -(statistics of the data - statistics of the model), so that a task whose loss
    is that mean learns by contrastive divergence with any optimizer, strategy and codec (but for `factors`,
    which is about layers of nn.Linear). The value itself is no measure of anything. In evaluation, `forward`
    gives what the monitors are made of: see `measure`.

    `steps` of the chain are taken (k of CD-k). It begins at the data; with `chains` it is persistent: so many
    are kept as a buffer, go on where they were, and are shared with nobody. The positive statistic takes
    `positive` = "probability" or "sample" of the hidden units. Draws come from torch's global generator.
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
                "scale=0: hidden units that begin alike stay alike; take 0.01, or positive='sample'"
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
        """What the hidden units receive: Wv + b."""
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
        """The visible units so many steps of the chain later, all of them sampled."""
        for _ in range(steps):
            v = self.draw_visible(torch.bernoulli(self.hidden(v)))
        return v

    # -- energies --------------------------------------------------------------------------------

    def free_energy(self, v: Tensor) -> Tensor:
        """F(v) = -log sum_h exp(-E(v, h)), for each row."""
        return self._visible_energy(v) - F.softplus(self.hidden_input(v)).sum(dim=-1)

    def energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h), for each row."""
        return self._visible_energy(v) - (h * self.hidden_input(v)).sum(dim=-1)

    def _visible_energy(self, v: Tensor) -> Tensor:
        if self.units == "binary":
            return -(v @ self.visible_bias)
        return ((v - self.visible_bias) / self.sigma).square().sum(dim=-1) / 2

    # -- learning --------------------------------------------------------------------------------

    def forward(self, v: Tensor) -> Tensor:
        """The contrast of each row in training; else what `measure` says."""
        if not self.training:
            return self.measure(v)
        received = self.hidden_input(v)
        h = torch.bernoulli(torch.sigmoid(received.detach()))  # a sample must drive the chain
        explained = h * received if self.positive == "sample" else F.softplus(received)
        energy = self._visible_energy(v) - explained.sum(dim=-1)
        if self.persistent:
            return energy - self.free_energy(self._dream_on()).mean()
        with torch.no_grad():
            dreamt = self.gibbs(self.draw_visible(h), self.steps - 1)
        return energy - self.free_energy(dreamt)

    def _dream_on(self) -> Tensor:
        """The persistent chains so many steps later; from now on they are there."""
        dreamt = self.gibbs(self.fantasies, self.steps)
        self.fantasies.copy_(dreamt)
        return dreamt

    @torch.no_grad()
    def measure(self, v: Tensor) -> Tensor:
        """Of each row: reconstruction error, free energy and, of binary units, pseudo-log-likelihood.

        The error is the cross-entropy of the row and its mean after one step up and down without a draw; of
        Gaussian units half the squared distance in units of sigma. All in nats. Changes and draws nothing.
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
        """The number of units times log p(v_j | all others), one unit j a row, each row the next one.

        To flip one unit changes what each hidden unit receives by one weight, so no second product is needed.
        """
        v = v.round()
        units = self.visible_bias.numel()
        rows = v.reshape(-1, units)
        j = torch.arange(len(v), device=v.device) % units
        j = j.repeat_interleave(len(rows) // max(1, len(v)))  # what stands beside each other flips the same
        change = (1 - 2 * rows.gather(1, j[:, None]))[:, 0]  # what is added to v_j
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
        raise ValueError(f"an RBM of {visible} visible and {hidden} hidden units: take at least 1 of each")
    if units not in UNITS:
        raise ValueError(f"units={units!r}: visible units are one of {', '.join(UNITS)}")
    if positive not in POSITIVE:
        raise ValueError(f"positive={positive!r}: the positive statistic is one of {', '.join(POSITIVE)}")
    if units == "binary" and not (torch.as_tensor(sigma) == 1).all():
        raise ValueError("sigma belongs to Gaussian visible units; take units='gaussian', or leave it out")
    if not (torch.as_tensor(sigma) > 0).all():
        raise ValueError(f"sigma={sigma}: a standard deviation is positive")
    if steps < 1:
        raise ValueError(f"steps={steps}: the chain takes at least 1 step")
    if chains < 0:
        raise ValueError(f"chains={chains}: take 0 for chains that begin at the data, or how many are kept")
