"""The bytes that the processes of a group send each other: counted as torch.distributed is asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

IN_PLACE, FUNCTIONAL = "c10d", "_c10d_functional"  # the names under which torch has its collectives

SHARES: dict[str, Callable[[int], float]] = {
    "send": lambda p: 1.0,
    "broadcast": lambda p: (p - 1) / p,
    "allreduce": lambda p: 2 * (p - 1) / p,
    "allgather": lambda p: p - 1,
    "reducescatter": lambda p: (p - 1) / p,
    "alltoall": lambda p: (p - 1) / p,
    "scatter": lambda p: (p - 1) / p,
    "gather": lambda p: (p - 1) / p,
}
"""What a process sends of its input, on average of p, where no byte goes further than it must."""

SILENT = ("recv", "barrier", "monitoredbarrier", "wait", "wrap")


def bytes_of(work: Callable[[], object]) -> int:
    """The bytes that this process sends to others through torch.distributed while it does the work.

    Messages are counted as they are; collectives as what the cheapest algorithm sends. Raises RuntimeError
    for a collective that is not known here.
    """
    with _Counter() as counter:
        work()
    return int(counter.sent)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in (IN_PLACE, FUNCTIONAL):
            self._count(func.namespace, func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, name: str, args: Sequence[Any]) -> None:
        word = name.replace("_", "")
        if word.startswith(SILENT):
            return
        share = next((share for known, share in SHARES.items() if word.startswith(known)), None)
        if share is None:
            raise RuntimeError(f"torch.distributed was asked for {name!r}, whose bytes nobody counts")
        into = kind == IN_PLACE and word.startswith(
            ("allgather", "reducescatter", "alltoall", "scatter", "gather")
        )
        given = args[1] if into else args[0]  # in place, outputs come first
        self.sent += share(dist.get_world_size()) * sum(t.nbytes for t in _tensors(given))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
