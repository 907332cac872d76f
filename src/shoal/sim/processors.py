"""Processors of a host in virtual time. Its nodes share them evenly while more are busy than there are."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from shoal.sim.hardware import Machine
from shoal.sim.kernel import Kernel


class Processors:
    """The processors of one host.

    All jobs that run at the same time are equally fast, so one number says how far all of them are: the work
    that a job has had done which was there from the start. A job ends when that number has grown by its own.
    """

    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self._kernel = kernel
        self._machine = machine
        self._done = 0.0  # seconds of work, for each job that was there all the time
        self._since = 0.0  # when that was last brought up to date
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # when it ends by `_done`, number, then
        self._started = 0
        self._plan = 0  # number of the newest plan for the next end; events of older ones do nothing

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Do work that takes one processor so many seconds, and call `then`."""
        if self._machine.per_host == 1:  # nobody to share with
            self._kernel.after(seconds / self._machine.speed(1), then)
            return
        self._advance()
        self._started += 1
        heappush(self._jobs, (self._done + seconds, self._started, then))
        self._expect_end()

    @property
    def speed(self) -> float:
        """How fast one more job would be, as a share of one that is alone."""
        return self._machine.speed(len(self._jobs) + 1)

    def _advance(self) -> None:
        now = self._kernel.now
        if self._jobs:
            self._done += (now - self._since) * self._machine.speed(len(self._jobs))
        self._since = now

    def _expect_end(self) -> None:
        self._plan += 1
        if self._jobs:
            plan, left = self._plan, max(0.0, self._jobs[0][0] - self._done)
            self._kernel.after(left / self._machine.speed(len(self._jobs)), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        end, _, then = heappop(self._jobs)
        self._done = max(self._done, end)  # rounding must not leave a rest
        self._expect_end()
        then()
