"""CHOCO-SGD: worked out on paper, and its identities."""

from dataclasses import dataclass

import pytest
import torch
from central import Drawn
from gossiping import ends, graph, watch

from shoal.codecs import FP16
from shoal.codecs.wire import HEADER
from shoal.core.codec import Codec, expect
from shoal.sim import Compute, Network
from shoal.strategies import CHOCO, DPSGD, Single
from shoal.testing.problems import Quadratic, simulate


@dataclass(frozen=True)
class Halves(Codec):
    """Loses half of every number."""

    def encode(self, v, state):
        return (v / 2,), state

    def decode(self, payload, out):
        (half,) = expect(payload, (out.dtype, out.numel()))
        return out.copy_(half)


@dataclass(frozen=True)
class TopOne(Codec):
    """The element that is largest; nothing of the others."""

    def encode(self, v, state):
        place = v.abs().argmax().reshape(1)
        return (place, v[place]), state

    def decode(self, payload, out):
        place, value = payload
        out.zero_()[place] = value
        return out


def test_two_workers_whose_codec_loses_half_by_hand():
    # targets 0 and 4, lr, gamma and shares 1/2; copies begin at 0, and half of each difference arrives
    x, copies, expected = [8.0, 0.0], [0.0, 0.0], []
    for _ in range(4):
        x = [x[0] - 0.5 * (x[0] - 0), x[1] - 0.5 * (x[1] - 4)]
        copies = [copies[k] + (x[k] - copies[k]) / 2 for k in (0, 1)]
        x = [x[k] + 0.5 * 0.5 * (copies[1 - k] - copies[k]) for k in (0, 1)]
        expected.append(x)
    _, paths = watch(
        CHOCO(rate=0.5), [8.0, 0.0], Quadratic(lr=0.5, targets=(0.0, 4.0)), steps=4, codec=Halves()
    )
    assert [paths.at(t) for t in range(4)] == expected
    assert expected[0] == [4 + (1 - 2) / 4, 2 + (2 - 1) / 4]
    assert paths.of("own copy", 3) == copies


def test_neighbours_have_the_same_copies():
    _, paths = watch(CHOCO(rate=0.5), [64.0, 0.0, 3.0], steps=6, codec=Halves())
    for t in range(6):
        for k in range(3):
            for other in {0, 1, 2} - {k}:
                assert paths.kept[other][t][f"copy of {k}"] == paths.kept[k][t]["own copy"]


@pytest.mark.parametrize("workers", [2, 4])
def test_with_an_exact_codec_and_a_whole_rate_it_is_dpsgd(workers):
    # mixing after the step; shares of 1/2 and 1/4 are exact
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(0.0, 4.0, 5.0, -3.0))
    options = {"workers": workers, "steps": 9, "start": [8.0]}
    mixed = simulate(DPSGD(topology="complete", overlap=False), problem, **options)
    assert torch.equal(
        simulate(CHOCO("complete", rate=1.0), problem, **options).worker(0).x, mixed.worker(0).x
    )


@pytest.mark.parametrize("topology", ["ring", "torus", "complete"])
def test_so_it_is_to_rounding_on_any_graph_and_any_gradients(topology):
    options = {"workers": 6, "steps": 20, "start": [0.9, -0.4, 0.2]}
    mixed = simulate(DPSGD(topology=topology, overlap=False), Drawn(lr=0.1, momentum=0.5), **options)
    same = simulate(CHOCO(topology=topology, rate=1.0), Drawn(lr=0.1, momentum=0.5), **options)
    torch.testing.assert_close(same.worker(0).x, mixed.worker(0).x, rtol=0, atol=5e-15)


@pytest.mark.parametrize("codec", [None, Halves()], ids=["exact", "lossy"])
def test_mixing_alone_conserves_the_sum_exactly_whatever_the_codec_loses(codec, tmp_path):
    star = CHOCO(topology=graph(tmp_path, ["0 1", "0 2", "0 3"]), rate=0.5)
    rough = {"compute": Compute(1.0, jitter=0.5), "network": Network(latency=0.25)}
    _, paths = watch(star, [64.0, -1.0, 3.0, 10.0], steps=7, codec=codec, **rough)
    assert [sum(paths.at(t)) for t in range(7)] == [76.0] * 7


def test_what_the_codec_loses_comes_later_so_all_meet_at_the_mean():
    places = [float(k * k) for k in range(4)]
    _, paths = watch(CHOCO(rate=0.3), places, steps=120, codec=Halves())
    assert paths.at(119) == pytest.approx([sum(places) / 4] * 4, rel=1e-6)


@pytest.mark.slow
def test_one_number_in_four_is_enough():
    options = {"workers": 4, "steps": 400, "start": [9.0, -7.0, 5.0, 3.0]}
    problem = Quadratic(lr=0.05, targets=(0.0, 4.0, 2.0, -2.0))
    run = simulate(CHOCO(rate=0.2), problem, codec=TopOne(), **options)
    assert run.worker(0).x.tolist() == pytest.approx([1.0] * 4, abs=1e-6)


def test_at_the_end_models_are_averaged_exactly_though_the_codec_is_lossy():
    run, paths = watch(CHOCO(rate=0.5), [8.0, 1.0, -3.0, 6.0], steps=2, codec=Halves())
    assert len(set(paths.at(1))) == 4
    assert ends(run) == [3.0] * 4


def test_a_codec_saves_what_it_saves():
    places = {"workers": 2, "steps": 10, "start": [0.5] * 1000}
    exact, half = (simulate(CHOCO(), Quadratic(lr=0.1), codec=codec, **places) for codec in (None, FP16()))
    saved = exact.worker(0).meter.bytes_sent - half.worker(0).meter.bytes_sent
    assert saved == 10 * (1000 * (8 - 2) - HEADER.size)


def test_the_rate_is_one_or_a_half_unless_given():
    options = {"workers": 3, "steps": 5, "start": [8.0]}
    problem = Quadratic(lr=0.25, targets=(0.0, 4.0, 5.0))
    for codec, rate in ((None, 1.0), (FP16(), 0.5)):
        default = simulate(CHOCO(), problem, codec=codec, **options)
        assert default.digest() == simulate(CHOCO(rate=rate), problem, codec=codec, **options).digest()


def test_one_worker_is_single_bit_for_bit():
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(CHOCO(), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
        ({"topology": "exponential"}, "one way only"),
        ({"topology": "random"}, "'random' changes from round to round, and CHOCO keeps copies"),
    ],
)
def test_options_that_cannot_work_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        CHOCO(**options)
