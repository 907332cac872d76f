"""Chooses how to average sparse vectors: by recursive doubling or in stripes, by their predicted cost.

Every worker sends a share p of m elements. If their positions are random, the sum of n workers has the share
1 - (1 - p)^n of the elements. Let b(s, m) be the bytes that encode a share s of m elements.

    doubling  L log2 P + G (b(p_1, m) + b(p_2, m) + b(p_4, m) + ... ),  p_n = 1 - (1 - p)^n, up to n = P/2
    stripes   2 L + G (P - 1) (b(p, m/P) + b(p_P, m/P)),                 and a header for each further message

If p is small, doubling sends P - 1 times p m elements, and stripes P - 1/P times. So for two or four workers
doubling is faster on any link. With eight or more it has more rounds, and the link decides. If workers are
folded in, sums make two more trips, and stripes are faster. Virtual time agrees with the formulas, except for
the actual positions of elements; with folded workers doubling takes less, because some rounds overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.collectives.cube import Cube
from shoal.collectives.link import LinkCost, measured
from shoal.collectives.sparse_doubling import SparseDoubling
from shoal.collectives.stripes import Striped, stripes
from shoal.core.sparse_vectors import SparseCodec, SparseWire
from shoal.core.transport import HEADER_BYTES
from shoal.engine.group import Group

FRAME_BYTES = 32
"""Bytes that a codec writes before the elements."""


@dataclass(frozen=True)
class Traffic:
    """The critical path of an average: the number of rounds, and the bytes sent one after another."""

    rounds: int
    nbytes: float

    def seconds(self, link: LinkCost) -> float:
        """Predicted seconds on `link`. Additions are not counted."""
        return self.rounds * link.latency + self.nbytes * link.seconds_per_byte

    def never_exceeds(self, other: Traffic) -> bool:
        """Whether this traffic takes no longer than `other` on any link."""
        return self.rounds <= other.rounds and self.nbytes <= other.nbytes


@dataclass(frozen=True)
class SparseAverages:
    """The cost of averages of vectors that `codec` encodes, and whose sums `wire` encodes."""

    codec: SparseCodec
    wire: SparseCodec
    share: float  # p
    elements: int  # m
    itemsize: int

    def doubling(self, workers: int) -> Traffic:
        """The traffic of recursive doubling."""
        cube = Cube(workers)
        # workers in a sum before each round, at the first corners: those include the folded ones and are last
        groups = [bit + min(bit, cube.folded) for bit in cube.bits]
        if cube.folded:
            groups = [1, *groups, workers]
        wide = max(4, self.itemsize)  # half precision is summed in single precision
        sent = [self._nbytes(self.wire, self.union(n), self.elements, wide) for n in groups]
        return Traffic(len(sent), sum(sent))

    def stripes(self, workers: int) -> Traffic:
        """The traffic of stripes. A worker sends its messages one after the other."""
        part = self.elements / workers
        up = self._nbytes(self.codec, self.share, part, self.itemsize)
        down = self._nbytes(self.wire, self.union(workers), part, self.itemsize)
        others = workers - 1
        return Traffic(2, others * (up + down) + 2 * max(0, others - 1) * HEADER_BYTES)

    def union(self, workers: int) -> float:
        """The share of elements in the sum of n workers: 1 - (1 - p)^n."""
        return 1 - (1 - self.share) ** workers

    def _nbytes(self, codec: SparseCodec, share: float, elements: float, itemsize: int) -> float:
        return FRAME_BYTES + elements * min(8 * itemsize, share * codec.bits(share, itemsize)) / 8


class SparseCheapest:
    """Averages each vector by doubling or in stripes, whichever is faster for its size.

    If that depends on the link and `link` is None, the workers measure it together before the first such
    average.
    """

    def __init__(
        self, codec: SparseCodec, share: float, wire: SparseWire, link: LinkCost | None = None
    ) -> None:
        self._codec, self._share, self._wire, self._link = codec, share, wire, link
        self._doubling = SparseDoubling(wire)

    async def __call__(self, group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        """The weighted average of `v` over the workers, and the total weight (zeros if that is 0)."""
        if await self._doubles(group, v):
            return await self._doubling(group, v, weight)
        return await stripes(group, v, weight)

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str = "") -> Striped:
        """Begin an average in the background, in stripes."""
        return await stripes.start(group, v, weight, number, key)

    async def _doubles(self, group: Group, v: Tensor) -> bool:
        averages = SparseAverages(self._codec, self._wire, self._share, v.numel(), v.element_size())
        doubling, striped = averages.doubling(group.size), averages.stripes(group.size)
        if doubling.never_exceeds(striped):
            return True
        if striped.never_exceeds(doubling):
            return False
        link = self._link or await measured(group)
        return doubling.seconds(link) < striped.seconds(link)
