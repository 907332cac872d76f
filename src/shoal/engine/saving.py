"""A node's whole state between two steps, as plain values and tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node


def state_of(node: Node) -> dict[str, Any]:
    """All that the node's next step depends on."""
    return {
        "x": node.x,
        "kept": node.kept,
        "codec": node.coding.states,
        "replica": node.replica.state_dict(),
        "rng": node.rng.get_state(),
        "service": node.service.state(),
        "numbers": {
            "step": node.t,
            "clock": node.clock,
            "version": node.version,
            "merged": node.merged,
            "unmerged": node.unmerged,
            "samples": node.meter.samples,
            "seen": {str(rank): version for rank, version in node.client.seen.items()},
            "questions": node.mailbox.numbers(),
        },
    }


def restore(node: Node, state: dict[str, Any]) -> None:
    """Put the node where `state_of` was taken."""
    node.x.copy_(state["x"])
    here = partial(Tensor.to, device=node.x.device, copy=True)
    node.kept = {name: here(tensor) for name, tensor in state["kept"].items()}
    node.coding.states = {
        key: {name: here(tensor) for name, tensor in memory.items()} for key, memory in state["codec"].items()
    }
    node.replica.load_state_dict(state["replica"])
    node.rng.set_state(state["rng"])
    node.service.load(state["service"])
    numbers = state["numbers"]
    node.t = node.meter.steps = numbers["step"]
    node.clock = numbers["clock"]
    node.version, node.merged = numbers["version"], numbers["merged"]
    node.unmerged = numbers["unmerged"]
    node.client.seen = {int(rank): version for rank, version in numbers["seen"].items()}
    node.mailbox.go_on_from(numbers["questions"])
    node.meter.samples = node.samples_before = numbers["samples"]
