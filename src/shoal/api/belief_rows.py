"""The rows and labels of belief nets, in a form that is pickled for worker processes.

They are arrays, because a tensor would travel as an open file.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.core.task import Data
from shoal.programs.models.belief_network import BeliefNet
from shoal.programs.models.rbm import RBM

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """The inputs of a stage: rows, or their features. `mark` is a digest of the rows that were given."""

    x: Array
    test_x: Array
    mark: str = ""

    def unlabelled(self) -> Data:
        """The rows as data with dummy labels."""
        x, test_x = torch.from_numpy(self.x), torch.from_numpy(self.test_x)
        return Data(x, torch.zeros(len(x)), test_x, torch.zeros(len(test_x)))

    def through(self, rbm: RBM, device: str) -> Rows:
        """The features that an RBM computes from the rows."""
        net = BeliefNet([copy.deepcopy(rbm)]).to(device)

        def features(x: Array) -> Array:
            found: Array = net.features(torch.from_numpy(x).to(device)).cpu().numpy()
            return found

        return Rows(features(self.x), features(self.test_x), self.mark)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Inputs and their class indices. Without labels for the test rows there is no test set."""

    rows: Rows
    y: Array
    test_y: Array

    def data(self) -> Data:
        """The rows and labels as data."""
        x, y, test_y = (torch.from_numpy(a) for a in (self.rows.x, self.y, self.test_y))
        test_x = torch.from_numpy(self.rows.test_x)
        return Data(x, y, test_x if len(test_y) else test_x[:0], test_y)


def matrix(x: Any) -> Array:
    """Convert rows to a writable float32 matrix; further dimensions are flattened."""
    given = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if given.ndim < 2:
        raise ValueError(f"inputs of shape {given.shape}: take a row for each example, as x.reshape(-1, 1)")
    return np.require(given.reshape(len(given), -1), np.float32, ["C", "W"])


def rows_of(x: Any, test_x: Any) -> Rows:
    """What a net learns from, and the test rows, or none."""
    given = matrix(x)
    return Rows(given, given[:0] if test_x is None else matrix(test_x), digest_of(given))


def digest_of(given: Array, before: str = "") -> str:
    """By what a resumed fit tells whether it has the same rows or labels."""
    digest = hashlib.sha256(f"{before}{given.shape}".encode())
    digest.update(given.data)
    return digest.hexdigest()[:16]
