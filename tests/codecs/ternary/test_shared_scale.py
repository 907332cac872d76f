"""Trits on a scale that all workers share: sums are whole numbers, whoever forms them."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.codecs import CODECS, ByLayer, Ternary, packing
from shoal.codecs.ternary.shared_scale import SharedTrits, field
from shoal.collectives import LinkCost
from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.engine.averages import PRESENT
from shoal.kernels import dispatch
from shoal.launch.join import check_collective, choose_mean
from shoal.sim import Network, Simulation
from shoal.strategies import STRATEGIES, Sync
from shoal.testing import blobs, simulate
from shoal.testing.problems import Slope
from shoal.vocabulary.strategy import Sends, Setting

SHARED = Ternary(clip=0, shared=True)
LINK = LinkCost(latency=1e-3, seconds_per_byte=8e-9)
WAYS = ["auto", "butterfly", "rabenseifner", "ring", "tree"]


def simulated(strategy, like, workers, codec, mean=None, **options):
    """The run of a strategy whose workers have a model like that, and average on a shared scale."""
    simulation = Simulation(
        strategy,
        lambda rank: Slope(gradients=(0.0,)).replica(rank, torch.zeros_like(like)),
        workers=workers,
        steps=1,
        codec=codec,
        mean=mean or choose_mean("auto", None, codec, workers, LINK),
        **options,
    )
    simulation.run()
    return simulation


def averaged(vectors, weights=None, codec=SHARED, way="auto", rounds=1, seed=0):
    """What each worker has after the last of so many averages, and the nodes."""
    workers, weights = len(vectors), weights or [1.0] * len(vectors)
    out = [[] for _ in vectors]

    class Averaging(Sync):
        async def worker(self, w):
            for _ in range(rounds):
                out[w.rank].append(
                    await w.engine.averages._mean(w.engine.group, vectors[w.rank].clone(), weights[w.rank])
                )

    mean = choose_mean(way, None, codec, workers, LINK)
    network = Network.parse("1Gbit,1ms")
    return out, simulated(Averaging(), vectors[0], workers, codec, mean, seed=seed, network=network)


def normal(length, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_whole_on_the_shared_scale_arrives_exactly(way, workers):
    # the largest is 4, so that 4, 0 and -4 are drawn for certain
    vectors = [4 * torch.tensor([1.0, 0.0, -1.0, float(k == 0), -float(k < 2)]) for k in range(workers)]
    out, _ = averaged(vectors, way=way)
    expected = torch.stack(vectors).mean(0)
    for [(average, total)] in out:
        assert total == workers
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=0)


def test_the_scale_is_the_largest_weighted_one_by_hand():
    # weights 1 and 3: scales 1 x 6 and 3 x 1, so 6; the second worker's -1 is drawn as -3 of 6, or -6
    one, other = torch.tensor([6.0, 0.0]), torch.tensor([0.0, -1.0])
    seen = set()
    for seed in range(40):
        out, _ = averaged([one, other], [1.0, 3.0], seed=seed)
        [(average, total)] = out[0]
        assert total == 4 and average[0] == 1.5
        seen.add(average[1].item())
    assert seen == {0.0, -1.5}  # half of the time each, so that the mean is -3 / 4


def test_all_workers_have_the_same_bits_and_nothing_is_drawn_on_the_way_back():
    vectors = [normal(5000, seed) for seed in range(6)]
    out, _ = averaged(vectors)
    averages = [average for [(average, _)] in out]
    assert all(torch.equal(averages[0], other) for other in averages)
    scale = torch.stack([v[:2048].abs().max() for v in vectors]).max()
    numbers = averages[0][:2048] * 6 / scale
    torch.testing.assert_close(numbers, numbers.round(), rtol=0, atol=1e-5)
    assert numbers.round().unique().tolist() == [
        *range(-int(-numbers.min().round()), int(numbers.max().round()) + 1)
    ]


@pytest.mark.soak
def test_on_average_it_is_the_average():
    """1,000 draws of each of 64 elements: within 5 standard errors, which all but one in 10^6 are."""
    vectors = [normal(64, seed) for seed in (1, 2, 3)]
    weights, rounds = [1.0, 2.0, 5.0], 1000
    out, _ = averaged(vectors, weights, rounds=rounds)
    mean = torch.stack([average for average, _ in out[0]]).mean(0)
    scaled = torch.stack([w * v for w, v in zip(weights, vectors, strict=True)])
    scale = scaled.abs().max()
    spread = ((scaled.abs() * scale - scaled**2).sum(0) / rounds).sqrt() / 8
    assert ((mean - scaled.sum(0) / 8).abs() <= 5 * spread + 1e-6).all()


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", ["residual", "double"])
def test_what_was_sent_and_what_is_kept_is_what_was_given(feedback):
    vectors, weights, rounds = [normal(5000, seed) for seed in range(3)], [1.0, 2.0, 1.0], 7
    out, simulation = averaged(vectors, weights, Ternary(feedback=feedback, shared=True), rounds=rounds)
    (kept,) = {key for node in map(simulation.worker, range(3)) for key in node.coding.states}
    rests = [simulation.worker(k).coding.states[kept]["rest"] for k in range(3)]
    given = sum(rounds * w * v for w, v in zip(weights, vectors, strict=True))
    left = sum(w * rest for w, rest in zip(weights, rests, strict=True))
    arrived = 4 * sum(average for average, _ in out[0])
    torch.testing.assert_close(arrived + left, given, rtol=1e-4, atol=1e-3)
    assert max(rest.abs().max() for rest in rests) > 0.1


def test_who_has_no_weight_keeps_what_it_lacked():
    out, simulation = averaged(
        [normal(300), normal(300, 1)], [1.0, 0.0], Ternary(feedback="residual", shared=True)
    )
    assert out[0][0][1] == 1.0
    (state,) = simulation.worker(1).coding.states.values()
    assert "rest" not in state and int(state["counter"]) == 0


@pytest.mark.parametrize("weights", [[PRESENT, PRESENT], [1.0, PRESENT], [1.0, 0.0]])
def test_who_gives_nothing_keeps_what_it_lacks_for_another_time(weights):
    codec, vectors = Ternary(feedback="residual", shared=True), [normal(300), normal(300, 1)]
    mean, seen = choose_mean("auto", None, codec, 2, LINK), []

    class Pausing(Sync):
        async def worker(self, w):
            await mean(w.engine.group, vectors[w.rank], 1.0)
            (before,) = (dict(state) for state in w.engine.coding.states.values())
            average, _ = await mean(w.engine.group, torch.zeros(300), weights[w.rank])
            (after,) = w.engine.coding.states.values()
            seen.append((w.rank, average, torch.equal(before["rest"], after["rest"])))

    simulated(Pausing(), vectors[0], 2, codec, mean)
    for rank, average, is_kept in seen:
        assert is_kept == (weights[rank] <= PRESENT)
        assert bool(average.any()) == (1.0 in weights)  # of what nobody gives, nothing arrives


def test_elements_that_are_tiny_beside_no_weight_vanish():
    vectors = [torch.tensor([1e-9, 0.0, 0.0]), torch.tensor([0.0, 1e-9, 0.0])]
    [(average, total)] = averaged(vectors, [PRESENT, PRESENT])[0][0]
    assert total == 2 * PRESENT and not average.any()


def test_without_any_weight_there_are_zeros():
    [(average, total)] = averaged([normal(300), normal(300, 1)], [0.0, 0.0])[0][1]
    assert total == 0.0 and not average.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_everywhere_and_leaves_no_trace(bad):
    codec, vectors = Ternary(feedback="residual", shared=True), [normal(5000, seed) for seed in (1, 2)]
    vectors[0][3000] = bad
    out, simulation = averaged(vectors, codec=codec)
    for rank in range(2):
        [(average, _)] = out[rank]
        assert average[2048:4096].isnan().all() and average[:2048].isfinite().all()
        (state,) = simulation.worker(rank).coding.states.values()
        assert "rest" not in state


# -- with and without kernels ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 300, 2048, 5000])
@pytest.mark.parametrize("clip", [0, 2.5])
def test_kernels_draw_what_the_lines_of_torch_draw(monkeypatch, clip, length):
    codec = Ternary(clip=clip, shared=True)
    vectors = [(8 * normal(length, seed)).round() for seed in range(3)]  # sums of squares are exact
    fast = averaged(vectors, codec=codec)[0][0][0][0]
    monkeypatch.setattr(dispatch, "_has_numba", lambda: False)
    slow = averaged(vectors, codec=codec)[0][0][0][0]
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workers", [8, 130])
@pytest.mark.parametrize("block", [100, 2048])
def test_many_workers_and_blocks_of_any_length(workers, block):
    vectors = [3 * torch.tensor([-1.0, 1.0, float(k % 2), 0.0] * 60) for k in range(workers)]
    [(average, total)] = averaged(vectors, codec=Ternary(clip=0, block=block, shared=True), way="tree")[0][-1]
    assert total == workers
    torch.testing.assert_close(average, torch.stack(vectors).mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(dtype):
    vectors = [torch.tensor([2.0, 0.0, -2.0], dtype=dtype)] * 3
    [(average, _)] = averaged(vectors)[0][0]
    assert average.dtype == dtype and torch.allclose(average, vectors[0])


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fields_that_are_widened_hold_the_same_numbers(bits, length):
    numbers = torch.randint(2**bits, (length,), generator=torch.Generator().manual_seed(bits))
    wide = packing.widened(packing.packed(numbers, bits), bits)[: packing.words(length, 2 * bits)]
    assert torch.equal(wide, packing.packed(numbers, 2 * bits))
    assert torch.equal(packing.numbers(wide, 2 * bits, length).long(), numbers)


@pytest.mark.parametrize(("workers", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8), (128, 16)])
def test_a_field_holds_the_sum_of_all_workers(workers, bits):
    assert field(workers) == bits


def test_bytes_are_those_of_the_formula():
    out, simulation = averaged([normal(8192, seed) for seed in range(4)], way="butterfly")
    meter = simulation.worker(0).meter
    assert meter.messages_sent == 4
    # two rounds each: of 4 scales, and of 4 bits an element
    assert meter.bytes_sent == 2 * (4 * 4 + 8192 // 2) + 4 * Message("swap").nbytes
    assert len(out) == 4


# -- where it fits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", STRATEGIES)
def test_it_is_for_those_who_average_over_all_workers(word):
    strategy = STRATEGIES.make(word)
    if strategy.servers or strategy.survives or strategy.sends is Sends.COMPRESSED:
        with pytest.raises(ValueError, match=r"needs an average over all workers|would do nothing"):
            strategy.check(Setting(4, SHARED))
    else:
        strategy.check(Setting(1 if word == "single" else 4, SHARED))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"stripes.*take 'auto'"):
        check_collective("stripes", SHARED)
    with pytest.raises(ValueError, match="cannot do that for some layers only"):
        ByLayer(large="ternary:shared=true")
    assert CODECS.read("ternary:shared=true").shared


def test_in_stripes_it_would_not_be_shared():
    with pytest.raises(
        ValueError, match="needs all workers at once, and each stripe is averaged at one worker"
    ):
        simulate(Sync(), Slope(), workers=2, steps=1, codec=SHARED)


def test_a_worker_that_dies_is_named():
    class Dying(Sync):
        async def worker(self, w):
            if w.rank == 1:
                return
            with pytest.raises(PeerLost, match="worker 1"):
                await w.engine.averages._mean(w.engine.group, torch.zeros(4), 1.0)

    simulated(Dying(), torch.zeros(4), 2, SHARED)


# -- runs ------------------------------------------------------------------------------------------


def weights(strategy="sync", **options):
    codec = Ternary(feedback="residual", shared=True)
    result = shoal.run(blobs(), strategy, codec=codec, **options)
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize("strategy", [shoal.Sync(), shoal.DiLoCo(period=4)], ids=lambda s: type(s).__name__)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim"}
    weights(strategy, epochs=1, checkpoint=tmp_path, **settings)
    resumed = weights(strategy, epochs=3, checkpoint=tmp_path, **settings)
    assert torch.equal(resumed, weights(strategy, epochs=3, **settings))


@pytest.mark.slow
def test_sums_are_exact_so_that_all_transports_and_ways_to_sum_give_the_same_bits():
    virtual = weights(workers=2, epochs=2, transport="sim")
    assert torch.equal(weights(workers=2, epochs=2, transport="processes", collective="ring"), virtual)
    assert torch.equal(weights(workers=2, epochs=2, transport="gloo", collective="native"), virtual)


def test_parts_of_a_model_that_are_averaged_by_turns_remember_what_is_theirs():
    parts, rounds = {"a": normal(300), "b": normal(300, 1)}, 5
    codec, arrived = Ternary(feedback="residual", shared=True), dict.fromkeys(("a", "b"), 0)
    mean = choose_mean("auto", None, codec, 2, LINK)

    class Parts(Sync):
        async def worker(self, w):
            for number in range(rounds):
                under_way = {
                    key: await mean.start(w.engine.group, v, 1.0, number, key) for key, v in parts.items()
                }
                for key, exchange in under_way.items():
                    await exchange.progress()
                    average, total = await exchange.finish()
                    assert total == 2
                    arrived[key] = arrived[key] + average / 2  # there are two workers to add it

    simulation = simulated(Parts(), parts["a"], 2, codec, mean)
    for key, v in parts.items():
        rests = [simulation.worker(k).coding.states[f"shared scale 300 {key}"]["rest"] for k in range(2)]
        torch.testing.assert_close(arrived[key] + sum(rests) / 2, rounds * v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [2048, 3000])
def test_the_vector_is_left_as_it_was(length):
    codec, v = Ternary(feedback="residual", shared=True), normal(length)
    given, scaled = v.clone(), SharedTrits(codec, v, 1.0, 1, codec.init(v))
    average, state = scaled.finish(scaled.words(scaled.scales()), 1.0)
    assert torch.equal(v, given)
    torch.testing.assert_close(average + state["rest"], given)
