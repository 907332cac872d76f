"""How an average over all workers is formed; each way in its own file with its cost beside it."""

from shoal.collectives.native import native
from shoal.collectives.stripes import stripes

__all__ = ["native", "stripes"]
