"""Variables: the tensors that an algorithm keeps at a node, by name; they are checkpointed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Variables:
    """Named tensors of one node. Change them in place; the node holds on to the same tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, start: Tensor) -> Tensor:
        """The tensor of that name: a copy of `start` at first, or what a checkpoint restored."""
        if name not in self._kept:
            self._kept[name] = start.clone()
        return self._kept[name]

    def state(self) -> dict[str, Any]:
        """All of them."""
        return self._kept

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._kept = {name: tensor.to(device=self._device, copy=True) for name, tensor in state.items()}
