"""How long an average over all workers takes: in stripes, by an all-reduce, or as a codec forms it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from shoal.codecs.sparse.codec import Sparse
from shoal.collectives import LinkCost
from shoal.collectives.choice import ALGORITHMS, FEW_WORKERS, cheapest
from shoal.collectives.mapped import SMALLEST_MAPPED
from shoal.collectives.sparse_choice import SparseAverages
from shoal.core.sparse_vectors import SparseCodec
from shoal.core.transport import HEADER_BYTES
from shoal.planning.message_time import Wire
from shoal.planning.workload import UNCOMPRESSED, CodecCost

LINK_OF_ONE = LinkCost(1.0, 0.0)
"""On this link an all-reduce costs its number of rounds."""

COPY_PASSES, JOIN_PASSES, ADD_PASSES, DIVIDE_PASSES = 3.0, 2.0, 3.0, 4.0
"""Over vectors in mapped memory, as an operation of torch counts them: what it reads, and what it writes."""


@dataclass(frozen=True)
class RoundCost:
    """What all workers do together once: the seconds it takes, and the bytes that all of them send."""

    seconds: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: RoundCost) -> RoundCost:
        return RoundCost(self.seconds + other.seconds, self.nbytes + other.nbytes)

    def times(self, number: float) -> RoundCost:
        """So many rounds."""
        return RoundCost(number * self.seconds, number * self.nbytes)


def mean_round(workers: int, nbytes: float, codec: CodecCost, wire: Wire) -> RoundCost:
    """An average of a vector of `nbytes`, as `choose_mean` would have it formed."""
    if workers == 1:
        return RoundCost()
    if codec.reductions:
        part = codec.ratio * nbytes / codec.reductions
        coding = wire.slower * (codec.encode + codec.decode) * nbytes
        return _exact(workers, part, wire).times(codec.reductions) + RoundCost(coding)
    if codec.is_exact and wire.machine.maps_memory and nbytes >= SMALLEST_MAPPED:
        return mapped(workers, nbytes, wire)
    if codec.is_exact:
        return _exact(workers, nbytes, wire)
    return striped(workers, nbytes, codec, wire)


def sparse_round(
    workers: int, nbytes: float, itemsize: int, sparse: SparseCodec, codec: CodecCost, wire: Wire
) -> RoundCost:
    """An average of sparse vectors: by doubling or in stripes, whichever the workers would choose."""
    if workers == 1:
        return RoundCost()
    share = codec.share or 1.0
    averages = SparseAverages(sparse, Sparse(), share, round(nbytes / itemsize), itemsize)
    doubling, stripes = averages.doubling(workers), averages.stripes(workers)
    best = doubling if doubling.seconds(wire.link) < stripes.seconds(wire.link) else stripes
    coding = wire.slower * (codec.encode + 2 * codec.decode) * nbytes
    delay = best.rounds * wire.delay(workers)
    sent = workers * (best.nbytes + best.rounds * HEADER_BYTES)
    return RoundCost(best.seconds(wire.whole) + coding + delay, sent)


def _exact(workers: int, nbytes: float, wire: Wire) -> RoundCost:
    if workers <= FEW_WORKERS:
        return striped(workers, nbytes, UNCOMPRESSED, wire)
    name = cheapest(workers, nbytes, wire.link)
    rounds = ALGORITHMS[name].cost(workers, 0.0, LINK_OF_ONE)
    seconds = ALGORITHMS[name].cost(workers, nbytes, wire.whole) + rounds * wire.delay(workers)
    each = nbytes * (rounds / 2 if name == "butterfly" else (workers - 1) / workers)
    return RoundCost(seconds, workers * (2 * each + rounds * HEADER_BYTES))


def mapped(workers: int, nbytes: float, wire: Wire) -> RoundCost:
    """An average in mapped memory: copy the vector, meet, merge a stripe, meet, put the stripes together."""
    part, messages = nbytes / workers, ceil(log2(workers))
    copies = wire.touching(nbytes, COPY_PASSES) + wire.touching(nbytes, JOIN_PASSES)
    merging = workers * wire.touching(part, ADD_PASSES) + wire.touching(part, DIVIDE_PASSES)
    seconds = copies + merging + 2 * messages * wire.trip(0.0)
    sent = nbytes + (workers - 2) * part + 2 * messages * HEADER_BYTES
    return RoundCost(seconds, workers * sent)


def striped(workers: int, nbytes: float, codec: CodecCost, wire: Wire) -> RoundCost:
    """An average in stripes: each worker merges one, and sends it back to all."""
    part, others = nbytes / workers, workers - 1
    up, down = codec.ratio * part, codec.merged * part
    encode, decode = wire.slower * codec.encode * part, wire.slower * codec.decode * part
    seconds = _fan_out(others, up, encode, decode, wire) + encode + _fan_out(others, down, 0.0, decode, wire)
    return RoundCost(seconds + decode, workers * others * (up + down + 2 * HEADER_BYTES))


def _fan_out(others: int, nbytes: float, encode: float, decode: float, wire: Wire) -> float:
    """Seconds until a worker has sent a message to each other one, and has merged one from each."""
    sending, leaving = wire.sending(nbytes) + encode, wire.leaving(nbytes)
    taking = wire.receiving(nbytes) + wire.merging(nbytes + HEADER_BYTES) + decode
    latency = wire.network.latency
    last = sending + (others - 1) * max(sending, leaving) + leaving + latency
    first = max(others * sending, sending + latency + leaving)
    lost = wire.delay(others * (others + 1))
    return max(last + taking, first + others * taking) + lost
