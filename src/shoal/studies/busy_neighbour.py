"""A process that keeps a core busy: python -m shoal.studies.busy_neighbour.

Hosts in network namespaces share the caches and the memory of one machine. What is measured on one of them
alone is measured beside this, so that it is as slow as beside the other hosts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.launch.control import leave_with_parent
from shoal.profiling.crowd import train

LONGEST_SECONDS = 3600.0


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Inside the context another process trains on one thread."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.studies.busy_neighbour"], stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    leave_with_parent()
    torch.set_num_threads(1)
    train(LONGEST_SECONDS)
