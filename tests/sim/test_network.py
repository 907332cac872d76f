"""Links, ports and machines in virtual time: every arrival is worked out on paper."""

from collections import Counter
from functools import partial
from math import inf
from pathlib import Path

import pytest
import torch

from shoal.core.transport import HEADER_BYTES, Message
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Kernel, Link, Network
from shoal.sim.models import NETWORKS, Pace, Wires
from shoal.sim.transport import Switch
from shoal.strategies import Sync
from shoal.testing.problems import Slope, simulate

L, B = 0.5, 1024.0  # latency in seconds, bytes per second


def arrivals(*sends, seed=0, **options):
    """When each message arrives; a send is (when, from, to, bytes with header)."""
    kernel = Kernel()
    switch = Switch(kernel, Network(**{"latency": L, "bandwidth": B, **options}), seed)
    ends, got = [switch.add() for _ in range(4)], {}

    async def listen(end, messages):
        for _ in range(messages):
            m = await end.recv()
            got[m.seq] = kernel.now

    for k, (when, src, dst, nbytes) in enumerate(sends):
        body = torch.empty(nbytes - HEADER_BYTES, dtype=torch.uint8)
        kernel.after(when, partial(switch.carry, src, dst, Message("m", (body,), src=src, seq=k)))
    expected = Counter(dst for _, _, dst, _ in sends)
    for rank, end in enumerate(ends):
        end.process = kernel.spawn(listen(end, expected[rank]), lambda: "a listener")
    kernel.run()
    return [got[k] for k in range(len(sends))]


def test_a_message_takes_latency_plus_bytes_over_bandwidth():
    assert arrivals((3.0, 0, 1, 2048)) == [3 + L + 2048 / B]


def test_a_network_without_numbers_takes_no_time():
    assert Network() == Network(latency=0.0, bandwidth=inf, loss=0.0)
    assert arrivals((3.0, 0, 1, 10**6), latency=0.0, bandwidth=inf) == [3.0]


def test_a_sender_sends_one_message_at_a_time():
    first, second, third = arrivals((0.0, 0, 1, 1024), (0.0, 0, 2, 1024), (10.0, 0, 1, 1024))
    assert first == L + 1
    assert second == 1 + L + 1  # leaves when the first has left
    assert third == 10 + L + 1


def test_two_senders_to_one_receiver_take_turns():
    first, second, third = arrivals((0.0, 0, 2, 1024), (0.0, 1, 2, 2048), (2.75, 3, 2, 1024))
    assert first == L + 1
    assert second == L + 1 + 2
    assert third == 3.5 + 1  # 2.75 + L is before the port is free


def test_two_that_swap_messages_do_not_hinder_each_other():
    assert arrivals((0.0, 0, 1, 4096), (0.0, 1, 0, 4096)) == [L + 4, L + 4]


def test_strangers_do_not_hinder_each_other():
    assert arrivals((0.0, 0, 1, 4096), (0.0, 2, 3, 4096)) == [L + 4, L + 4]


def test_a_message_to_oneself_takes_no_time():
    assert arrivals((2.0, 1, 1, 4096)) == [2.0]


def test_a_single_link_can_differ():
    slow = {(0, 1): Link(latency=8.0, bandwidth=512.0)}
    assert arrivals((0.0, 0, 1, 1024), (0.0, 2, 3, 1024), links=slow) == [8 + 2, L + 1]
    assert Network(latency=L).link(4, 5) == Link(L, inf)


def test_a_message_on_a_long_link_does_not_hold_up_one_that_arrives_before_it():
    # the receiver's port is taken from 8 s to 9 s; the second message needs it from 0.5 s to 1.5 s
    far = {(0, 2): Link(latency=8.0, bandwidth=B)}
    assert arrivals((0.0, 0, 2, 1024), (0.0, 1, 2, 1024), links=far) == [8 + 1, L + 1]


def test_a_message_that_still_waits_to_be_sent_does_not_hold_up_another_at_its_receiver():
    # worker 0's second message reaches worker 2 from 1.5 s on; worker 1's has come and gone by then
    sends = ((0.0, 0, 1, 1024), (0.0, 0, 2, 1024), (0.0, 1, 2, 1024))
    assert arrivals(*sends) == [L + 1, 1 + L + 1, L + 1]


def test_loss_delays_by_whole_retries_and_drops_nothing():
    times = arrivals(*((100.0 * k, 0, 1, 104) for k in range(200)), loss=0.5, retry=0.25, bandwidth=inf)
    late = [arrival - (100.0 * k + L) for k, arrival in enumerate(times)]
    assert all(delay >= 0 and delay % 0.25 == 0 for delay in late)
    assert sum(delay / 0.25 for delay in late) == pytest.approx(200, rel=0.3)  # p / (1 - p) = 1 a message


def test_loss_never_reorders():
    times = arrivals(*((0.01 * k, 0, 1, 104) for k in range(300)), loss=0.3, bandwidth=inf)
    assert times == sorted(times)
    assert len(set(times)) > 3


def test_losses_are_drawn_from_a_stream_of_their_own():
    def draw(seed):
        return arrivals(*((float(k), 0, 1, 104) for k in range(50)), loss=0.5, seed=seed)

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbit,100us", Network(latency=100e-6, bandwidth=1e9 / 8)),
        ("100Mbit,20ms,1%", Network(latency=20e-3, bandwidth=100e6 / 8, loss=0.01)),
        ("20ms", Network(latency=20e-3)),
        (" 1.5 GB , 3ns ", Network(latency=3e-9, bandwidth=1.5e9)),
        ("56kbit", Network(bandwidth=7000.0)),
        ("0.5s,800bit", Network(latency=0.5, bandwidth=100.0)),
    ],
)
def test_a_network_is_read_as_a_person_writes_it(text, expected):
    got = Network.parse(text)
    assert (got.latency, got.bandwidth, got.loss) == pytest.approx(
        (expected.latency, expected.bandwidth, expected.loss), rel=1e-12
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "there is no network 'fast'"),
        ("", "is not a number with a unit"),
        ("1Gbit,", "is not a number with a unit"),
        ("1.2.3ms", "is not a number with a unit"),
        ("1Gbit,100", "'100' in network '1Gbit,100' has no known unit; write 1Gbit,100us"),
        ("3parsec", "has no known unit"),
        ("0Mbit", "bandwidth must be positive"),
        ("-3ms", "is not a number with a unit"),
        ("100%", "loss=1.0 must be at least 0 and below 1"),
    ],
)
def test_text_that_is_no_network_is_refused(text, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        Network.parse(text)


def test_numbers_that_make_no_network_are_refused():
    for options in ({"latency": -1.0}, {"bandwidth": 0.0}, {"loss": 1.0}, {"loss": -0.1}):
        with pytest.raises(ValueError, match="must"):
            Network(**options)


def test_a_slow_worker_takes_its_multiple_every_time():
    compute = Compute(mean=0.25, slow={2: 5.0})
    assert [Pace(compute, 0, 0).next(), Pace(compute, 2, 0).next(), Pace(compute, 2, 0).next()] == [
        0.25,
        1.25,
        1.25,
    ]


def test_jitter_spreads_as_told_and_never_below_a_tenth():
    pace = Pace(Compute(mean=2.0, jitter=0.1), 0, 0)
    times = torch.tensor([pace.next() for _ in range(2000)])
    assert times.mean().item() == pytest.approx(2.0, rel=0.02)
    assert times.std().item() == pytest.approx(0.2, rel=0.1)
    wild = Pace(Compute(mean=2.0, jitter=5.0), 0, 0)
    assert min(wild.next() for _ in range(200)) == 2.0 * 0.1


def test_every_worker_has_a_stream_of_durations_of_its_own():
    compute = Compute(mean=1.0, jitter=0.5)

    def draw(rank, seed):
        pace = Pace(compute, rank, seed)
        return [pace.next() for _ in range(5)]

    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0) != draw(1, 0)
    assert draw(0, 0) != draw(0, 1)


def test_compute_is_read_as_a_person_writes_it():
    assert Compute.parse("20ms") == Compute(0.02)
    assert Compute.parse("1.5s,10%") == Compute(1.5, 0.1)
    assert Compute.parse("20ms,10%,2:5x,0:1.5x") == Compute(0.02, 0.1, {2: 5.0, 0: 1.5})
    for text, says in (
        ("20ms,3ms", "is neither a jitter as 10% nor a slow worker as 2:5x"),
        ("20ms,2:5", "is neither a jitter"),
        ("20ms,two:5x", "is neither a jitter"),
        ("20", "is not a duration"),
        ("5%", "not a duration"),
    ):
        with pytest.raises(ValueError, match=says):
            Compute.parse(text)


def test_times_that_make_no_machine_are_refused():
    for options in ({"mean": -1.0}, {"jitter": -0.1}, {"slow": {0: 0.0}}):
        with pytest.raises(ValueError, match="must"):
            Compute(**options)


class Means(Instrument):
    """When each worker has each mean, and what it sent for it."""

    def __init__(self):
        self.times = []
        self.sent = []

    def step(self, node):  # of synchronous SGD: in the same instant
        self.times.append(node.transport.now())
        self.sent.append((node.meter.messages_sent, node.meter.bytes_sent))


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_mean_in_stripes_takes_two_latencies_and_twice_its_share_of_the_bytes(workers):
    # Each worker sends and receives P - 1 stripes and P - 1 averages of n / P bytes, and nobody's port is
    # ever taken by two; a header of 104 bytes goes with each: 2 L + 2 G (P - 1) (n / P + 104).
    elements = 24 * 64
    n, means = 8 * elements, Means()
    network = Network(latency=L, bandwidth=B)
    simulate(Sync(), Slope(), workers=workers, start=[0.0] * elements, network=network, observers=[means])
    expected = 2 * L + 2 * (workers - 1) * (n / workers + HEADER_BYTES) / B
    assert means.times == pytest.approx([expected] * workers, rel=1e-12)
    headers = 2 * (workers - 1) * HEADER_BYTES
    assert means.sent == [(2 * (workers - 1), 2 * n * (workers - 1) // workers + headers)] * workers


def test_a_message_weighs_its_header_and_its_parts():
    assert Message("x").nbytes == HEADER_BYTES == 104
    assert Message("x", (torch.zeros(10), torch.zeros(3, dtype=torch.float16))).nbytes == 104 + 40 + 6


# -- networks that have a name, and homes ------------------------------------------------------------------


@pytest.mark.parametrize("word", NETWORKS)
def test_a_network_has_a_name(word):
    assert Network.parse(word) == Network.parse(NETWORKS[word])


def test_a_name_that_no_network_has():
    with pytest.raises(ValueError, match="no network 'moon'; write 1Gbit,100us, or datacentre, office"):
        Network.parse("moon")


def test_a_home_receives_faster_than_it_sends():
    home = Network.parse("20/5Mbit,30ms")
    assert (home.bandwidth, home.download, home.latency) == (5e6 / 8, 4.0, 0.03)


def test_what_two_homes_send_reaches_a_third_at_once_if_its_line_is_fast_enough():
    wires = Wires(Network(bandwidth=100.0, download=4.0), seed=0)
    heads = [wires.leave(src, 2, 400, 0.0) for src in (0, 1)]
    assert heads == [(0.0, 4.0), (0.0, 4.0)]
    # each takes its sender 4 s; the receiver takes in a second what it needs for one of them
    assert [wires.enter(2, length, 0.0) for _, length in heads] == [4.0, 5.0]


def test_a_network_is_not_slower_to_receive():
    with pytest.raises(ValueError, match="at least as fast as they send"):
        Network.parse("5/20Mbit")


def test_the_page_has_every_named_network():
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    for word, text in NETWORKS.items():
        assert f"| `{word}` | `{text}` |" in page


@pytest.mark.parametrize("text", ["20Gbit/5Mbit", "20/5ms", "20/0Mbit", "a/5Mbit", "/5Mbit"])
def test_what_is_no_pair_of_rates(text):
    with pytest.raises(ValueError, match=r"20/5Mbit"):
        Network.parse(text)
