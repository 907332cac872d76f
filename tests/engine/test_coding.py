"""What a node encodes: states of streams, feedback where it belongs, and whether it pays."""

from dataclasses import dataclass

import pytest
import torch

from shoal.codecs import BF16, FP16
from shoal.codecs.wire import HEADER
from shoal.core.codec import Codec, expect
from shoal.sim import Network
from shoal.strategies import ASGD, CHOCO, Local, Sync
from shoal.testing.problems import Quadratic, Slope, simulate


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


def test_with_a_residual_the_sender_s_loss_comes_later_and_the_merger_s_never_by_hand():
    # what arrives at worker 0: 1, 1, 1, 2, ...; the mean of that and 3/4 is 7/8 three times, then 11/8
    assert [moved("residual", steps)[0].item() for steps in (1, 2, 3, 4)] == [0.0, 0.0, 0.0, 1.0]


def test_with_both_nothing_is_lost_but_what_is_under_way():
    # a step of 1 on average: behind are less than 1 at the sender, halved by the mean, and 1 at the merger
    assert (moved("double", 16) >= 16 - 1.5).all()
    assert (moved("double", 16) <= 16).all()


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
