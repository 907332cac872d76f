"""Virtual time: the same algorithms on any number of nodes in one thread."""

from shoal.sim.disk import Disk
from shoal.sim.faults import Faults, Weather
from shoal.sim.kernel import Kernel
from shoal.sim.models import Compute, Link, Network
from shoal.sim.simulation import Simulation
from shoal.sim.transport import SimTransport

__all__ = ["Compute", "Disk", "Faults", "Kernel", "Link", "Network", "SimTransport", "Simulation", "Weather"]
