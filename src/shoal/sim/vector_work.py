"""VectorWork: what a simulated node computes on vectors takes time, by the bytes that torch touches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.sim.kernel import Resumable


class VectorWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `touched` the bytes of each torch operation: of all it reads, and of all it writes."""

    def __init__(self, touched: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._touched = touched
        self._apart = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Tell nothing of what is computed meanwhile."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def __torch_dispatch__(
        self, operation: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if not self._apart and not operation.is_view:
            self._touched(_nbytes(args) + _nbytes(kwargs.values()) + _nbytes([result]))
        return result


class CountedSteps:
    """A coroutine whose torch operations are counted."""

    def __init__(self, coroutine: Resumable, work: VectorWork) -> None:
        self._coroutine = coroutine
        self._work = work
        self.close = coroutine.close

    def send(self, value: None) -> Any:
        """Run it until it next waits."""
        with self._work:
            return self._coroutine.send(value)


def _nbytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, (list, tuple)):
            total += _nbytes(value)
    return total
