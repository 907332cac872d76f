"""Simulator: runs the same algorithms in virtual time, with any number of nodes in one thread.

`models` describes networks and machines without importing torch. The other modules are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.sim.models import Compute, Link, Network

if TYPE_CHECKING:
    from shoal.sim.disk import Disk
    from shoal.sim.faults import Faults, Weather
    from shoal.sim.kernel import Kernel
    from shoal.sim.simulation import Simulation
    from shoal.sim.transport import SimTransport

__all__ = ["Compute", "Disk", "Faults", "Kernel", "Link", "Network", "SimTransport", "Simulation", "Weather"]

_HOMES = {
    "Disk": "shoal.sim.disk",
    "Faults": "shoal.sim.faults",
    "Kernel": "shoal.sim.kernel",
    "SimTransport": "shoal.sim.transport",
    "Simulation": "shoal.sim.simulation",
    "Weather": "shoal.sim.faults",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.sim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
