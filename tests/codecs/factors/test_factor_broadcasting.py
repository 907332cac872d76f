"""Averages out of factors: by hand, equal to the average itself, what they cost, and what is refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sampling import mostly_soak
from shoal.codecs import Factors
from shoal.codecs.factors.broadcasting import FACTORS, TERMS, pays
from shoal.codecs.wire import HEADER
from shoal.collectives import ALGORITHMS, InFlight, LinkCost, Native, stripes
from shoal.collectives.in_flight import PREFIX
from shoal.core.codec import Identity
from shoal.core.errors import PeerLost, WireError
from shoal.core.matrices import Matrices, Matrix
from shoal.core.products import Product
from shoal.core.replica import Parameters
from shoal.core.seeds import stream
from shoal.core.transport import HEADER_BYTES, Message
from shoal.engine.averages import PRESENT
from shoal.launch.join import choose_mean
from shoal.sim import Faults, Network, Simulation
from shoal.vocabulary.strategy import Sends, Strategy

LINK = LinkCost(1e-4, 1e-9)
LAYERS = (Matrix(3, 40, 60), Matrix(2410, 50, 40))
LENGTH = 2410 + 2000 + 7

FIRST = 1
"""The version of what workers send each other in an average, while nobody has come or gone."""


class Made(Parameters):
    """A replica whose gradients are what they are said to be made of."""

    def __init__(self, gradients, layers):
        super().__init__(torch.zeros_like(gradients[0][0]))
        self.recorded, self.records = layers, False
        self.products = {id(v): products for v, products in gradients}

    def record(self):
        self.records = True

    def take_products(self, v):
        return self.products.get(id(v))


@dataclass(frozen=True)
class Averages(Strategy):
    """Each worker brings its vectors in turn, with its weights; `seen` has what came of them."""

    sends = Sends.MEAN_GRADIENTS
    gradients: Any = ()  # of each worker, of each step: the vector, and its products
    weights: Any = None
    seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    async def worker(self, w):
        for step, (v, _) in enumerate(self.gradients[w.rank]):
            weight = 1.0 if self.weights is None else self.weights[w.rank][step]
            self.seen.setdefault(w.rank, []).append(await w.mean(v, weight=weight))


def average(gradients, codec=None, weights=None, layers=LAYERS, collective="auto", strategy=None, **options):
    """The simulation, and what each worker has after each step."""
    strategy = strategy or Averages(gradients=gradients, weights=weights)
    codec = codec or Factors()
    run = Simulation(
        strategy,
        lambda rank: Made(gradients[rank], layers),
        workers=len(gradients),
        steps=1,
        codec=codec,
        mean=choose_mean(collective, None, codec, len(gradients), LINK),
        **options,
    ).run()
    return run, strategy.seen


def made(terms, *names, layers=LAYERS, length=LENGTH, dtype=torch.float64):
    """A gradient of as many terms for each layer, and its products."""
    draw = stream(0, *names)
    v = torch.randn(length, generator=draw, dtype=torch.float64).to(dtype)
    products = []
    for layer, k in zip(layers, terms, strict=True):
        d, x = (torch.randn(k, side, generator=draw).to(dtype) for side in (layer.rows, layer.columns))
        layer.of(v).copy_(d.double().T @ x.double())
        products.append(Product(d, x))
    return v, products


def many(terms, steps=2, **options):
    """Gradients of each worker, which has these terms in every layer."""
    return [
        [made([k] * len(LAYERS), rank, t, **options) for t in range(steps)] for rank, k in enumerate(terms)
    ]


def messages(run):
    return [node.meter.messages_sent for node in run.nodes]


# -- by hand ---------------------------------------------------------------------------------------


def test_two_workers_of_uneven_weight_by_hand():
    # worker 0: error (1, 2)', input (1, 0, 3), weight 1: ((1, 0, 3), (2, 0, 6)), bias (1, 2)
    # worker 1: error (4, 0)', input (0, 1, 1), weight 3: ((0, 4, 4), (0, 0, 0)), bias (4, 0)
    # the mean: (1 x the first + 3 x the second) / 4; 1 row each of 5 numbers, 2 x 5 < 2 x 6
    layer = Matrix(0, 2, 3)
    gradients = []
    for d, x in (((1.0, 2.0), (1.0, 0.0, 3.0)), ((4.0, 0.0), (0.0, 1.0, 1.0))):
        errors, inputs = torch.tensor([d]), torch.tensor([x])
        v = torch.cat([torch.outer(errors[0], inputs[0]).flatten(), errors[0]])
        gradients.append([(v, [Product(errors, inputs)])])
    run, seen = average(gradients, weights=[[1.0], [3.0]], layers=[layer])
    for rank in (0, 1):
        assert seen[rank][0].tolist() == [0.25, 3.0, 3.75, 0.5, 0.0, 1.5, 3.25, 0.5]
    # a word of one layer; 5 numbers; the bias in stripes of 1: one to its merger, one back
    assert messages(run) == [4, 4]
    stripe = HEADER_BYTES + HEADER.size + 4
    assert run.worker(0).meter.bytes_sent == (HEADER_BYTES + 8) + (HEADER_BYTES + 20) + 2 * stripe


def test_the_rule_is_what_the_busiest_worker_sends():
    # 7 x 32 x 8192 numbers to seven others, or 7/8 of the layer twice; 128 workers break even
    layer = Matrix(0, 4096, 4096)
    assert 7 * 32 * 8192 < 2 * 7 * 4096 * 4096 / 8
    assert pays(layer, 32, 8) and pays(layer, 32, 127) and not pays(layer, 32, 128)
    assert pays(Matrix(0, 2, 3), 1, 2) and not pays(Matrix(0, 2, 3), 2, 2)
    assert not pays(Matrix(0, 10, 784), 16, 2)


# -- it is the average -----------------------------------------------------------------------------

UNEVEN = [[4, 4], [3, 4], [9, 1, 4], [0, 5], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("terms", UNEVEN, ids=str)
@pytest.mark.parametrize("collective", ["auto", "stripes", *ALGORITHMS])
def test_it_is_the_average_however_the_rest_is_summed(terms, collective):
    gradients = many(terms)
    weights = [[1.0 + k, 3.0] for k in range(len(terms))]
    run, seen = average(gradients, weights=weights, collective=collective)
    for t in range(2):
        total = sum(w[t] for w in weights)
        exact = sum(w[t] * g[t][0] for w, g in zip(weights, gradients, strict=True)) / total
        for rank in range(len(terms)):
            assert torch.allclose(seen[rank][t], exact, rtol=1e-12, atol=1e-12)
            assert torch.equal(seen[rank][t], seen[0][t])
    assert all(node.meter.coded_bytes < node.meter.dense_bytes for node in run.nodes)


def test_single_precision_is_near_and_half_is_rounded_once():
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        gradients = many([3, 4], dtype=dtype)
        run, seen = average(gradients)
        for t in range(2):
            exact = (gradients[0][t][0].double() + gradients[1][t][0].double()) / 2
            assert seen[0][t].dtype == dtype and torch.equal(seen[0][t], seen[1][t])
            assert (seen[0][t].double() - exact).norm() < near * exact.norm()
        assert run.worker(0).meter.coded_bytes < run.worker(0).meter.dense_bytes


def dense(gradients, **options):
    return average(gradients, codec=Identity(), **options)[1]


def test_a_layer_that_one_worker_does_not_know_goes_as_it_is_for_all():
    gradients = many([3, 3, 3])
    v, _ = gradients[1][0]
    v[3] += 1.0  # an element of the first layer, which its product does not have
    run, seen = average(gradients)
    plain = dense(gradients)
    for t in range(2):
        assert all(torch.equal(seen[k][t], seen[0][t]) for k in range(3))
        assert torch.allclose(seen[0][t], plain[0][t], rtol=1e-12, atol=1e-12)
    words, factors = HEADER_BYTES + 2 * 8, HEADER_BYTES
    rest = [LENGTH - 50 * 40, LENGTH - 50 * 40 - 40 * 60]
    sent = 2 * 2 * (words + factors) + 2 * 8 * (3 * 90 + (3 * 90 + 3 * 100))
    sent += 2 * 4 * (HEADER_BYTES + HEADER.size) + 8 * sum(stripes_of(r, 3, 0) for r in rest)
    assert run.worker(0).meter.bytes_sent == sent


def stripes_of(length, workers, rank):
    """Elements that a worker sends for an average in stripes."""
    ends = [length * k // workers for k in range(workers + 1)]
    own = ends[rank + 1] - ends[rank]
    return length - own + (workers - 1) * own


def test_a_vector_of_which_nothing_is_known_goes_as_it_is():
    gradients = [[(v, None) for v, _ in worker] for worker in many([3, 3])]
    run, seen = average(gradients)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], dense(gradients)[0], strict=True))
    assert run.worker(0).meter.coded_bytes == 0


def test_vectors_of_another_length_go_as_they_are():
    short = [[(v[:99].clone(), p) for v, p in worker] for worker in many([3, 3])]

    @dataclass(frozen=True)
    class Longer(Averages):
        async def worker(self, w):
            w.engine.replica.x = torch.zeros(LENGTH, dtype=torch.float64)
            await super().worker(w)

    run, seen = average(short, strategy=Longer(gradients=short))
    assert torch.equal(seen[0][0], dense(short)[0][0])
    assert messages(run) == [4, 4]  # two averages in two stripes, and not a word


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="and this model has none"):
        average(many([3, 3]), layers=())


def test_more_rows_than_pay_go_as_they_are_for_all():
    # 2 K 100 < 4800: 23 rows of the first layer, not 24; of the second 2 K 90 < 4000: 22
    for terms, factored in (((22, 22), 2), ((23, 1), 1), ((24, 1), 0)):
        run, seen = average(many(terms, steps=1))
        assert torch.allclose(seen[0][0], dense(many(terms, steps=1))[0][0], rtol=1e-12, atol=1e-11)
        assert messages(run) == [1 + 2 + bool(factored)] * 2
        rest = LENGTH - sum(m.rows * m.columns for m in LAYERS[:factored])
        sizes = [m.rows + m.columns for m in LAYERS[:factored]]
        factors = HEADER_BYTES + 8 * terms[0] * sum(sizes) if factored else 0
        sent = HEADER_BYTES + 16 + factors + 2 * (HEADER_BYTES + HEADER.size) + 8 * stripes_of(rest, 2, 0)
        assert run.worker(0).meter.bytes_sent == sent


# -- who gives nothing -----------------------------------------------------------------------------


def test_who_has_ended_gives_nothing_and_keeps_nobody_from_sending_factors():
    gradients = many([3, 3, 3])
    gradients[1] = [(torch.zeros_like(v), None) for v, _ in gradients[1]]
    weights = [[1.0, 2.0], [0.0, 0.0], [3.0, PRESENT]]
    run, seen = average(gradients, weights=weights)
    assert all(0 < node.meter.coded_bytes < node.meter.dense_bytes for node in run.nodes)
    for rank in range(3):
        first = (gradients[0][0][0] + 3 * gradients[2][0][0]) / 4
        assert torch.allclose(seen[rank][0], first, rtol=1e-12, atol=1e-12)
        assert torch.allclose(seen[rank][1], gradients[0][1][0], rtol=1e-12, atol=1e-12)


def test_where_nobody_gives_anything_there_are_zeros_and_only_words():
    run, seen = average(many([3, 3]), weights=[[0.0, 0.0]] * 2)
    assert not any(v.any() for v in seen[0])
    assert messages(run) == [2, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_all(bad):
    gradients = many([3, 3])
    v, products = gradients[1][0]
    products[0].errors[2, 5] = bad
    LAYERS[0].of(v).copy_(products[0].errors.T @ products[0].inputs)
    _, seen = average(gradients)
    for rank in (0, 1):
        assert not LAYERS[0].of(seen[rank][0])[5].isfinite().all()
        assert LAYERS[1].of(seen[rank][0]).isfinite().all()
        assert seen[rank][1].isfinite().all()


# -- what is refused -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lies(Averages):
    """Worker 1 sends what it is told to instead."""

    word: Any = None
    factors: Any = None

    async def worker(self, w):
        if w.rank == 0:
            await super().worker(w)
            return
        await w.send(0, Message(PREFIX + TERMS, self.word, count=1.0, version=FIRST))
        if self.factors is not None:
            await w.send(0, Message(PREFIX + FACTORS, self.factors, version=FIRST))
            await stripes(w.engine.group, Matrices(1, LAYERS).others(self.gradients[1][0][0]), 1.0)
        await w.recv("never")


def lied(word, factors=None):
    gradients = many([3, 3])
    average(gradients, strategy=Lies(gradients=gradients, word=word, factors=factors))


def terms(*numbers):
    return (torch.tensor(numbers),)


@pytest.mark.parametrize(
    "word",
    [
        (),
        terms(3),
        terms(3, 3, 3),
        (torch.tensor([3, 3], dtype=torch.int32),),
        (torch.tensor([3.0, 3.0]),),
        terms(3, 3) * 2,
        terms(3, -2),
        terms(3, -(2**63)),
    ],
)
def test_a_word_that_cannot_be_is_refused(word):
    with pytest.raises(WireError):
        lied(word)


def rows(errors, inputs, dtype=torch.float64):
    return tuple(torch.zeros(n, dtype=dtype) for n in (errors, inputs))


@pytest.mark.parametrize(
    "factors",
    [
        (),
        rows(270, 300)[:1],
        rows(269, 300),
        rows(271, 300),
        rows(270, 299),
        rows(300, 270),
        rows(0, 0),
        rows(270, 300, torch.float32),
        (*rows(270, 300), torch.zeros(1)),
    ],
    ids=lambda parts: str([(part.dtype, len(part)) for part in parts]),
)
def test_factors_that_do_not_match_the_word_are_refused(factors):
    # 3 rows of 40 and of 50 errors, of 60 and of 40 inputs: 270 and 300
    with pytest.raises(WireError, match="arrived where"):
        lied(terms(3, 3), factors)


def test_rows_beyond_all_bounds_are_only_a_reason_not_to_send_any():
    gradients = many([3, 3], steps=1)

    @dataclass(frozen=True)
    class Boasts(Averages):
        async def worker(self, w):
            if w.rank == 0:
                await super().worker(w)
                return
            await w.send(0, Message(PREFIX + TERMS, terms(2**62, -1), count=1.0, version=FIRST))
            await stripes(w.engine.group, self.gradients[1][0][0], 1.0)

    _, seen = average(gradients, strategy=Boasts(gradients=gradients))
    assert torch.equal(seen[0][0], dense(gradients)[0][0])


@pytest.mark.parametrize("workers", mostly_soak([3, 2, 5], few=1))
def test_who_dies_in_an_average_is_named_unless_nobody_misses_it(workers):
    gradients = many([3] * workers)
    network = Network(latency=1.0, bandwidth=1e4)
    whole, seen = average(gradients, network=network)
    named = [
        is_named(gradients, seen, rank, network, whole.seconds * part / 8)
        for rank in range(workers)
        for part in range(8)
    ]
    assert sum(named) > 4 * workers


def is_named(gradients, exact, rank, network, moment):
    """Whether an average fails when that worker dies; those that do not fail are right."""
    strategy = Averages(gradients=gradients)
    faults = Faults(noticed_after=0.25).kill(rank, moment)
    try:
        average(gradients, strategy=strategy, network=network, faults=faults)
        told = ""
    except PeerLost as lost:
        told = str(lost)
    for other in set(strategy.seen) - {rank}:
        assert all(torch.equal(a, b) for a, b in zip(strategy.seen[other], exact[other], strict=False))
    return f"worker {rank} was lost before" in told or (bool(told) and pytest.fail(told))


def test_who_is_lost_is_named_by_those_who_wait_for_somebody_else():
    # worker 2 says its word to worker 0 alone; worker 1 never sends its factors
    @dataclass(frozen=True)
    class Stuck(Averages):
        async def worker(self, w):
            if w.rank == 0:
                await super().worker(w)
                return
            await w.send(0, Message(PREFIX + TERMS, terms(3), count=1.0, version=FIRST))
            await w.recv("never")

    layers = (Matrix(0, 40, 60),)
    gradients = [[made([3], rank, layers=layers, length=2400)] for rank in range(3)]
    faults = Faults(noticed_after=0.25).kill(2, 1.0)
    with pytest.raises(PeerLost, match=r"worker 2 was lost before worker 1 sent '.factors' to worker 0"):
        average(gradients, layers=layers, strategy=Stuck(gradients=gradients), faults=faults)


# -- the choice ------------------------------------------------------------------------------------


class Reduces:
    async def all_reduce(self, v, timeout=None): ...


def test_it_is_chosen_for_its_codec_and_stands_on_what_would_be_chosen_without():
    assert isinstance(choose_mean("auto", None, Factors(), 4), InFlight)
    assert choose_mean("auto", None, Factors(), 4)._mean is stripes
    assert isinstance(choose_mean("auto", Reduces(), Factors(), 4)._mean, Native)
    for name in ALGORITHMS:
        assert isinstance(choose_mean(name, None, Factors(), 4), InFlight)


def test_only_one_of_several_workers_has_to_record():
    assert average(many([3, 3]))[0].worker(0).replica.records
    assert not average(many([3]))[0].worker(0).replica.records
    assert not average(many([3, 3]), codec=Identity())[0].worker(0).replica.records


def test_what_lies_between_matrices_is_put_back():
    v, matrices = torch.arange(float(LENGTH)), Matrices(1, LAYERS)
    out = matrices.put_others(torch.zeros(LENGTH), matrices.others(v))
    assert out.count_nonzero() == LENGTH - 2400 - 2000 - 1
    assert torch.equal(out[out != 0], v[out != 0])
