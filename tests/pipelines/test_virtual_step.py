"""Steps of pipelines in virtual time: lengths, bubbles, memory and traffic by the formulas and by hand."""

from dataclasses import replace

import pytest

from shoal.core.errors import Deadlock
from shoal.pipelines.schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B, PipelineSchedule
from shoal.pipelines.virtual_step import MessageCost, StageCost, simulate_step
from shoal.sim import Network

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 5), (4, 2), (4, 8), (6, 12)]


def passes(timeline, device):
    return [
        (f"{e.kind[0].upper()}{e.microbatch}", e.start, e.end) for e in timeline.events if e.device == device
    ]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
def test_length_and_bubble_of_equal_stages(schedule, stages, microbatches):
    f, b = 1.0, 2.0
    timeline = simulate_step(schedule, [StageCost(f, b)] * stages, microbatches)
    slots = microbatches + stages - 1
    assert timeline.seconds == pytest.approx(slots * (f + b))
    assert timeline.bubble == pytest.approx((stages - 1) / slots)
    assert timeline.overhead == pytest.approx((stages - 1) / microbatches)


@pytest.mark.parametrize(("devices", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 6, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(devices, microbatches, chunks):
    costs = [StageCost(1.0, 2.0)] * (devices * chunks)
    timeline = simulate_step(INTERLEAVED, costs, microbatches, devices=devices)
    assert timeline.overhead == pytest.approx((devices - 1) / (chunks * microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_activations_in_flight(stages, microbatches):
    costs = [StageCost()] * stages
    gpipe = simulate_step(GPIPE, costs, microbatches)
    alternating = simulate_step(ONE_F_ONE_B, costs, microbatches)
    for i in range(stages):
        assert gpipe.in_flight(i) == microbatches
        assert alternating.in_flight(i) == min(microbatches, stages - i)


def test_two_stages_and_two_microbatches_by_hand():
    timeline = simulate_step(ONE_F_ONE_B, [StageCost(1.0, 2.0)] * 2, 2)
    assert passes(timeline, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert passes(timeline, 1) == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]


def test_the_slowest_stage_sets_the_pace():
    costs = [StageCost(1.0, 1.0), StageCost(3.0, 3.0), StageCost(1.0, 1.0)]
    few, more = (simulate_step(ONE_F_ONE_B, costs, m).seconds for m in (4, 5))
    assert more - few == pytest.approx(6.0)  # f + b of the slowest
    assert few == pytest.approx(1 + 4 * 6 + 1)  # stage 1 works without a pause between F0 and B3 of stage 0


def test_latency_and_bandwidth_delay_what_waits_for_them():
    costs = [StageCost(1.0, 1.0, output_bytes=100)] * 2
    timeline = simulate_step(GPIPE, costs, 2, Network(latency=0.25, bandwidth=400.0))
    # a message takes 0.25 + 100 / 400 = 0.5 s, and GPipe computes meanwhile
    assert passes(timeline, 1) == [("F0", 1.5, 2.5), ("F1", 2.5, 3.5), ("B0", 3.5, 4.5), ("B1", 4.5, 5.5)]
    assert passes(timeline, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 5.0, 6.0), ("B1", 6.0, 7.0)]


def test_1f1b_waits_for_its_send_where_it_turns_from_forward_to_backward():
    costs = [StageCost(1.0, 1.0, output_bytes=100)] * 2
    timeline = simulate_step(ONE_F_ONE_B, costs, 2, Network(bandwidth=200.0))
    # stage 1: B0 ends at 3.5, and its gradient leaves until 4.0 before F1 begins
    assert passes(timeline, 1) == [("F0", 1.5, 2.5), ("B0", 2.5, 3.5), ("F1", 4.0, 5.0), ("B1", 5.0, 6.0)]


def test_messages_keep_the_devices_from_computing():
    """Sending takes 0.1 and receiving 0.2, which hides in the waiting where the message comes later."""
    costs, messages = [StageCost(1.0, 2.0)] * 2, MessageCost(send=0.1, receive=0.2)
    timeline = simulate_step(GPIPE, costs, 2, messages=messages)
    starts = [[(name, start) for name, start, _ in passes(timeline, device)] for device in (0, 1)]
    first, second = starts
    assert first == [("F0", 0), ("F1", 1.1), ("B0", pytest.approx(5.4)), ("B1", pytest.approx(7.6))]
    assert second == [
        ("F0", 1.1),
        ("F1", pytest.approx(2.3)),
        ("B0", pytest.approx(3.3)),
        ("B1", pytest.approx(5.4)),
    ]
    assert timeline.seconds == pytest.approx(9.6)
    assert timeline.bubble == pytest.approx(1 - 12 / 19.2)


def test_one_device_sends_itself_nothing():
    costs, messages = [StageCost(1.0, 2.0)] * 2, MessageCost(send=0.1, receive=0.2)
    assert simulate_step(INTERLEAVED, costs, 2, devices=1, messages=messages).seconds == pytest.approx(12)


def test_bytes_of_every_link():
    costs = [replace(StageCost(), output_bytes=n) for n in (10, 20, 99)]
    timeline = simulate_step(ONE_F_ONE_B, costs, 4)
    assert timeline.link_bytes == {(0, 1): 40, (1, 0): 40, (1, 2): 80, (2, 1): 80}


def test_interleaved_sends_from_the_last_device_to_the_first():
    timeline = simulate_step(INTERLEAVED, [StageCost(output_bytes=10)] * 4, 4, devices=2)
    assert timeline.link_bytes == {(0, 1): 80 + 40, (1, 0): 40 + 80}  # stages 0-1 and 2-3, and 1-2


def test_memory_is_state_and_the_activations_in_flight():
    costs = [StageCost(activation_bytes=10, state_bytes=1000)] * 4
    assert [simulate_step(GPIPE, costs, 8).memory(d) for d in range(4)] == [1080] * 4
    assert [simulate_step(ONE_F_ONE_B, costs, 8).memory(d) for d in range(4)] == [1040, 1030, 1020, 1010]


def test_memory_of_a_device_with_several_stages():
    costs = [StageCost(activation_bytes=10, state_bytes=100)] * 4
    timeline = simulate_step(INTERLEAVED, costs, 4, devices=2)
    # device 0 makes 1 * 2 + 2 * 1 = 4 forward passes ahead, and one more before each backward pass
    assert timeline.memory(0) == 200 + 5 * 10
    assert timeline.memory(1) == 200 + 3 * 10


def test_one_microbatch_keeps_one_stage_busy_at_a_time():
    timeline = simulate_step(GPIPE, [StageCost()] * 5, 1)
    assert timeline.bubble == pytest.approx(4 / 5)


def test_orders_that_do_not_fit_together_are_a_deadlock():
    class BackwardFirst(PipelineSchedule):
        def order(self, *sizes):
            return super().order(*sizes)[::-1]

    wrong = BackwardFirst("wrong", "", "", GPIPE.warmup)
    with pytest.raises(Deadlock, match="device 0 waits for the input of backward 1 at stage 0"):
        simulate_step(wrong, [StageCost()] * 2, 2)


@pytest.mark.parametrize(("schedule", "stages", "devices"), [(GPIPE, 4, 2), (INTERLEAVED, 5, 2)])
def test_stages_that_do_not_fit_the_devices_are_refused(schedule, stages, devices):
    with pytest.raises(ValueError, match=f"cannot run {stages} stages on {devices} devices"):
        simulate_step(schedule, [StageCost()] * stages, 4, devices=devices)
