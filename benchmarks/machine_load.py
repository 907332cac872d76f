"""Load: how much of the machine other programs use while a benchmark runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class Load:
    """Measures from now on."""

    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), busy_seconds()

    def of_others(self, own_seconds: float) -> float:
        """The share of all cores that other programs used, given the processor time of the benchmark.

        0 on systems without /proc/stat.
        """
        wall, busy = time.perf_counter() - self._wall, busy_seconds() - self._busy
        return max(0.0, busy - own_seconds) / (wall * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Seconds that all cores together have been busy since the machine started."""
    if not STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *rest = map(int, STAT.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
