"""Streaming DiLoCo: worked out on paper, and its identities."""

from dataclasses import dataclass

import pytest
import torch
from blockwise import Bowls
from ending import simulate_loops
from torch import nn

from shoal.codecs import CODECS
from shoal.codecs.halves.codec import FP16
from shoal.collectives import ALGORITHMS, averaging
from shoal.core.task import Data, Task
from shoal.core.vector import fragments
from shoal.engine.engine import Instrument
from shoal.replicas.module import build_model, build_replica
from shoal.sim import Compute, Network
from shoal.strategies import DiLoCo, Local, StreamingDiLoCo
from shoal.testing.problems import Slope, simulate
from shoal.vocabulary.node import Node

# Two workers that go down a slope of 1 and of 3 with rate 1/2, in both of two elements.
SLOPES = Slope(lr=0.5, gradients=(1.0, 3.0))
BITS = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))  # no short binary form: bits, not numbers
HALVES = {"fragments": 2, "rate": 0.5, "momentum": 0.5}  # of a vector of two elements: one each


class Seen(Instrument):
    """Where every worker stands after each step."""

    def __init__(self):
        self.x = {}

    def step(self, node):
        self.x.setdefault(node.rank, []).append(node.x.tolist())


def ends(run):
    return [node.x.tolist() for node in run.nodes]


def solutions(run):
    return [run.strategy.solution(Node(node)).tolist() for node in run.nodes]


# -- by hand ---------------------------------------------------------------------------------------


def test_two_fragments_one_step_of_overlap_and_mixing_by_hand():
    """Fragment 0 is handed over after steps 2, 6, ..., fragment 1 after 4, 8, ...; applied a step later."""
    # fragment 0: both have moved two steps when it is handed over, three when it is applied
    d = ((0 + 2 * 0.5) + (0 + 2 * 1.5)) / 2
    v0 = d
    s0 = 0 - 0.5 * (d + 0.5 * v0)
    a0, b0 = (s0 - 3 * 0.5) / 2, (s0 - 3 * 1.5) / 2  # half the global model, half one's own
    # fragment 1: four steps when it is handed over, five when it is applied
    d = ((0 + 4 * 0.5) + (0 + 4 * 1.5)) / 2
    v1 = d
    s1 = 0 - 0.5 * (d + 0.5 * v1)
    a1, b1 = (s1 - 5 * 0.5) / 2, (s1 - 5 * 1.5) / 2
    # fragment 0 again: three steps since it was applied, and one more meanwhile
    d = ((s0 - (a0 - 3 * 0.5)) + (s0 - (b0 - 3 * 1.5))) / 2
    v0 = 0.5 * v0 + d
    r0 = s0 - 0.5 * (d + 0.5 * v0)
    a2, b2 = (r0 + a0 - 4 * 0.5) / 2, (r0 + b0 - 4 * 1.5) / 2
    after = {
        0: [[-0.5, -0.5], [-1.0, -1.0], [a0, -1.5], [a0 - 0.5, -2.0]],
        1: [[-1.5, -1.5], [-3.0, -3.0], [b0, -4.5], [b0 - 1.5, -6.0]],
    }
    after[0] += [[a0 - 1.0, a1], [a0 - 1.5, a1 - 0.5], [a2, a1 - 1.0], [a2 - 0.5, a1 - 1.5]]
    after[1] += [[b0 - 3.0, b1], [b0 - 4.5, b1 - 1.5], [b2, b1 - 3.0], [b2 - 1.5, b1 - 4.5]]
    assert after[0][2] == [-1.5, -1.5] and after[1][2] == [-3.0, -4.5]
    seen = Seen()
    strategy = StreamingDiLoCo(period=4, overlap=1, mixing=0.5, **HALVES)
    simulate(strategy, SLOPES, workers=2, steps=9, start=[0.0] * 2, observers=[seen])
    assert {rank: path[:8] for rank, path in seen.x.items()} == after


def reference(steps, *, period, overlap, mixing, starts, slopes=(1.0, 3.0), lr=0.5, rate=0.5, momentum=0.5):
    """The algorithm in plain Python, one number a fragment; where the global model stands at the end."""
    fragments = len(starts)
    gap = period // fragments
    start, velocity = list(starts), [0.0] * fragments
    x = [list(starts) for _ in slopes]
    waiting = {}  # step -> (fragment, mean displacement)

    def hand_over(p, at):
        waiting.setdefault(at, []).append((p, sum(start[p] - w[p] for w in x) / len(x)))

    def apply(at):
        for p, d in waiting.pop(at, []):
            velocity[p] = momentum * velocity[p] + d
            start[p] -= rate * (d + momentum * velocity[p])
            for w in x:
                w[p] = (1 - mixing) * start[p] + mixing * w[p]

    for done in range(1, steps + 1):
        for w, slope in zip(x, slopes, strict=True):
            w[:] = [value - lr * slope for value in w]
        if done % gap == 0:
            hand_over((done // gap - 1) % fragments, done + overlap)
        apply(done)
    for at in sorted(waiting):
        apply(at)
    for p in range(fragments):
        if (steps - gap * (p + 1)) % period:
            hand_over(p, None)
    apply(None)
    return start


@pytest.mark.parametrize("steps", range(1, 15))
@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing"), [(2, 1, 0.5), (3, 1, 0.25), (3, 0, 0.5), (2, 2, 0)]
)
def test_at_the_end_all_that_is_under_way_is_finished_and_all_stand_at_the_global_model(
    fragments, overlap, mixing, steps
):
    starts = [4.0, -2.0, 1.0][:fragments]
    strategy = StreamingDiLoCo(
        period=6, fragments=fragments, overlap=overlap, mixing=mixing, rate=0.5, momentum=0.5
    )
    run = simulate(strategy, SLOPES, workers=2, steps=steps, start=starts)
    expected = reference(steps, period=6, overlap=overlap, mixing=mixing, starts=starts)
    assert ends(run) == solutions(run) == [pytest.approx(expected, abs=1e-12)] * 2
    assert ends(run)[0] == ends(run)[1]
    assert [node.merged for node in run.nodes] == [2 * steps] * 2


def test_displacements_are_weighted_by_the_samples_behind_them():
    d = (1 * 1 + 3 * 3) / (1 + 3)
    problem = Slope(lr=0.5, gradients=(1.0, 3.0), counts=(1, 3))
    strategy = StreamingDiLoCo(period=2, fragments=1, overlap=0, mixing=0.0, rate=0.5, momentum=0.5)
    run = simulate(strategy, problem, workers=2, steps=2, start=[0.0])
    assert ends(run) == [[-0.5 * (d + 0.5 * d)]] * 2
    assert run.worker(0).merged == 8


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("warmup", [0, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9, 11])
def test_one_fragment_without_overlap_or_mixing_is_diloco_bit_for_bit(steps, warmup, codec):
    options = {"workers": 3, "steps": steps, "start": [0.7, -0.1, 0.3, 0.2], "codec": CODECS.make(codec)}
    one = {"fragments": 1, "overlap": 0, "mixing": 0.0}
    seen, expected = Seen(), Seen()
    run = simulate(StreamingDiLoCo(period=4, warmup=warmup, **one), BITS, observers=[seen], **options)
    diloco = simulate(DiLoCo(period=4, warmup=warmup), BITS, observers=[expected], **options)
    assert ends(run) == ends(diloco)
    assert solutions(run) == solutions(diloco)
    assert [path[:-1] for path in seen.x.values()] == [path[:-1] for path in expected.x.values()]
    assert [node.merged for node in run.nodes] == [node.merged for node in diloco.nodes]
    sent = [[node.meter.bytes_sent for node in each.nodes] for each in (run, diloco)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("lengths", [(3, 7, 5), (8, 4, 4), (9, 9, 9), (1, 2, 12)])
def test_one_fragment_is_diloco_bit_for_bit_where_loops_end_at_different_steps(lengths):
    streaming = StreamingDiLoCo(period=4, fragments=1, overlap=0, mixing=0.0, warmup=2)
    run = simulate_loops(streaming, BITS, lengths, start=(0.7, -0.1))
    assert ends(run) == ends(simulate_loops(DiLoCo(period=4, warmup=2), BITS, lengths, start=(0.7, -0.1)))
    assert run.worker(0).merged == sum(lengths[k] * BITS.counts[k % 2] for k in range(3))


def test_without_overlap_or_mixing_fragments_do_not_know_of_each_other():
    # each is diloco by itself, with rounds that end at its own turns
    streaming = StreamingDiLoCo(period=2, fragments=2, overlap=0, mixing=0.0, rate=0.5, momentum=0.5)
    run = simulate(streaming, Slope(lr=0.5, gradients=(1.0, 3.0)), workers=2, steps=2, start=[0.0] * 2)
    first = simulate(DiLoCo(1, rate=0.5, momentum=0.5), SLOPES, workers=2, steps=2).worker(0).x.item()
    second = simulate(DiLoCo(2, rate=0.5, momentum=0.5), SLOPES, workers=2, steps=2).worker(0).x.item()
    assert second == run.worker(0).x[1].item()
    assert first == run.worker(0).x[0].item()  # handed over after step 1, and at the end


@pytest.mark.parametrize("overlap", [0, 1])
def test_with_mixing_one_nobody_ever_adopts_the_global_model(overlap):
    seen, alone = Seen(), Seen()
    options = {"workers": 2, "steps": 11, "start": [0.7, -0.1]}
    streaming = StreamingDiLoCo(period=4, fragments=2, overlap=overlap, mixing=1.0)
    run = simulate(streaming, BITS, observers=[seen], **options)
    simulate(Local(period=100), BITS, observers=[alone], **options)
    assert {k: path[:-1] for k, path in seen.x.items()} == {k: path[:-1] for k, path in alone.x.items()}
    assert ends(run) == solutions(run)  # but all end at it
    assert ends(run)[0] == ends(run)[1] != seen.x[0][-2]


def test_workers_with_identical_data_equal_one_worker():
    streaming = StreamingDiLoCo(period=4, fragments=2, overlap=1)
    many, one = (simulate(streaming, Slope(lr=0.5), workers=n, steps=9, start=[1.0, 2.0]) for n in (4, 1))
    assert ends(many) == ends(one) * 4
    assert one.worker(0).meter.messages_sent == 0


@pytest.mark.parametrize("lengths", [(3, 7, 5), (8, 4, 4), (9, 9, 9), (1, 2, 12), (14, 1, 1)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_loops_of_different_lengths_end_with_the_same_model_and_every_sample_in_it(lengths, overlap):
    streaming = StreamingDiLoCo(period=4, fragments=2, overlap=overlap)
    run = simulate_loops(streaming, BITS, lengths, start=(0.7, -0.1))
    assert ends(run) == solutions(run) == ends(run)[:1] * 3
    assert [node.merged for node in run.nodes] == [sum(n * (1 + k % 2) for k, n in enumerate(lengths))] * 3


@pytest.mark.parametrize("collective", ["tree", "ring"])
def test_it_is_the_same_where_averages_cannot_be_formed_meanwhile(collective):
    options = {"workers": 2, "steps": 11, "start": [0.5, -0.25]}
    streaming = StreamingDiLoCo(period=4, overlap=1, mixing=0.5, **HALVES)
    summed = simulate(streaming, SLOPES, mean=averaging(ALGORITHMS[collective].sum), **options)
    assert ends(summed) == ends(simulate(streaming, SLOPES, **options))


# -- fragments -------------------------------------------------------------------------------------


def model():
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)), nn.Linear(2, 1, bias=False))


def data():
    return Data(torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(0, 2), torch.zeros(0, 1))


def fragments_of_a_module(number):
    task = Task("layers", model, data, loss=nn.functional.mse_loss)
    replica = build_replica(task, build_model(task, 0), data(), DiLoCo(), 0, 1, 0)
    return [
        [(s.start, s.stop) for s in each]
        for each in fragments(replica.x.numel(), number, getattr(replica, "layout", None))
    ]


def test_a_fragment_is_every_so_many_th_layer_weights_and_biases_together():
    assert fragments_of_a_module(2) == [[(0, 6), (12, 18), (24, 30)], [(6, 12), (18, 24), (30, 32)]]
    assert fragments_of_a_module(6)[5] == [(30, 32)]


def test_one_fragment_is_the_whole_vector_in_one_piece():
    assert fragments_of_a_module(1) == [[(0, 32)]]


def test_more_fragments_than_layers_are_equal_slices():
    cuts = fragments_of_a_module(7)
    assert [stop - start for ((start, stop),) in cuts] == [4, 5, 4, 5, 4, 5, 5]


def test_a_vector_of_no_known_layers_is_cut_into_equal_slices():
    run = simulate(StreamingDiLoCo(period=4, fragments=2, overlap=0), Slope(), steps=1, start=[0.0] * 5)
    assert Node(run.worker(0)).fragments(2) == [[slice(0, 2)], [slice(2, 5)]]


def test_more_fragments_than_elements_are_refused():
    with pytest.raises(ValueError, match="2 elements cannot be cut into 3 fragments"):
        simulate(StreamingDiLoCo(period=3, fragments=3, overlap=0), Slope(), steps=1, start=[0.0] * 2)


@dataclass(frozen=True)
class Carries(FP16):
    """Half precision that adds what was rounded off to the next vector of the stream."""

    feedback = "double"


@pytest.mark.parametrize("warmup", [0, 2])
def test_every_fragment_has_a_codec_memory_of_its_own(warmup):
    streaming = StreamingDiLoCo(period=4, fragments=2, overlap=1, warmup=warmup)
    run = simulate(streaming, BITS, workers=3, steps=11, start=[0.7, -0.1, 0.3, 0.2, 0.9], codec=Carries())
    assert ends(run) == ends(run)[:1] * 3
    keys = {key for node in run.nodes for key in node.coding.states if key.startswith("fragment")}
    assert {key[:10] for key in keys} == {"fragment 0", "fragment 1"}


def test_with_one_fragment_it_is_also_diloco_s_codec_memory():
    options = {"workers": 3, "steps": 11, "start": [0.7, -0.1, 0.3], "codec": Carries()}
    streaming = StreamingDiLoCo(period=4, fragments=1, overlap=0, mixing=0.0, warmup=2)
    diloco = simulate(DiLoCo(period=4, warmup=2), BITS, **options)
    run = simulate(streaming, BITS, **options)
    assert ends(run) == ends(diloco)
    assert run.worker(0).coding.states.keys() == diloco.worker(0).coding.states.keys()


# -- time ------------------------------------------------------------------------------------------


def seconds(strategy, **network):
    return simulate(
        strategy,
        Slope(),
        workers=2,
        steps=16,
        start=[0.0] * 2000,
        compute=Compute(1.0),
        network=Network(**network),
    ).seconds


def test_with_overlap_the_exchanges_take_no_time_but_those_at_the_end():
    # an average takes two trips of 0.4 s each; the one under way at the end is waited for, and the last one
    options = {"period": 8, "fragments": 2, "mixing": 0.5}
    assert seconds(DiLoCo(period=8), latency=0.4) == pytest.approx(16 + 2 * 0.8)
    assert seconds(StreamingDiLoCo(overlap=0, **options), latency=0.4) == pytest.approx(16 + (4 + 1) * 0.8)
    assert seconds(StreamingDiLoCo(overlap=2, **options), latency=0.4) == pytest.approx(16 + 2 * 0.8)


def test_a_slow_network_is_hidden_too_and_a_fragment_is_shorter_on_its_way_than_the_whole():
    # 16,000 bytes, half of which each worker sends to the other and gets back: a second each way at 8 kB/s
    options = {"period": 8, "fragments": 2, "mixing": 0.5}
    whole = seconds(DiLoCo(period=8), bandwidth=8e3)
    at_once = seconds(StreamingDiLoCo(overlap=0, **options), bandwidth=8e3)
    hidden = seconds(StreamingDiLoCo(overlap=2, **options), bandwidth=8e3)
    assert whole == pytest.approx(16 + 2 * 2, rel=0.01)  # headers
    assert at_once == pytest.approx(16 + (4 + 1) * 1, rel=0.01)
    assert hidden == pytest.approx(16 + 2, rel=0.01)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"fragments": 0}, "fragments=0 must be at least 1"),
        ({"period": 10, "fragments": 3}, "period=10 is no multiple of fragments=3"),
        ({"period": 8, "fragments": 4, "overlap": 2}, "overlap=2 must be below period / fragments = 2"),
        ({"overlap": -1}, "overlap=-1 must be at least 0"),
        ({"mixing": 1.5}, "mixing=1.5 must be at most 1"),
        ({"mixing": float("nan")}, "mixing=nan"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"rate": 0.0}, "rate"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        StreamingDiLoCo(**options)
