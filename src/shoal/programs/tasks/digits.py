"""scikit-learn's digits: 8 x 8 pixels, 1,797 examples, no download.

Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, 1998.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import Unavailable
from shoal.core.task import Data, Task
from shoal.programs.models.branches import LastState, StackedBranches

TEST_SIZE = 360


def digits() -> Task:
    """A multilayer perceptron on scikit-learn's digits; trains in seconds on any machine."""
    return Task(
        name="digits",
        model=mlp,
        data=digits_data,
        lr=0.3,
        batch=32,
        about="handwritten digits, 8 x 8 (from scikit-learn); MLP 64-128-10; learns in seconds",
    )


def digit_pairs() -> Task:
    """Whether two digits show the same number: one LSTM reads both, row by row, in a branch for each."""
    return Task(
        name="digit-pairs",
        model=pair_net,
        data=pairs_data,
        optimizer=torch.optim.Adam,
        lr=0.005,
        batch=32,
        about="whether two digits, 8 x 8, are the same number (scikit-learn); one LSTM in two branches",
    )


def pair_net() -> nn.Module:
    """LSTM(64) on the eight rows of each digit; both last states through 64 units to two classes."""
    head = nn.Sequential(nn.Linear(2 * 64, 64), nn.ReLU(), nn.Linear(64, 2))
    return StackedBranches(LastState(8, 64), head)


def pairs_data() -> Data:
    """Pairs of digits as (2, 8, 8), half of them of the same number; test pairs are of test digits."""
    digits = digits_data()
    train, test = (_pairs(*part) for part in ((digits.x, digits.y), (digits.test_x, digits.test_y)))
    return Data(*train, *test)


def _pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each digit with the next of the same number, and with one of another."""
    firsts, seconds = [], []
    for number in range(10):
        own, other = (y == number).nonzero()[:, 0], (y != number).nonzero()[:, 0]
        firsts += [own, own]
        seconds += [own.roll(1), other[torch.arange(len(own)) * 7 % len(other)]]
    first, second = torch.cat(firsts), torch.cat(seconds)
    both = torch.stack([x[first].view(-1, 8, 8), x[second].view(-1, 8, 8)], dim=1)
    return both, (y[first] == y[second]).long()


def mlp() -> nn.Module:
    """64-128-10 with ReLU; 9,610 parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits_data() -> Data:
    """Pixels scaled to [0, 1]; the test set is the same 360 examples on every machine."""
    x, y = _read_digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Data(x[train], y[train], x[test], y[test])


def _read_digits() -> tuple[Tensor, Tensor]:
    """Pixels and classes, from the file alone: importing scikit-learn takes a second in every process."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise Unavailable("task 'digits' needs scikit-learn. Install it with: pip install 'shoal[digits]'")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(path, delimiter=","))
    return table[:, :-1].float() / 16.0, table[:, -1].long()
