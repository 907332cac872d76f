"""Everything in a few seconds: run it before each commit."""

from contextlib import suppress

import pytest

import shoal
from periodic import PERIODIC
from sampling import covering, mostly_soak
from shoal.codecs import CODECS
from shoal.sim import Compute, Network
from shoal.strategies import STRATEGIES
from shoal.testing import Quadratic, blobs, simulate
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Setting

OPTIONS = {
    **{word: {"period": 4} for word in PERIODIC},
    "streaming_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "decoupled_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "sparse_loco": {"period": 4, "density": 0.5},
    "halos": {
        "period": 2,
        "exchange": 1,
        "mixing": 0.5,
        "rate": 0.5,
        "local_rate": 0.5,
        "local_momentum": 0.5,
    },
    "dcasgd": {"strength": 0.01},
}
STEPS = {
    "demo": 600,  # each as long as the learning rate
    "async_diloco": 320,  # one worker's difference after the other, which random_k makes twice as long
    "halos": 320,
}


def workers_of(word):
    return 1 if word == "single" else 4


def takes(word, codec):
    """Whether the strategy does not refuse the codec."""
    with suppress(ValueError):
        STRATEGIES.make(word).check(Setting(workers_of(word), CODECS.make(codec)))
        return True
    return False


def run(word, codec="none", **options):
    strategy = STRATEGIES.make(word, **OPTIONS.get(word, {}))
    problem = Quadratic(lr=0.1, targets=(1.0, 3.0))
    fixed = {
        "workers": min(2, workers_of(word)),
        "steps": STEPS.get(word, 80),
        "start": [50.0, -50.0],
        "compute": Compute(1.0),
    }
    return simulate(strategy, problem, codec=CODECS.make(codec), **{**fixed, **options})


@pytest.mark.parametrize(
    ("word", "codec"), covering([(w, c) for w in STRATEGIES for c in CODECS if takes(w, c)], each=1)
)
def test_every_strategy_descends_with_every_codec(word, codec):
    done = run(word, codec)
    holder = done.server if done.strategy.servers else done.worker(0)
    target = 1.0 if done.workers == 1 else 2.0
    assert (done.strategy.solution(Node(holder)) - target).abs().max() < 2.0  # from 52


@pytest.mark.parametrize("word", mostly_soak([*STRATEGIES], few=8))  # tests/codecs/test_pairs.py has all
def test_a_run_is_repeated_bit_for_bit(word):
    rough = {"compute": Compute(1.0, jitter=0.3), "network": Network.parse("1Mbit,20ms,1%"), "steps": 20}
    assert run(word, **rough).digest() == run(word, **rough).digest()


@pytest.mark.slow
def test_real_processes_agree_with_virtual_time():
    real = shoal.run(blobs(), shoal.BMUF(period=4), workers=2, epochs=2)
    virtual = shoal.run(blobs(), shoal.BMUF(period=4), workers=2, epochs=2, transport="sim")
    assert real.test_loss == virtual.test_loss
    assert real.bytes_sent == virtual.bytes_sent
