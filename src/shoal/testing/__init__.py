"""For authors of transports, codecs and strategies: the checks that every one of them must pass."""

from shoal.testing.conformance import check_transport

__all__ = ["check_transport"]
