"""A run in virtual time is the same run every time, and time changes nothing that it should not."""

import pytest
import torch

from sampling import covering, mostly_soak
from shoal.codecs import CODECS
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Network
from shoal.strategies import EASGD, STRATEGIES, Downpour, Sync
from shoal.testing.problems import Problem, Quadratic, Slope, simulate
from shoal.vocabulary.strategy import Sends
from soon import SILENT, SOON

SERVERLESS = [word for word in STRATEGIES if STRATEGIES.make(word, **SOON.get(word, {})).servers == 0]
AT_THEIR_OWN_PACE = ("gossip", "adpsgd", "strom")  # whom they hear from, and what, depends on who is how fast


SOME_CODECS = ("none", "fp16", "top_k")  # tests/codecs has all pairs


def compresses(word):
    """Whether what it sends goes through the codec."""
    return STRATEGIES[word].sends in (Sends.MEAN_GRADIENTS, Sends.GRADIENTS, Sends.DIFFERENCES)


def with_codecs(words):
    """Each with every one of these codecs that it does not refuse."""
    return [(w, c) for w in words for c in SOME_CODECS if compresses(w) or CODECS.make(c).exact]


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return (x - 0.3 * rank) / 3 + torch.sin(x * (rank + 1) + step) / 7


def strategy_of(word):
    return STRATEGIES.make(word, **SOON.get(word, {}))


def run(word, codec="none", **options):
    strategy = strategy_of(word)
    fixed = {"workers": 1 if word == "single" else 3, "steps": 10, "start": [0.9, -0.4, 0.2, 0.7]}
    return simulate(strategy, Drawn(lr=0.1, momentum=0.5), codec=CODECS.make(codec), **{**fixed, **options})


JITTERY = {"compute": Compute(mean=1.0, jitter=0.3), "network": Network(latency=0.1, bandwidth=1e4, loss=0.1)}


@pytest.mark.parametrize(("word", "codec"), mostly_soak([*with_codecs(STRATEGIES)], few=8))
def test_the_same_seed_gives_the_same_run_bit_for_bit(word, codec):
    first, second = (run(word, codec, seed=5, **JITTERY) for _ in range(2))
    assert first.digest() == second.digest()
    assert (first.seconds, first.kernel.events) == (second.seconds, second.kernel.events)


@pytest.mark.parametrize("word", mostly_soak([w for w in STRATEGIES if w not in SILENT], few=4))
def test_another_seed_or_other_durations_give_another_run(word):
    here = run(word, seed=5, **JITTERY).digest()
    assert here != run(word, seed=6, **JITTERY).digest()
    assert here != run(word, seed=5, **{**JITTERY, "compute": Compute(mean=1.0, jitter=0.2)}).digest()
    assert here != run(word, seed=5, **{**JITTERY, "network": Network(latency=0.1)}).digest()


@pytest.mark.parametrize("codec", [c for c in SOME_CODECS if not CODECS.make(c).exact])
@pytest.mark.parametrize("word", [w for w in STRATEGIES if w != "single"])
def test_a_lossy_codec_is_really_used_or_refused(word, codec):
    if compresses(word):
        assert run(word, codec).digest() != run(word).digest()
    else:
        with pytest.raises(ValueError, match="would do nothing"):
            run(word, codec)


@pytest.mark.parametrize(
    ("word", "codec"),
    mostly_soak([*with_codecs(w for w in SERVERLESS if w not in (*SILENT, *AT_THEIR_OWN_PACE))], few=7),
)
def test_latency_bandwidth_loss_and_speed_change_no_bit_of_what_the_synchronous_learn(word, codec):
    plain = run(word, codec)
    for options in (JITTERY, {"network": Network(latency=7.0)}, {"compute": Compute(1.0, slow={0: 9.0})}):
        other = run(word, codec, **options)
        assert other.seconds > plain.seconds
        for here, there in zip(plain.nodes, other.nodes, strict=True):
            assert torch.equal(here.x, there.x)


@pytest.mark.parametrize(
    ("word", "codec"), covering(with_codecs(w for w in SERVERLESS if w != "ensemble"), each=1)
)
def test_replicas_end_equal_bit_for_bit_under_every_codec(word, codec):
    nodes = run(word, codec).nodes
    assert all(torch.equal(node.x, nodes[0].x) for node in nodes)


@pytest.mark.parametrize("synchronous", [False, True])
def test_elastic_averaging_has_both_forms_repeatable(synchronous):
    def digest():
        easgd = EASGD(rate=0.2, period=2, synchronous=synchronous)
        return simulate(easgd, Drawn(lr=0.1), workers=3, steps=8, start=[0.9] * 4, **JITTERY).digest()

    assert digest() == digest()


def test_the_digest_sees_the_final_parameters_and_the_messages():
    digests = {
        simulate(Sync(), Slope(), workers=2, steps=2).digest(),
        simulate(Sync(), Slope(gradients=(2.0,)), workers=2, steps=2).digest(),
        simulate(Sync(), Slope(), workers=2, steps=3).digest(),
        simulate(Sync(), Slope(), workers=2, steps=2, network=Network(latency=0.1)).digest(),
        simulate(Sync(), Slope(counts=(2,)), workers=2, steps=2).digest(),
    }
    assert len(digests) == 5


def test_a_synchronous_step_takes_as_long_as_its_slowest_worker():
    compute = Compute(mean=1.0, slow={1: 5.0})
    assert simulate(Sync(), Slope(), workers=3, steps=4, compute=compute).seconds == 4 * 5.0


def test_a_run_lasts_until_its_last_node_is_done():
    # two rounds of latency a step; the good-byes after the last step are nobody's work
    assert simulate(Sync(), Slope(), workers=2, steps=3, network=Network(latency=0.5)).seconds == 3 * 2 * 0.5


def test_downpour_does_not_wait_for_its_slowest_worker():
    class Ends(Instrument):
        def __init__(self):
            self.at = {}

        def step(self, node):
            self.at[node.rank] = node.transport.now()

    ends = Ends()
    compute = Compute(mean=1.0, slow={1: 5.0})
    simulate(Downpour(), Slope(), workers=3, steps=4, compute=compute, observers=[ends])
    assert ends.at == {0: 4.0, 1: 20.0, 2: 4.0}


def test_a_server_starts_at_the_centre_or_where_worker_0_starts():
    flat = Slope(gradients=(0.0,))
    assert simulate(Downpour(), flat, start=[3.0], centre=[7.0]).server.x.item() == 7.0
    assert simulate(Downpour(), flat, start=[3.0]).server.x.item() == 3.0


def test_seconds_spent_are_accounted_for():
    # A gradient takes 1 s or 3 s, a message 1/4 s. Worker 1 finds what it needs to merge, sends its average
    # and waits half a second for worker 0, which cannot merge before it has heard of worker 1. So worker 0
    # begins every step but the first a quarter of a second earlier than worker 1.
    network, compute = Network(latency=0.25), Compute(1.0, slow={1: 3.0})
    run = simulate(Sync(), Quadratic(lr=0.5), workers=2, steps=4, compute=compute, network=network)
    fast, slow = run.worker(0).meter, run.worker(1).meter
    assert (fast.compute_seconds, slow.compute_seconds) == (4.0, 12.0)
    assert (fast.wait_seconds, slow.wait_seconds) == (2.25 + 3 * 2.5, 4 * 0.5)
    assert fast.bytes_sent == slow.bytes_received
    assert (fast.waited_for[1], slow.waited_for[0]) == (9.75, 2.0)
