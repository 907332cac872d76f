"""Variables: the tensors that an algorithm keeps at a node, by name; they are checkpointed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Variables:
    """Named tensors of one node. Change them in place; the node holds on to the same tensor."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, start: Tensor) -> Tensor:
        """The tensor of that name: a copy of `start` at first, or what a checkpoint restored there."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = start.clone()
        elif kept.device != start.device:
            kept = self._kept[name] = kept.to(start.device)
        return kept

    def state(self) -> dict[str, Any]:
        """All of them."""
        return self._kept

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._kept = {name: tensor.clone() for name, tensor in state.items()}
