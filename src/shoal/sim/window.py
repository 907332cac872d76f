"""Window: memory of a simulated node that others reach into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Window:
    """Memory of one node that other nodes read and add to."""

    x: Tensor
    count: int = 0
