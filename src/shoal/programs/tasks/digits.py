"""scikit-learn's digits: 8 x 8 pixels, 1,797 examples, no download.

Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, 1998.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.errors import Unavailable
from shoal.core.task import Data, Task

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
        imports=("sklearn.datasets",),
    )


def mlp() -> nn.Module:
    """64-128-10 with ReLU; 9,610 parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits_data() -> Data:
    """Pixels scaled to [0, 1]; the test set is the same 360 examples on every machine."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Unavailable(
            "task 'digits' needs scikit-learn. Install it with: pip install 'shoal[digits]'"
        ) from error
    pixels, classes = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32) / 16.0
    y = torch.as_tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Data(x[train], y[train], x[test], y[test])
