"""All-reduce algorithms: how workers form an average. Each has its own file, with its cost beside it."""

from shoal.collectives.average import Sum, averaging
from shoal.collectives.butterfly import butterfly
from shoal.collectives.choice import ALGORITHMS, Cheapest, automatic, cheapest
from shoal.collectives.in_flight import InFlight
from shoal.collectives.link import LinkCost
from shoal.collectives.mapped import Mapped
from shoal.collectives.native import Native, native
from shoal.collectives.rabenseifner import rabenseifner
from shoal.collectives.ring import ring
from shoal.collectives.sparse_choice import SparseCheapest
from shoal.collectives.sparse_doubling import SparseDoubling
from shoal.collectives.stripes import stripes
from shoal.collectives.tree import tree

__all__ = [
    "ALGORITHMS",
    "Cheapest",
    "InFlight",
    "LinkCost",
    "Mapped",
    "Native",
    "SparseCheapest",
    "SparseDoubling",
    "Sum",
    "automatic",
    "averaging",
    "butterfly",
    "cheapest",
    "native",
    "rabenseifner",
    "ring",
    "stripes",
    "tree",
]
