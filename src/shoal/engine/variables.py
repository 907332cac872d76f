"""Variables: the tensors that an algorithm keeps at a node, by name; they are checkpointed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Variables:
    """Named tensors of one node. Change them in place; the node holds on to the same tensor."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._shared: set[str] = set()
        self._mutual: set[str] = set()

    def keep(self, name: str, start: Tensor, shared: bool = False, mutual: bool = False) -> Tensor:
        """The tensor of that name: a copy of `start` at first, or what a checkpoint restored there.

        A `shared` one is equal at all workers, or a server's: it outlives a change of the crew. A `mutual`
        one must fit with what other workers keep: it outlives none.
        """
        if shared:
            self._shared.add(name)
        if mutual:
            self._mutual.add(name)
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = start.clone()
        elif kept.device != start.device:
            kept = self._kept[name] = kept.to(start.device)
        return kept

    def state(self) -> dict[str, Any]:
        """All of them."""
        return self._kept

    def shared(self) -> dict[str, Tensor]:
        """Those that outlive a change of the crew."""
        return {name: tensor for name, tensor in self._kept.items() if name in self._shared}

    def kinds(self) -> dict[str, list[str]]:
        """The names of those that all take over, and of those that nobody does, when the crew changes."""
        return {"shared": sorted(self._shared), "mutual": sorted(self._mutual)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._kept = {name: tensor.clone() for name, tensor in state.items()}
