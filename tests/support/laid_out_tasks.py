"""Tasks whose models can lie over several processes; in float64, so that sums in another order agree."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from shoal.core.task import Data, Task, sequence_loss
from shoal.programs.models.branches import StackedBranches
from shoal.programs.models.language import LanguageModel, Sizes

SAMPLES = 40  # the last of each epoch are a batch of another size


def pictures(layers=(12, 9, 7, 3), batch=8, **settings):
    """Two convolutions and linear layers of sizes that nothing divides."""
    return Task("pictures", Net(layers), picture_data, batch=batch, lr=0.2, **settings)


class Net:
    def __init__(self, sizes):
        self.sizes = sizes

    def __call__(self):
        sizes = (2 * 3 * 3, *self.sizes)
        linear = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
        features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten())
        return nn.Sequential(features, *linear[:-1]).double()


def picture_data():
    dice = torch.Generator().manual_seed(0)
    y = torch.arange(SAMPLES) % 3
    x = torch.randn(3, 1, 6, 6, generator=dice)[y] + torch.randn(SAMPLES, 1, 6, 6, generator=dice)
    return Data(x.double(), y, x[:9].double(), y[:9])


def letters(batch=8):
    """A transformer whose output layer has the weights of its embedding."""
    return Task("letters", letter_net, letter_data, loss=sequence_loss, batch=batch, lr=0.5)


def letter_net():
    return LanguageModel(Sizes(symbols=7, context=5, width=6, layers=3)).double()


def letter_data():
    x = torch.randint(7, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    return Data(x, (x + 1) % 7, x[:5], (x[:5] + 1) % 7)


def two_inputs(batch=8):
    """An encoder that is shared by two inputs."""
    return Task("two inputs", branch_net, branch_data, batch=batch, lr=0.5)


def branch_net():
    return StackedBranches(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(8, 2)).double()


def branch_data():
    x = torch.randn(SAMPLES, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    y = (x[:, 0, 0] > x[:, 1, 0]).long()
    return Data(x, y, x[:5], y[:5])


def spread(batch=8):
    """A network with BatchNorm."""
    return Task("spread", norm_net, picture_data, batch=batch)


def norm_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
