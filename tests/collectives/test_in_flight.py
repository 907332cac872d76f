"""A codec that forms its averages itself: one of a user's own by hand, and what the reductions promise."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from own_codec import Steps
from shoal import Codec
from shoal.collectives import ALGORITHMS, InFlight, LinkCost, Native, native, stripes
from shoal.core.codec import REST, Identity, expect
from shoal.core.errors import Unavailable, WireError
from shoal.core.transport import HEADER_BYTES
from shoal.engine.group import PRESENT
from shoal.engine.streaming import Merges
from shoal.launch.join import check_collective, choose_mean
from shoal.sim import Simulation
from shoal.strategies import Sync
from shoal.testing.problems import Slope

LINK = LinkCost(latency=1e-3, seconds_per_byte=8e-9)
WAYS = ["auto", "stripes", *ALGORITHMS]


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def averaged(steps, codec=Steps(), way="auto", like=None, network=None):  # noqa: B008
    """What each worker has after each step, which is a vector and a weight for each worker; and the run."""
    workers, out = len(steps[0]), [[] for _ in steps[0]]
    mean = choose_mean(way, None, codec, workers, LINK)

    class Averaging(Sync):
        async def worker(self, w):
            for step in steps:
                v, weight = step[w.rank]
                given = v.clone()
                out[w.rank].append(await mean(w.engine.group, v, weight))
                assert torch.equal(v, given) or v.isnan().any()

    like = steps[0][0][0] if like is None else like
    simulation = Simulation(
        Averaging(),
        lambda rank: Slope(gradients=(0.0,)).replica(rank, torch.zeros_like(like)),
        workers=workers,
        steps=1,
        codec=codec,
        mean=mean,
        **({} if network is None else {"network": network}),
    )
    return out, simulation.run()


# -- a codec of a user's own -----------------------------------------------------------------------

# Weights 1 and 3: (126, 2, -60) and (126, 3, -3). The largest is 126, of 127 // 2 = 63 steps: a step is 2.
# Numbers (63, 1, -30) and (63, 2, -2), for 1.5 is rounded to 2; their sum (126, 3, -32) times 2 / 4. Worker 1
# lacks 1 - 2 x 2 / 3 and -1 + 2 x 2 / 3. Those are given with zeros: -1 and 1 by weight, in steps of 1 / 63.
UNEVEN = [
    [(vector(126, 2, -60), 1.0), (vector(42, 1, -1), 3.0)],
    [(vector(0, 0, 0), 1.0), (vector(0, 0, 0), 3.0)],
]


@pytest.mark.parametrize("way", WAYS)
def test_a_codec_of_ones_own_is_added_up_on_the_way_by_hand(way):
    out, simulation = averaged(UNEVEN, way=way)
    for (first, total), (second, _) in out:
        assert total == 4.0
        assert first.tolist() == [63.0, 1.5, -16.0]
        assert torch.allclose(second, vector(0, -0.25, 0.25), rtol=1e-12)
    for rank in (0, 1):
        ((key, state),) = simulation.worker(rank).coding.states.items()
        assert key == "in flight 3 "
        assert torch.allclose(state[REST], vector(0, 0, 0), atol=1e-12)


def test_what_was_lacking_is_kept_as_the_state_of_the_worker_that_lacks_it():
    _, simulation = averaged(UNEVEN[:1])
    kept = [simulation.worker(k).coding.states["in flight 3 "][REST] for k in (0, 1)]
    assert kept[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.allclose(kept[1], vector(0, -1 / 3, 1 / 3), rtol=1e-12)


@pytest.mark.parametrize("nothing", [0.0, PRESENT])
def test_who_gives_nothing_keeps_what_it_lacked(nothing):
    out, simulation = averaged([UNEVEN[0], [(vector(2, 0, 0), 1.0), (vector(0, 0, 0), nothing)]])
    average, total = out[0][1]
    assert total == 1.0 and torch.allclose(average, vector(2, 0, 0))
    kept = simulation.worker(1).coding.states["in flight 3 "][REST]
    assert torch.allclose(kept, vector(0, -1 / 3, 1 / 3), rtol=1e-12)


def test_without_any_weight_there_are_zeros_and_the_state_stays():
    out, simulation = averaged([UNEVEN[0], [(v, 0.0) for v, _ in UNEVEN[1]], UNEVEN[1]])
    for (_, total), (none, nothing), (second, _) in out:
        assert (total, nothing) == (4.0, 0.0) and not none.any()
        assert torch.allclose(second, vector(0, -0.25, 0.25), rtol=1e-12)
    # each average has a message for the scale and one for the numbers; that without weight only the first
    assert simulation.worker(0).meter.messages_sent == averaged(UNEVEN)[1].worker(0).meter.messages_sent + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_everywhere_and_leaves_no_trace(bad):
    out, simulation = averaged([[(vector(1, 2, bad), 1.0), (vector(1, 2, 3), 1.0)]])
    for [(average, _)] in out:
        assert not average.isfinite().any()
    assert not simulation.worker(0).coding.states


def test_bytes_are_counted_once():
    many = [[(torch.ones(1000), 1.0)] * 4]
    meter = averaged(many, way="butterfly")[1].worker(0).meter
    assert meter.bytes_sent == 2 * (HEADER_BYTES + 4) + 2 * (HEADER_BYTES + 1000)
    assert (meter.dense_bytes, meter.coded_bytes) == (round(1.5 * 4000), round(1.5 * 1004))


def test_parts_that_are_averaged_later_go_in_stripes():
    codec, done = Steps(), []
    mean = choose_mean("auto", None, codec, 2, LINK)

    class Later(Sync):
        async def worker(self, w):
            exchange = await mean.start(w.engine.group, vector(127, 3), 1.0, 0, "part ")
            done.append((await exchange.finish(), [*w.engine.coding.states]))

    Simulation(
        Later(),
        lambda rank: Slope(gradients=(0.0,)).replica(rank, vector(0, 0)),
        workers=2,
        steps=1,
        codec=codec,
        mean=mean,
    ).run()
    for (average, total), keys in done:
        assert total == 2.0 and torch.allclose(average, vector(127, 3), rtol=1e-12)
        assert all(key.startswith("part ") for key in keys)


def test_the_page_on_extending_shows_this_codec():
    source = Path(__file__).parents[1] / "support" / "own_codec.py"
    text = source.read_text()
    page = Path(__file__).parents[2] / "docs" / "extending.md"
    assert text[text.index("@dataclass") :] in page.read_text()


# -- the reductions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program(Codec):
    """A codec whose average is a function; its payloads lose everything."""

    average_of: object = None
    in_flight = True

    def encode(self, v, state):
        return (), state

    def decode(self, payload, out):
        expect(payload)
        return out.zero_()

    async def average(self, v, state, workers):
        return await self.average_of(v, workers), state


def programmed(program, vectors, weights=None, way="auto", **options):
    weights = weights or [1.0] * len(vectors)
    return averaged([[*zip(vectors, weights, strict=True)]], Program(program), way, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_is_not_compressed_although_the_codec_would(way):
    async def program(v, workers):
        return await workers.mean(v * 1.0)

    out, _ = programmed(program, [vector(1, 2, 3), vector(5, 6, 8)], [1.0, 3.0], way)
    for [(average, total)] in out:
        assert total == 4.0 and torch.allclose(average, vector(4, 5, 6.75), rtol=1e-12)


def test_a_vector_that_is_averaged_as_it_is_counts_as_not_compressed():
    async def program(v, workers):
        return await workers.mean(v)

    out, simulation = programmed(program, [vector(1, 2, 3), vector(3, 2, 5)])
    assert out[0][0][0].tolist() == [2.0, 2.0, 4.0]
    assert simulation.worker(0).meter.coded_bytes == simulation.worker(0).meter.dense_bytes == 0
    assert not simulation.worker(0).coding.states


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_is_exact_in_every_whole_dtype_and_fetches_the_weights_itself(way):
    seen = {}

    async def program(v, workers):
        for dtype in (torch.int8, torch.int32, torch.int64):
            seen[dtype] = await workers.sum(v.to(dtype))
            assert workers.total == 6.0
        return v

    programmed(program, [vector(1, -40), vector(2, -40), vector(3, -40)], [1.0, 2.0, 3.0], way)
    for dtype, summed in seen.items():
        assert summed.dtype == dtype and summed.tolist() == [6, -120]


def test_a_maximum_is_that_of_each_element_and_shows_what_is_no_number():
    async def program(v, workers):
        return await workers.largest(v)

    nan = float("nan")
    vectors = [vector(1, -2, nan, 4), vector(2, -3, 5, -1), vector(0, -4, 6, nan)]
    for [(most, _)] in programmed(program, vectors)[0]:
        assert most[:2].tolist() == [2.0, -2.0] and most[2:].isnan().all()


def test_what_is_given_is_taken_in_the_order_of_ranks_with_weights():
    async def program(v, workers):
        await workers.give("first", (v, v[:1].to(torch.int64)))
        await workers.give("second", (2 * v,))
        average = await workers.mean(v[:1] * 1.0)  # while all that is on its way
        first, second = await workers.take("first"), await workers.take("second")
        assert [given.weight for given in first] == [given.weight for given in second] == [1.0, 2.0, 5.0]
        assert [given.parts[1].item() for given in first] == [1, 2, 3]
        assert [given.parts[0].item() for given in second] == [2.0, 4.0, 6.0]
        assert workers.total == 8.0
        return average

    out, simulation = programmed(program, [vector(1), vector(2), vector(3)], [1.0, 2.0, 5.0])
    assert torch.allclose(out[0][0][0], vector((1 + 4 + 15) / 8))
    # 16 and 8 bytes to two others, and an average of 8; instead of an average of 8
    assert simulation.worker(0).meter.coded_bytes == 2 * 24 + round(4 / 3 * 8)
    assert simulation.worker(0).meter.dense_bytes == round(4 / 3 * 8)


def test_gives_of_one_tag_are_taken_oldest_first():
    async def program(v, workers):
        for number in (1, 2):
            await workers.give("again", (number * v,))
        taken = [[given.parts[0].item() for given in await workers.take("again")] for _ in range(2)]
        assert taken == [[1.0, 10.0], [2.0, 20.0]]
        return v

    programmed(program, [vector(1), vector(10)])


def test_the_total_is_known_after_a_reduction_only():
    async def program(v, workers):
        with pytest.raises(RuntimeError, match="known after the first reduction"):
            workers.total  # noqa: B018
        return v

    for [(_, total)] in programmed(program, [vector(1), vector(2)], [1.0, 2.0])[0]:
        assert total == 3.0  # whatever the codec reduces, or not


def test_vectors_of_different_lengths_are_refused():
    async def program(v, workers):
        return await workers.largest(v)

    with pytest.raises(WireError, match="arrived where"):
        programmed(program, [vector(1, 2), vector(1)])


# -- the choice ------------------------------------------------------------------------------------


class Reduces:
    async def all_reduce(self, v, timeout=None): ...


def test_it_stands_on_what_would_be_chosen_without_a_codec():
    assert choose_mean("auto", None, Steps(), 4)._mean is stripes
    reduced = choose_mean("auto", Reduces(), Steps(), 4)
    assert isinstance(reduced._mean, Native) and reduced._add_up is native
    striped = choose_mean("stripes", Reduces(), Steps(), 4)
    assert striped._mean is stripes and striped._add_up is not native
    assert choose_mean("ring", None, Steps(), 4)._add_up is ALGORITHMS["ring"].sum
    with pytest.raises(Unavailable, match="this transport has none; take 'auto'"):
        choose_mean("native", None, Steps(), 4)
    assert not isinstance(InFlight(Native(), native), Merges)


def test_a_codec_says_itself_where_it_fits():
    @dataclass(frozen=True)
    class Lossy(Program):
        in_flight = False

    @dataclass(frozen=True)
    class Shared(Program):
        needs_all = True

    assert Identity().in_flight and not Lossy().in_flight
    with pytest.raises(ValueError, match=r"is not exact; take 'stripes'"):
        check_collective("ring", Lossy())
    with pytest.raises(ValueError, match=r"needs all workers at once; take 'auto'"):
        check_collective("stripes", Shared())
    check_collective("ring", Shared())


@pytest.mark.parametrize("tag", ["swap", "stripe", "average", "lost", "ack"])
def test_a_tag_of_a_codec_is_its_own_whatever_others_call_theirs(tag):
    async def program(v, workers):
        await workers.give(tag, (10 * v,))
        most, average = await workers.largest(v), await workers.mean(v * 1.0)
        assert [given.parts[0].item() for given in await workers.take(tag)] == [10.0, 30.0]
        return most + average

    for [(result, _)] in programmed(program, [vector(1), vector(3)])[0]:
        assert result.item() == 5.0


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_may_have_another_dtype_than_the_model(way):
    async def program(v, workers):
        average = await workers.mean(v.float())
        assert average.dtype == torch.float32
        return average.to(v.dtype)

    for [(average, _)] in programmed(program, [vector(1, 2), vector(3, 6)], way=way)[0]:
        assert average.tolist() == [2.0, 4.0]


def test_what_was_given_to_an_average_without_weight_is_not_found_by_the_next():
    async def program(v, workers):
        await workers.give("a", (v,))
        await workers.give("b", (v,))
        await workers.take("a")
        return sum(given.parts[0] for given in await workers.take("b"))

    steps = [[(vector(7), 0.0), (vector(8), 0.0)], [(vector(1), 1.0), (vector(2), 1.0)]]
    for (nothing, weight), (second, _) in averaged(steps, Program(program))[0]:
        assert (nothing.item(), weight, second.item()) == (0.0, 0.0, 3.0)


def test_giving_without_taking_and_taking_without_giving_are_refused():
    async def gives(v, workers):
        await workers.give("a", (v,))
        return await workers.mean(v * 1.0)

    async def takes(v, workers):
        return (await workers.take("a"))[0].parts[0]

    with pytest.raises(RuntimeError, match="gave a to the workers and never took it"):
        programmed(gives, [vector(1), vector(2)])
    with pytest.raises(RuntimeError, match="nothing was given as 'a' in this average"):
        programmed(takes, [vector(1), vector(2)])


def test_workers_without_samples_of_their_own_still_have_an_average():
    out, _ = averaged([[(vector(0.3, 0.1), PRESENT), (vector(0.5, 0.1), PRESENT)]])
    for [(average, _)] in out:
        assert torch.allclose(average, vector(0.4, 0.1), atol=0.01)


def test_an_exact_codec_keeps_its_state():
    @dataclass(frozen=True)
    class Counting(Codec):
        exact = True

        def init(self, like, seed=0):
            return {"n": torch.zeros(1)}

        def encode(self, v, state):
            return (v.clone(),), {"n": state["n"] + 1}

        def decode(self, payload, out):
            return expect(payload, (out.dtype, out.numel()))[0]

    steps = [[(vector(1, 2), 1.0), (vector(3, 6), 1.0)]] * 2
    _, simulation = averaged(steps, Counting(), "stripes")
    assert {float(state["n"]) for state in simulation.worker(0).coding.states.values()} == {2.0}
