"""Watch: hands over a module's gradients in parts, as soon as back-propagation has completed each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.core.vector import Flat
from shoal.engine.streaming import Intake

PART_BYTES = 4 << 20
"""The least size of a part. Sending smaller parts costs more than starting earlier saves."""

Checksum: TypeAlias = "tuple[Tensor, Tensor]"

Mark: TypeAlias = "tuple[int, int, int] | None"
"""A gradient's address, torch's version counter and our count of additions; None without a gradient."""


class Watch:
    """Watches back-propagation through a module, and hands over gradients that are final.

    A gradient counts as final when it has been added to as often as in the step before: several times under
    gradient accumulation, never for an unused parameter. The first step only counts, and hands over nothing
    early. If the guess was wrong, or the gradient changed afterwards, as by clipping, `end` returns True, and
    `Streamed.changed` passes that on. Once something other than back-propagation has changed a gradient, no
    gradient is handed over early any more. Without `early` none ever is.
    """

    def __init__(self, flat: Flat, early: bool = True) -> None:
        self.parts = flat.parts(PART_BYTES) if early else [slice(0, flat.x.numel())]
        self._flat = flat
        self._numbers = [  # the parameters of each part
            [n for n, place in enumerate(flat.places) if part.start <= place.start < part.stop]
            for part in self.parts
        ]
        self._part_of = {n: part for part, numbers in enumerate(self._numbers) for n in numbers}
        self._usual: list[int] | None = None  # additions to each gradient in the step before
        self._added = [0] * len(flat.parameters)
        self._open: list[int] = []  # for each part, how many gradients are not final
        self._intake: Intake | None = None
        self._weight: Callable[[], float] = float
        self._taken: dict[int, tuple[Mark, Checksum | None]] = {}  # parameter -> its `_state` when taken
        self._weights: set[float] = set()  # by which the parts taken early were multiplied
        self._next = 0  # the part to hand over next
        self._trusts = True  # no gradient was ever changed after back-propagation
        self._hooks: list[RemovableHandle] = []

    def begin(self, intake: Intake, weight: Callable[[], float]) -> None:
        """From now on hand gradients over to `intake`, multiplied by what `weight()` returns at the time."""
        if not self._hooks and len(self.parts) > 1:  # a single part is never handed over early
            self._hook()
        self._intake, self._weight = intake, weight
        self._added = [0] * len(self._added)
        self._taken, self._weights, self._next = {}, set(), 0
        usual = self._usual or [1] * len(self._added)
        self._open = [sum(usual[n] > 0 for n in numbers) for numbers in self._numbers]

    def end(self, weight: float, trusted: bool = True) -> bool:
        """After back-propagation, hand over the remaining parts. Returns whether parts taken early are wrong.

        Pass `trusted=False` if gradients may have been changed in a way that the watch cannot detect.
        """
        assert self._intake is not None
        self._trusts = self._trusts and trusted
        same = trusted and all(self._is_unchanged(n) for n in self._taken)
        changed = bool(self._taken) and (not same or bool(self._weights - {weight}))
        if changed and self._added == self._usual:
            self._trusts = False  # as many additions as usual: something else changed the gradients
        self._usual = self._added
        while self._next < len(self.parts):
            self._hand_over(weight)
        self._intake = None
        return changed

    def fill(self, out: Tensor, weight: float) -> None:
        """Write the gradient, times the weight, to `out`."""
        for part in range(len(self.parts)):
            self._fill(part, out, weight)

    def close(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self) -> None:
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._accumulated, n))  # type: ignore[no-untyped-call]
            for n, p in enumerate(self._flat.parameters)
        ]

    def _accumulated(self, number: int, _: nn.Parameter) -> None:
        self._added[number] += 1
        if self._intake is None or self._usual is None or not self._trusts:
            return
        if self._added[number] == self._usual[number]:
            self._open[self._part_of[number]] -= 1
            while self._next < len(self.parts) - 1 and self._open[self._next] <= 0:
                weight = self._weight()
                self._weights.add(weight)
                self._taken.update((n, self._state(n)) for n in self._numbers[self._next])
                self._hand_over(weight)

    def _hand_over(self, weight: float) -> None:
        """Fill the next part and, unless it is the last, tell the intake that it is ready."""
        assert self._intake is not None
        part, self._next = self._next, self._next + 1
        self._fill(part, self._intake.out, weight)
        if self._next < len(self.parts):
            self._intake.ready(part)

    @torch.no_grad()
    def _fill(self, part: int, out: Tensor, weight: float) -> None:
        views = self._flat.views(out)
        for number in self._numbers[part]:
            parameter, view = self._flat.tensors[number], views[number]
            if parameter.grad is None or weight == 0 or not self._flat.is_active(number):  # 0 * inf is NaN
                view.zero_()
            elif parameter.grad.is_sparse:
                view.copy_(parameter.grad.to_dense()).mul_(weight)
            elif parameter.grad.dtype == view.dtype:
                torch.mul(parameter.grad, weight, out=view)
            else:  # half precision could hold neither the product nor the sum
                view.copy_(parameter.grad).mul_(weight)

    def _state(self, number: int) -> tuple[Mark, Checksum | None]:
        """What reveals a later change of this gradient: its mark, and a checksum of all its elements."""
        grad = self._flat.tensors[number].grad
        return self._mark(number), None if grad is None else _checksum(grad)

    def _is_unchanged(self, number: int) -> bool:
        (mark, before), now = self._taken[number], self._flat.tensors[number].grad
        if mark != self._mark(number):
            return False
        return now is None or before is None or all(map(torch.equal, _checksum(now), before))

    def _mark(self, number: int) -> Mark:
        grad = self._flat.tensors[number].grad
        if grad is None:
            return None
        return 0 if grad.is_sparse else grad.data_ptr(), grad._version, self._added[number]


def _checksum(grad: Tensor) -> Checksum:
    """A sum over the bits of a gradient, eight bytes at a time, and the elements at its ends beside it.

    It reveals a change through `grad.data`, which torch does not count, and is read at the speed of memory.
    """
    flat = (grad._values() if grad.is_sparse else grad).detach().reshape(-1)
    ratio = max(1, 8 // flat.element_size())
    begin = min(flat.numel(), -flat.storage_offset() % ratio)
    end = begin + (flat.numel() - begin) // ratio * ratio
    return flat[begin:end].view(torch.int64).sum(), torch.cat([flat[:begin], flat[end:]])
