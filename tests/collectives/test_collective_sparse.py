"""Averages of sparse vectors by recursive doubling: what comes out, what travels, and what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sparse_averaging import DOUBLING, average

import shoal
from sampling import mostly_soak, sampled
from shoal.codecs import CODECS, DGC, FP16, LowRank, RandomK, Sparse, Threshold, TopK
from shoal.codecs.sparse import gaps
from shoal.codecs.wire import seal
from shoal.collectives import stripes
from shoal.collectives.cube import Cube
from shoal.core.codec import Identity
from shoal.core.errors import PeerLost, WireError
from shoal.core.replica import Parameters
from shoal.core.transport import HEADER_BYTES, Message
from shoal.launch.join import choose_mean
from shoal.sim import Faults, Network, Simulation
from shoal.sim import Link as Slow
from shoal.strategies import Sync
from shoal.testing import blobs
from shoal.testing.problems import Problem, simulate
from shoal.vocabulary.strategy import Strategy

FRAME = 32  # the header of what a codec writes


def whole_numbers(elements, places, seed, dtype=torch.float32):
    """Whole numbers that are not 0 at these places, and 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.zeros(elements, dtype=dtype)
    v[places] = torch.randint(1, 100, (len(places),), generator=generator).to(dtype)
    return v


def patterns(workers, elements=240):
    """How the elements of different workers may lie to each other."""
    k, everywhere = elements // max(1, workers), torch.arange(elements)
    same = torch.arange(7, elements, 31)
    return {
        "disjoint": [torch.arange(rank * k, rank * k + min(k, 5)) for rank in range(workers)],
        "interleaved": [everywhere[rank::workers][:9] for rank in range(workers)],
        "equal": [same] * workers,
        "overlapping": [
            torch.cat([same[:3], everywhere[200 + rank : 204 + rank]]) for rank in range(workers)
        ],
        "empty": [everywhere[:0]] * workers,
        "one has some": [same if rank == workers - 1 else everywhere[:0] for rank in range(workers)],
        "full": [everywhere] * workers,
        "one is full": [everywhere if rank == 0 else same for rank in range(workers)],
        "the ends": [everywhere[[0, -1]]] * workers,
    }


# -- averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "dtype"),
    mostly_soak([*((n, torch.float32) for n in range(1, 10)), (4, torch.float64), (5, torch.float64)], few=4),
)
def test_the_average_is_that_of_the_whole_vectors_for_every_pattern(workers, dtype):
    for places in patterns(workers).values():
        vectors = [whole_numbers(240, at, seed, dtype) for seed, at in enumerate(places)]
        run = average(vectors)
        for node in run.nodes:
            assert torch.equal(node.x, torch.stack(vectors).sum(0) / workers)


@pytest.mark.parametrize("elements", [0, 1, 2, 8, 10007])
@pytest.mark.parametrize("workers", [2, 3, 8, 9])
def test_any_length_will_do(workers, elements):
    at = torch.arange(0, elements, 101)
    vectors = [whole_numbers(elements, at, seed) for seed in range(workers)]
    run = average(vectors)
    assert all(torch.equal(node.x, torch.stack(vectors).sum(0) / workers) for node in run.nodes)


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("density", [0.001, 0.05, 0.3])
def test_all_workers_get_the_same_bits(workers, density):
    generator = torch.Generator().manual_seed(workers)
    vectors = [torch.randn(5000, generator=generator) * 10.0**k for k in range(workers)]
    run = average(vectors, TopK(density=density), weights=[1.0 + 0.3 * k for k in range(workers)])
    first = run.worker(0).x
    assert first.count_nonzero() > 0
    for node in run.nodes:
        assert torch.equal(node.x.view(torch.int32), first.view(torch.int32))


def test_weights_are_samples_and_nobody_is_none():
    vectors = [torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]), torch.tensor([0, 4.0, 0, 0, 0, 0, 0, 0])]
    run = average(vectors, weights=[3.0, 1.0])
    assert run.worker(0).x.tolist() == run.worker(1).x.tolist() == [6.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert run.worker(1).variables.state()["total"].item() == 4.0
    nobody = average(vectors, weights=[0.0, 0.0])
    assert (
        nobody.worker(0).x.count_nonzero() == 0 and nobody.worker(0).variables.state()["total"].item() == 0.0
    )
    one = average([*vectors, vectors[0]], weights=[0.0, 2.0, 0.0])
    assert one.worker(2).x.tolist() == vectors[1].tolist()


def test_half_precision_is_added_up_in_single():
    vectors = [torch.zeros(50, dtype=torch.float16) for _ in range(4)]
    for v in vectors:
        v[7] = 60000.0  # four of which no half holds
    run = average(vectors)
    assert run.worker(3).x.dtype == torch.float16 and run.worker(3).x[7] == 60000.0


@pytest.mark.parametrize("codec", [TopK(density=0.05), RandomK(density=0.05), Threshold(tau=16.0)], ids=repr)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_what_is_sent_and_what_is_kept_is_what_was_given(codec, workers):
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randint(-64, 65, (400,), generator=generator).float() for _ in range(workers)]
    run = average(vectors, codec)
    kept = [
        torch.cat([node.coding.states[f"stripe.{k}"]["rest"] for k in range(workers)]) for node in run.nodes
    ]
    assert all(rest.count_nonzero() > 0 for rest in kept)
    sent = torch.stack([v - rest for v, rest in zip(vectors, kept, strict=True)])
    assert torch.equal(run.worker(0).x, sent.sum(0) / workers)


def test_what_is_not_finite_arrives_and_leaves_no_trace():
    vectors = [torch.arange(100.0), torch.arange(100.0)]
    vectors[0][3] = float("nan")
    run = average(vectors, TopK(density=0.05))
    assert all(node.x.isnan().any() for node in run.nodes)
    states = run.worker(0).coding.states
    assert "rest" not in states["stripe.0"] and "rest" in states["stripe.1"]


def test_where_messages_dawdle_no_average_takes_in_those_of_the_next():
    slow = {(a, b): Slow(latency=0.1 * (a + 2 * b), bandwidth=1e4) for a in range(6) for b in range(a)}
    vectors = [whole_numbers(100, torch.arange(k, 100, 25), k) * 6 for k in range(6)]
    run = average(vectors, times=3, network=Network(latency=0.01, links=slow))
    for node in run.nodes:
        assert torch.equal(node.x, torch.stack(vectors).sum(0) / 6)
        assert not node.mailbox.has_arrived()


# -- what travels ----------------------------------------------------------------------------------


def nbytes(positions, elements, itemsize=4):
    """A message with these elements: its header, the codec's, positions and values, or all."""
    if len(positions) == elements:
        return HEADER_BYTES + FRAME + itemsize * elements
    k = gaps.low_bits(len(positions), elements)
    steps = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    quotients = int((steps >> k).sum())
    stream = -(-len(positions) * k // 8) + -(-(len(positions) + quotients) // 8)
    return HEADER_BYTES + FRAME + stream + itemsize * len(positions)


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("pattern", ["disjoint", "interleaved", "equal", "overlapping", "empty", "full"])
def test_bytes_are_those_of_the_unions_of_each_round(workers, pattern):
    places = patterns(workers)[pattern]
    vectors = [whole_numbers(240, at, 0) for at in places]
    run = average(vectors)
    for node in run.nodes:
        expected = 0
        for bit in Cube(workers).bits:  # before this round, a group of `bit` workers has one sum
            group = [rank for rank in range(workers) if rank // bit == node.rank // bit]
            expected += nbytes(torch.cat([places[rank] for rank in group]).unique(), 240)
        assert (node.meter.messages_sent, node.meter.bytes_sent) == (len(Cube(workers).bits), expected)
        assert node.meter.coded_bytes == expected - HEADER_BYTES * len(Cube(workers).bits)
        assert node.meter.dense_bytes == round(2 * 960 * (workers - 1) / workers)


@pytest.mark.parametrize("workers", [3, 5, 7])
def test_who_is_folded_in_sends_one_message(workers):
    places = patterns(workers)["interleaved"]
    run = average([whole_numbers(240, at, 0) for at in places])
    union = torch.cat(places).unique()
    for pair in range(Cube(workers).folded):
        keeper, folded = run.worker(2 * pair), run.worker(2 * pair + 1)
        assert (folded.meter.messages_sent, folded.meter.bytes_sent) == (1, nbytes(places[2 * pair + 1], 240))
        assert keeper.meter.messages_sent == len(Cube(workers).bits) + 1
        assert folded.meter.bytes_received == nbytes(union, 240)


def test_a_sum_travels_whole_where_that_is_shorter():
    # 32 n + 1 bits for each of m positions against 32 m: beyond 31 of 32 elements
    for count, whole in ((310, False), (311, True)):
        places = torch.arange(320)[320 - count :]
        run = average([whole_numbers(320, places, 0), torch.zeros(320)])
        sent = run.worker(0).meter.bytes_sent - HEADER_BYTES - FRAME
        assert sent == (4 * 320 if whole else 4 * count + 40)


# -- what is refused -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostile(Strategy):
    """Worker 1 sends something of its own instead of its part."""

    payload: Any = None

    async def worker(self, w):
        if w.rank == 1:
            await w.engine.group.send(0, Message("swap", self.payload, count=1.0))
        else:
            await DOUBLING(w.engine.group, w.x, 1.0)


POSITIONS, VALUES = torch.tensor([2, 5, 9]), torch.tensor([1.0, 2.0, 3.0])
STREAM = gaps.pack(POSITIONS, 50)
HOSTILE = {
    "nothing": (),
    "no header": (VALUES,),
    "a vector": (torch.ones(50),),
    "another codec": seal(TopK.code, 50, 3, STREAM, VALUES),
    "another length": seal(8, 51, 3, gaps.pack(POSITIONS, 51), VALUES),
    "another dtype": seal(8, 50, 3, STREAM, VALUES.double()),
    "integers": seal(8, 50, 3, STREAM, VALUES.int()),
    "too few values": seal(8, 50, 3, STREAM, VALUES[:2]),
    "too many values": seal(8, 50, 3, STREAM, torch.ones(4)),
    "another count": seal(8, 50, 2, STREAM, VALUES),
    "a huge count": seal(8, 50, 2**40, STREAM, VALUES),
    "no positions": seal(8, 50, 3, VALUES),
    "a third body": seal(8, 50, 3, STREAM, VALUES, VALUES),
    "positions out of range": seal(8, 50, 3, gaps.pack(torch.tensor([2, 5, 60]), 50), VALUES),
    "plain positions": seal(8, 50, 3, POSITIONS, VALUES),
    "a stream that ends early": seal(8, 50, 3, STREAM[:-1], VALUES),
    "a stream with a tail": seal(8, 50, 3, torch.cat([STREAM, STREAM[:1] * 0]), VALUES),
    "half of a dense vector": seal(8, 50, 50, torch.ones(25)),
    "a changed value": (*seal(8, 50, 3, STREAM, VALUES)[:2], VALUES + 1),
}


def receive(payload):
    return Simulation(
        Hostile(payload), lambda rank: Parameters(torch.zeros(50)), workers=2, steps=1, codec=Sparse()
    ).run()


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_payload_is_refused(payload):
    with pytest.raises(WireError):
        receive(payload)


def test_the_same_payload_is_taken_where_nothing_is_wrong():
    receive(seal(8, 50, 3, STREAM, VALUES))


@pytest.mark.parametrize("codec", [Identity(), FP16(), LowRank(), CODECS.read("by_layer")], ids=repr)
def test_a_codec_that_sends_all_is_refused(codec):
    with pytest.raises(
        ValueError, match=r"'sparse_doubling' sums sparse vectors, and .* sends dense ones; take 'str"
    ):
        choose_mean("sparse_doubling", None, codec, 4)


def test_a_codec_that_compresses_averages_is_refused():
    for codec in (TopK(feedback="double"), RandomK(feedback="double"), Threshold(feedback="double")):
        with pytest.raises(
            ValueError, match=r"sends sums uncompressed, .*take 'stripes', or feedback='residual'"
        ):
            choose_mean("sparse_doubling", None, codec, 4)
        assert choose_mean("auto", None, codec, 4) is stripes
    with pytest.raises(ValueError, match="sums sparse vectors"):
        shoal.run(blobs(), "sync", workers=2, codec="one_bit", collective="sparse_doubling", transport="sim")


@pytest.mark.parametrize("workers", mostly_soak([2, 3, 4, 5], few=2))
def test_who_dies_in_an_average_is_named_unless_nobody_misses_it(workers):
    vectors = [whole_numbers(60, torch.arange(k, 60, 20), k) for k in range(workers)]
    total = average(vectors, network=DISTANT)
    moments = [(rank, total.seconds * part / 5) for rank in range(workers) for part in range(5)]
    named = [is_named(vectors, rank, moment, total.worker(0).x) for rank, moment in moments]
    assert any(named) or workers == 2  # the one message leaves at once


DISTANT = Network(latency=1.0, bandwidth=1000.0)


def is_named(vectors, rank, moment, total):
    """Whether the average fails; if it does not, the others have it."""
    try:
        run = average(vectors, network=DISTANT, faults=Faults(noticed_after=0.25).kill(rank, moment))
    except PeerLost as lost:
        return f"worker {rank} was lost before" in str(lost) or pytest.fail(f"another was named: {lost}")
    others = run.nodes[:rank] + run.nodes[rank + 1 :]
    assert all(torch.equal(node.x, total) for node in others)
    return False


# -- whole runs ------------------------------------------------------------------------------------


class Drawn(Problem):
    """Whole gradients, another one for each worker and step; averages of up to 8 of them are exact."""

    def gradient(self, rank, step, x):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(-512, 513, (len(x),), generator=generator).to(x.dtype) * 64


@pytest.mark.parametrize(
    ("codec", "workers"),
    sampled([TopK(density=0.02), RandomK(density=0.02), DGC(density=0.02, momentum=0.5)], [2, 8]),
)
def test_a_run_has_the_bits_of_stripes_where_sums_are_exact(codec, workers):
    options = {"workers": workers, "steps": 6, "start": [0.0] * 500, "codec": codec}
    striped = simulate(Sync(), Drawn(lr=0.25), mean=stripes, **options)
    run = simulate(Sync(), Drawn(lr=0.25), mean=DOUBLING, **options)
    assert striped.worker(0).x.count_nonzero() > 10
    for node in run.nodes:
        assert torch.equal(node.x, striped.worker(0).x)
        for key, state in node.coding.states.items():  # and it could go on in stripes
            before = striped.worker(node.rank).coding.states[key]
            assert all(torch.equal(state[name], before[name]) for name in state)


def weights(**options):
    result = shoal.run(blobs(), "sync", epochs=1, **options)
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize(
    ("codec", "workers"),
    mostly_soak([("dgc:density=0.1", 4), ("top_k:density=0.1", 4), ("threshold:density=0.1", 3)], few=1),
)
def test_a_model_is_that_of_stripes_but_for_rounding(codec, workers):
    # sums in another order: the last bit of an average, over some 25 steps
    options = {"workers": workers, "codec": codec, "transport": "sim"}
    doubled = weights(collective="sparse_doubling", **options)
    assert torch.allclose(doubled, weights(collective="stripes", **options), rtol=1e-4, atol=1e-6)
    if workers == 4:
        assert torch.equal(doubled, weights(**options))  # which auto takes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "workers"), mostly_soak([("dgc:density=0.1", 3), ("top_k:density=0.1", 2)], 1)
)
def test_real_processes_have_the_bits_of_virtual_time(codec, workers):
    options = {"workers": workers, "codec": codec, "collective": "sparse_doubling"}
    assert torch.equal(weights(transport="processes", **options), weights(transport="sim", **options))
