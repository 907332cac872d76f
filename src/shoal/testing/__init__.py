"""For authors of strategies, codecs and transports: problems to work out on paper, and checks to pass."""

from shoal.testing.conformance import check_transport
from shoal.testing.problems import Problem, Quadratic, Slope, simulate
from shoal.testing.tasks import blobs

__all__ = ["Problem", "Quadratic", "Slope", "blobs", "check_transport", "simulate"]
