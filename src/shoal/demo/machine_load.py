"""MachineLoad: the cores that this process may use, and how busy other programs keep them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
BUSY = 0.15  # from this share on, other programs visibly slow the demo down


@dataclass(frozen=True)
class MachineLoad:
    """`others` is the share of the cores that other programs used; None where the system does not say."""

    cores: int
    others: float | None

    @property
    def is_busy(self) -> bool:
        """Whether other programs take a share that shows in the figures."""
        return self.others is not None and self.others >= BUSY


def measure_load(seconds: float = 1.0) -> MachineLoad:
    """Watch the cores for so long, without using them."""
    cores = usable_cores()
    before, own = busy_seconds(cores), time.process_time()
    began = time.monotonic()
    time.sleep(seconds)
    passed, after = time.monotonic() - began, busy_seconds(cores)
    if before is None or after is None:
        return MachineLoad(len(cores), None)
    used = after - before - (time.process_time() - own)
    return MachineLoad(len(cores), min(1.0, max(0.0, used / (passed * len(cores)))))


def usable_cores() -> set[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def busy_seconds(cores: set[int]) -> float | None:
    """Seconds that these cores have been busy since the system started; None if it does not say."""
    if not STAT.exists():
        return None
    lines = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu"))
    found = {name: list(map(int, ticks)) for name, *ticks in lines}
    mine = [found[f"cpu{core}"] for core in cores if f"cpu{core}" in found]
    # user, nice, system, idle, waiting for a disk, then interrupts; guests are part of user
    ticks = sum(sum(core[:3]) + sum(core[5:8]) for core in mine)
    return ticks / float(os.sysconf("SC_CLK_TCK")) if mine else None
