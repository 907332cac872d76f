"""What a node encodes: states of streams, feedback where it belongs, and whether it pays."""

from dataclasses import dataclass, field

import pytest
import torch

from shoal.codecs import BF16, CODECS, DGC, FP16, OneBit
from shoal.codecs.wire import HEADER
from shoal.collectives.stripes import cut, stripes
from shoal.core.codec import Codec, expect
from shoal.engine.coding import Coding
from shoal.sim import Network
from shoal.strategies import ASGD, CHOCO, Local, Sync
from shoal.testing.problems import Problem, Quadratic, Slope, simulate
from shoal.vocabulary.strategy import Strategy
from slopes import OneGradient


@dataclass(frozen=True)
class Whole(Codec):
    """Sends whole numbers, rounded down; as floats, so that what is not finite arrives as that."""

    feedback: str = "none"  # type: ignore[assignment]

    def encode(self, v, state):
        return (v.floor().float(),), state

    def decode(self, payload, out):
        (whole,) = expect(payload, (torch.float32, out.numel()))
        return out.copy_(whole)


def moved(feedback, steps, strategy=None):
    """How far two workers with gradients of 3/4 and 5/4 have come down, at a rate of 1."""
    slope = Slope(gradients=(0.75, 1.25))
    run = simulate(strategy or Sync(), slope, workers=2, steps=steps, start=[0.0, 0.0], codec=Whole(feedback))
    return -run.worker(0).x


def test_what_is_lost_is_lost_without_feedback_by_hand():
    # Element 0 is merged by worker 0: its own 3/4 and the other's 1; of 7/8 nothing is left. Element 1 is
    # merged by worker 1: its own 5/4 and the other's 0; of 5/8 nothing is left.
    assert moved("none", 1).tolist() == [0.0, 0.0]
    assert moved("none", 9).tolist() == [0.0, 0.0]


def test_with_feedback_both_errors_come_later_by_hand():
    # what arrives at worker 0: 1, 1, 1, 2, ...; the mean of that and 3/4 is 7/8 three times, then 11/8. They
    # add up to 7/8, 14/8, 21/8 and 4, of which worker 0 has sent the whole part
    assert [moved("residual", steps)[0].item() for steps in (1, 2, 3, 4)] == [0.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("feedback", ["residual", "double"])
def test_with_feedback_nothing_is_lost_but_what_is_under_way(feedback):
    # a step of 1 on average: behind are less than 1 at the sender, halved by the mean, and 1 at the merger
    assert (moved(feedback, 16) >= 16 - 1.5).all()
    assert (moved(feedback, 16) <= 16).all()


class Noisy(Problem):
    """Gradients with a slope of their own at each worker, and noise; wherever the model is."""

    def gradient(self, rank, step, x):
        noise = torch.randn(x.numel(), generator=torch.Generator().manual_seed(97 * step + rank))
        return noise.double() + (rank + 1) * torch.linspace(-1, 1, x.numel(), dtype=torch.float64)


def held_back(run, workers, elements):
    """The compression errors that the workers hold, as they will count in averages to come."""
    held = torch.zeros(elements, dtype=torch.float64)
    for k, own in enumerate(cut(elements, workers)):
        states = run.worker(k).coding.states
        for j, part in enumerate(cut(elements, workers)):
            held[part] += states.get(f"stripe.{j}", {}).get("rest", torch.tensor(0.0)) / workers
        held[own] += states.get("average", {}).get("rest", torch.tensor(0.0))
    return held


@pytest.mark.parametrize(
    "codec",
    [
        "one_bit:column=32,feedback=residual",
        "e3m0:block=16,feedback=residual",
        "int8:block=16,feedback=residual",
        "top_k:density=0.2,feedback=double",
        "by_layer:limit=1,large=e3m0:feedback=residual",
        *(
            pytest.param(codec, marks=pytest.mark.soak)
            for codec in (
                "one_bit:column=32,feedback=double",
                "ternary:block=16,feedback=residual",
                "qsgd:bucket=16,feedback=residual",
                "top_k:density=0.2,feedback=residual",
            )
        ),
    ],
)
@pytest.mark.slow
def test_with_feedback_averages_and_errors_held_add_up_to_the_true_means(codec):
    workers, steps, elements, noisy = 2, 100, 128, Noisy(lr=1.0)
    start, codec = [0.0] * elements, CODECS.read(codec)
    run = simulate(Sync(), noisy, workers=workers, steps=steps, start=start, codec=codec)
    at = torch.zeros(elements)
    given = sum(noisy.gradient(k, t, at) for k in range(workers) for t in range(steps)) / workers
    held = held_back(run, workers, elements)
    assert torch.allclose(held - run.worker(0).x, given, atol=1e-10)  # float64 rounds each of 100 sums
    assert 0 < held.norm() < 0.2 * given.norm()  # those of a few steps


@dataclass(frozen=True)
class Weightless(Strategy):
    """Takes an average of the model with weights, and then one in which no worker has any."""

    async def worker(self, w):
        await stripes(w.engine.group, w.x, 1.0)
        w.x.copy_((await stripes(w.engine.group, w.x, 0.0))[0])


def test_an_average_without_weight_is_zero_and_leaves_the_error_held():
    # worker 0 averages 1 and 2 of its own and 3/2 twice of the other: 1.25 and 1.75, which it sends as 3/2
    run = simulate(Weightless(), Slope(), workers=2, steps=1, start=[1.0, 2.0, 1.0, 2.0], codec=OneBit())
    for k in range(2):
        assert run.worker(k).x.tolist() == [0.0] * 4
        assert run.worker(k).coding.states["average"]["rest"].tolist() == [-0.25, 0.25]


@dataclass(frozen=True)
class Begun(Strategy):
    """Begins averages, one after the other, and notes the error that a checkpoint would hold meanwhile."""

    held: list = field(default_factory=list)

    async def worker(self, w):
        for _ in range(3):
            coming = await w.begin(w.mean(w.x, weight=1.0))
            if w.rank == 0:
                self.held.append(w.engine.coding.state()["stripe.1"].get("rest", torch.zeros(2)).tolist())
            await coming


def test_the_error_in_a_checkpoint_lacks_what_is_under_way():
    # a resumed run begins that average again; of 4 and 1 the 4 is sent, three times
    codec, strategy = CODECS.read("top_k:density=0.5"), Begun()
    run = simulate(strategy, Slope(), workers=2, start=[4.0, 1.0, 4.0, 1.0], codec=codec)
    assert strategy.held == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]
    assert run.worker(0).coding.state()["stripe.1"]["rest"].tolist() == [0.0, 3.0]


def test_choco_feeds_back_by_itself():
    run = simulate(CHOCO(), Slope(), workers=2, steps=3, start=[0.0], codec=Whole("double"))
    assert all("rest" not in state for state in run.worker(0).coding.states.values())


def test_a_push_is_fed_back_too():
    run = simulate(ASGD(), Slope(gradients=(0.75,)), workers=1, steps=4, codec=Whole("residual"))
    assert run.server.x.item() == -3.0
    assert run.worker(0).coding.states["push.1"]["rest"].item() == 0.0


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=repr)
def test_bytes_are_counted_as_often_as_they_are_sent(codec):
    run = simulate(
        Sync(), Quadratic(lr=0.1), workers=4, steps=3, start=[1.0] * 4000, codec=codec, network=Network()
    )
    meter = run.worker(0).meter
    # each step: three stripes of 1000 to the others, and the average of the own one to each of them
    assert meter.dense_bytes == 3 * 6 * 1000 * 8
    assert meter.coded_bytes == 3 * 6 * (1000 * 2 + HEADER.size)
    assert meter.saved_seconds == 0.0  # what a network of no bandwidth's limit takes


def test_what_it_saved_is_what_did_not_travel_in_virtual_time():
    network = Network(bandwidth=1e6)
    settings = {"workers": 2, "steps": 5, "start": [1.0] * 10_000, "network": network}
    dense = simulate(Local(period=1), Quadratic(lr=0.1), **settings)
    half = simulate(Local(period=1), Quadratic(lr=0.1), codec=FP16(), **settings)
    saved = half.worker(0).meter.saved_seconds
    assert saved == pytest.approx(5 * 10_000 * 6 / 1e6, rel=0.01)
    assert dense.seconds - half.seconds == pytest.approx(saved, rel=0.05)
    assert dense.worker(0).meter.saved_seconds == 0.0


def test_a_gradient_that_is_not_finite_leaves_no_trace():
    # the server refuses it, and later ones are taken as if it had not been
    class Hiccup(Slope):
        def gradient(self, rank, step, x):
            return super().gradient(rank, step, x) * (float("nan") if step == 1 else 1)

    run = simulate(ASGD(), Hiccup(gradients=(0.75,)), workers=1, steps=6, codec=Whole("residual"))
    assert run.server.x.item() == -3.0  # 5 x 3/4, of which 3/4 are kept
    assert run.worker(0).coding.states["push.1"]["rest"].item() == 0.75


def test_what_counts_for_nothing_leaves_no_trace_either():
    run = simulate(
        Sync(), Slope(gradients=(0.75,)), workers=2, steps=1, start=[0.0, 0.0], codec=Whole("double")
    )
    coding = run.worker(0).coding
    kept = coding.states["stripe.1"]["rest"].clone()
    coding.encode("stripe.1", torch.ones(1, dtype=torch.float64), 1, counts=False)
    assert torch.equal(coding.states["stripe.1"]["rest"], kept)


def test_what_a_codec_holds_back_counts_once_where_an_average_has_no_sample():
    """Of each half of four elements the larger travels at once, the other in the step after the overflow."""
    problem = OneGradient(gradients=[(4.0, 3.0, 2.0, 1.0)], overflowing=(0, 1))
    options = {"workers": 2, "start": [0.0] * 4, "codec": DGC(density=0.25, momentum=0.0)}
    ends = [simulate(Sync(), problem, steps=steps, **options).worker(0).x.tolist() for steps in (1, 2, 3)]
    assert ends == [[-4.0, 0.0, -2.0, 0.0], [-4.0, 0.0, -2.0, 0.0], [-4.0, -3.0, -2.0, -1.0]]


@pytest.mark.parametrize("word", sorted(CODECS))
def test_a_rehearsal_leaves_nothing_behind(word):
    """It only loads what is compiled: no state, no metered byte, no draw from torch's generator."""
    run = simulate(Sync(), Slope(), workers=2, steps=1, start=[0.0, 0.0])
    channel, drawn = run.worker(0).channel, torch.get_rng_state()
    before = channel.meter.encode_seconds
    coding = Coding(CODECS.make(word), channel, like=torch.zeros(9), rank=0, workers=2)
    coding.rehearse()
    assert not coding.states
    assert channel.meter.encode_seconds == before
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_rehearsal_encodes_adds_up_and_decodes():
    run = simulate(Sync(), Slope(), workers=2, steps=1, start=[0.0, 0.0])
    seen = []

    class Seen(Whole):
        def encode(self, v, state):
            seen.append("encode")
            return super().encode(v, state)

        def decode(self, payload, out):
            seen.append("decode")
            return super().decode(payload, out)

    Coding(Seen("residual"), run.worker(0).channel, like=torch.zeros(9), rank=0, workers=2).rehearse()
    assert seen == ["encode", "encode", "decode", "decode"] * 2  # alone, with feedback, and to read it; twice
