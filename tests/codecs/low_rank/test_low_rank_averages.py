"""Averages of low rank: worked out on paper, and the identities of PowerSGD."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from shoal.codecs import LowRank
from shoal.codecs.low_rank.codec import KEY
from shoal.codecs.low_rank.power_sgd import LowRankRounds
from shoal.collectives import ALGORITHMS, InFlight, LinkCost, Native, native, stripes
from shoal.core.codec import Identity
from shoal.core.matrices import Matrices, Matrix
from shoal.core.replica import Parameters
from shoal.core.seeds import stream
from shoal.core.vector import Layout
from shoal.engine.averages import PRESENT
from shoal.engine.streaming import Merges
from shoal.launch.join import choose_mean
from shoal.sim import Network, Simulation
from shoal.strategies import StreamingDiLoCo, SyncServer
from shoal.testing import blobs
from shoal.vocabulary.strategy import Strategy

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((12, 20), (12,), (10, 3, 9)))))
MATRICES = (slice(0, 240), slice(252, None))
LINK = LinkCost(1e-4, 1e-9)


@dataclass(frozen=True)
class Averages(Strategy):
    """Each worker brings its vectors in turn, with its weights; `seen` has what came of them."""

    vectors: Any = ()  # of each worker, of each step
    weights: Any = None
    seen: dict[int, list[tuple[torch.Tensor, dict[str, Any]]]] = field(default_factory=dict)
    begin: Any = None  # the codec states to begin with

    async def worker(self, w):
        if self.begin is not None:
            w.engine.coding.states = copy.deepcopy(self.begin[w.rank])
        for step, v in enumerate(self.vectors[w.rank]):
            weight = 1.0 if self.weights is None else self.weights[w.rank][step]
            average = await w.mean(v, weight=weight)
            self.seen.setdefault(w.rank, []).append((average, copy.deepcopy(w.engine.coding.states)))


def average(vectors, codec, weights=None, layout=LAYOUT, collective="auto", begin=None, **options):
    """What each worker has after each step: the average, and its codec's states."""
    strategy = Averages(vectors=vectors, weights=weights, begin=begin)
    Simulation(
        strategy,
        lambda rank: Parameters(torch.zeros_like(vectors[rank][0])),
        workers=len(vectors),
        steps=1,
        layout=layout,
        codec=codec,
        mean=choose_mean(collective, None, codec, len(vectors), LINK),
        **options,
    ).run()
    return strategy.seen


def drawn(*names, length=LAYOUT.numel, dtype=torch.float64):
    return torch.randn(length, generator=stream(0, *names), dtype=torch.float64).to(dtype)


def many(workers, steps, **options):
    return [[drawn(k, t, **options) for t in range(steps)] for k in range(workers)]


# -- by hand ---------------------------------------------------------------------------------------


def test_two_workers_of_uneven_weight_by_hand():
    # M_0 = 8 e0 e1', weight 1; M_1 = 4 e0 e3', weight 3. The mean is e0 (2 e1 + 3 e3)', of rank 1:
    # it comes exactly. e_0 = e0 (6 e1 - 3 e3)', e_1 = e0 (-2 e1 + e3)'. Biases 4 and 8: 7
    layout = Layout(("w", "b"), (torch.Size((5, 5)), torch.Size((1,))))
    vectors = torch.zeros(2, 26, dtype=torch.float64)
    vectors[0, 1], vectors[1, 3], vectors[:, 25] = 8.0, 4.0, torch.tensor([4.0, 8.0])
    seen = average([[v] for v in vectors], LowRank(1), weights=[[1.0], [3.0]], layout=layout)
    for rank, (first, third) in enumerate([(6.0, -3.0), (-2.0, 1.0)]):
        ((mean, states),) = seen[rank]
        expected, rest = torch.zeros_like(mean), torch.zeros_like(mean)
        expected[1], expected[3], expected[25] = 2.0, 3.0, 7.0
        rest[1], rest[3] = first, third
        assert torch.allclose(mean, expected, atol=1e-12)
        assert torch.allclose(states[KEY]["rest"], rest, atol=1e-12)
        assert mean[25] == 7.0 and states[KEY]["rest"][25] == 0.0


def test_what_was_lacking_goes_into_the_next_average_by_hand():
    # one worker brings diag(2, 1) and then nothing: P = (2x, y) / l with l^2 = 4 x^2 + y^2, Q = (4x, y) / l.
    # The first average is P Q', the second is the rest times the same: all of it, for the rest has rank 1
    layout = Layout(("w",), (torch.Size((5, 5)),))
    m = torch.diag(torch.tensor([2.0, 1, 0, 0, 0], dtype=torch.float64)).flatten()
    x, y = Matrices(1, (Matrix(0, 5, 5),)).first_right(m)[:2].tolist()
    size = 4 * x * x + y * y
    first = torch.zeros(5, 5, dtype=torch.float64)
    first[:2, :2] = torch.tensor([[2 * x * 4 * x, 2 * x * y], [y * 4 * x, y * y]]) / size
    seen = average([[m, torch.zeros_like(m)]] * 2, LowRank(1), layout=layout)
    (one, _), (two, states) = seen[0]
    assert torch.allclose(one, first.flatten(), atol=1e-6)
    assert torch.allclose(one + two, m, atol=1e-6)
    assert states[KEY]["rest"].abs().max() < 1e-6


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_a_mean_of_that_rank_comes_exactly_although_no_worker_has_it(workers):
    mean = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for place, (n, q) in zip(MATRICES, ((12, 20), (10, 27)), strict=True):
        left, right = drawn("left", n, length=2 * n).view(n, 2), drawn("right", q, length=2 * q).view(2, q)
        mean[place] = (left @ right).flatten()
    noise = [drawn(k) for k in range(workers - 1)]
    vectors = [[mean + v] for v in [*noise, -sum(noise)]]
    assert torch.linalg.matrix_rank(vectors[0][0][:240].view(12, 20)) == 12
    for ((got, _),) in average(vectors, LowRank(2)).values():
        assert torch.allclose(got, mean, atol=1e-9)


@pytest.mark.parametrize("weights", [None, [[1.0] * 4, [5.0] * 4, [2.0] * 4]])
def test_the_average_and_what_all_lack_are_together_the_mean_of_what_was_given(weights):
    vectors = many(3, 4)
    seen = average(vectors, LowRank(1), weights)
    shares = torch.tensor([1.0, 1, 1] if weights is None else [w[0] for w in weights], dtype=torch.float64)
    shares /= shares.sum()
    for t in range(4):
        lacked = [torch.zeros(LAYOUT.numel) if t == 0 else seen[k][t - 1][1][KEY]["rest"] for k in range(3)]
        lacks = [seen[k][t][1][KEY]["rest"] for k in range(3)]
        given = sum(s * (vectors[k][t] + lacked[k]) for k, s in enumerate(shares))
        assert torch.allclose(seen[0][t][0] + sum(s * e for s, e in zip(shares, lacks, strict=True)), given)


def test_both_definitions_of_the_rest_have_the_same_mean():
    # M_k - P Q' with the average Q, and with a worker's own: M_k - P (M_k' P)'
    matrices, vectors = Matrices(2, (Matrix(0, 12, 20),)), [drawn(k, length=240) for k in range(3)]
    rounds = [LowRankRounds(matrices, v, None) for v in vectors]
    first = sum(r.first() for r in rounds) / 3
    own = [r.second(first) for r in rounds]
    ends = [r.finish(sum(own) / 3, remembers=True) for r in rounds]
    p = rounds[0]._p
    theirs = [v - matrices.fill(torch.empty_like(v), p, q, v[:0]) for v, q in zip(vectors, own, strict=True)]
    assert torch.allclose(sum(state["rest"] for _, state in ends), sum(theirs))


def test_a_rank_that_saves_nothing_is_the_average_itself():
    vectors = many(3, 2)
    for (got, states), (exact, _) in zip(
        average(vectors, LowRank(50))[0], average(vectors, Identity())[0], strict=True
    ):
        assert torch.equal(got, exact) and KEY not in states


def test_of_full_rank_it_is_the_average_itself():
    matrices, vectors = Matrices(6, (Matrix(0, 6, 9),)), [drawn(k, length=60) for k in range(3)]
    rounds = [LowRankRounds(matrices, v, None) for v in vectors]
    first = sum(r.first() for r in rounds) / 3
    second = sum(r.second(first) for r in rounds) / 3
    for r in rounds:
        got, state = r.finish(second, remembers=True)
        assert torch.allclose(got, sum(vectors) / 3, atol=1e-12)
        assert torch.allclose(state["rest"][:54], (r._v - got)[:54])


@pytest.mark.parametrize("collective", ["auto", "stripes", *ALGORITHMS])
@pytest.mark.parametrize("workers", [2, 5])
def test_all_workers_have_the_same_bits_however_it_is_summed(collective, workers):
    vectors = many(workers, 3, dtype=torch.float32)
    seen = average(vectors, LowRank(2), collective=collective)
    striped = average(vectors, LowRank(2))
    for t in range(3):
        for rank in range(workers):
            assert torch.equal(seen[rank][t][0], seen[0][t][0])
        assert torch.allclose(seen[0][t][0], striped[0][t][0], atol=1e-4)


@pytest.mark.soak
def test_over_many_steps_everything_arrives():
    vectors = [[drawn(k)] * 60 for k in range(3)]
    mean = sum(v[0] for v in vectors) / 3
    remembered = sum(got for got, _ in average(vectors, LowRank(1))[0]) / 60
    forgotten = sum(got for got, _ in average(vectors, LowRank(1, feedback="none"))[0]) / 60
    assert (remembered - mean).norm() < 0.15 * mean.norm()
    assert (forgotten - mean).norm() > 0.5 * mean.norm()


def test_from_a_copied_state_it_goes_on_with_the_same_bits():
    vectors = many(3, 6)
    whole = average(vectors, LowRank(2))
    states = [whole[k][2][1] for k in range(3)]
    later = average([v[3:] for v in vectors], LowRank(2), begin=states)
    for k in range(3):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[k][3:], later[k], strict=True))


# -- who gives nothing -----------------------------------------------------------------------------


def test_of_what_nobody_gives_nothing_arrives():
    vectors = [[drawn(k), torch.zeros(LAYOUT.numel, dtype=torch.float64)] for k in range(2)]
    for seen in average(vectors, LowRank(1), weights=[[1.0, PRESENT]] * 2).values():
        (_, before), (second, after) = seen
        assert before[KEY]["rest"].any() and torch.equal(before[KEY]["rest"], after[KEY]["rest"])
        assert not second.any()


@pytest.mark.parametrize("nothing", [0.0, PRESENT])
def test_who_gives_nothing_keeps_what_it_lacked(nothing):
    vectors = many(2, 2)
    seen = average(vectors, LowRank(1), weights=[[1.0, 1.0], [1.0, nothing]])
    alone = vectors[0][1] + seen[0][0][1][KEY]["rest"]
    assert torch.equal(seen[1][1][1][KEY]["rest"], seen[1][0][1][KEY]["rest"])
    assert torch.allclose(seen[0][1][0] + seen[0][1][1][KEY]["rest"], alone)


def test_where_nobody_gives_anything_nothing_changes():
    vectors = many(2, 2)
    seen = average(vectors, LowRank(1), weights=[[1.0, 0.0]] * 2)
    for rank in (0, 1):
        (_, before), (got, after) = seen[rank]
        assert not got.any()
        assert torch.equal(before[KEY]["rest"], after[KEY]["rest"])


def test_what_is_not_finite_is_seen_by_all_and_forgotten():
    vectors = many(2, 3)
    vectors[1][1][7] = float("nan")
    seen = average(vectors, LowRank(2))
    for rank in (0, 1):
        assert not seen[rank][1][0].isfinite().all()
        assert seen[rank][2][0].isfinite().all()
        assert torch.equal(seen[rank][0][1][KEY]["rest"], seen[rank][1][1][KEY]["rest"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_single(dtype):
    vectors = many(2, 1, dtype=dtype)
    ((got, states),) = average(vectors, LowRank(2))[0]
    ((wide, _),) = average([[v.float() for v in vs] for vs in vectors], LowRank(2))[0]
    assert got.dtype == dtype and states[KEY]["rest"].dtype == torch.float32
    assert torch.allclose(got.float(), wide, atol=40 * torch.finfo(dtype).eps)
    lacks = sum(seen[0][1][KEY]["rest"] for seen in average(vectors, LowRank(2)).values()) / 2
    given = sum(v[0].float() for v in vectors) / 2
    for place in MATRICES:
        assert torch.allclose((got.float() + lacks)[place], given[place], atol=1e-5)


def test_what_was_not_sent_is_accounted_for():
    run = shoal.run(wide_blobs(), "sync", workers=3, transport="sim", epochs=1, codec=LowRank(1))
    numbers = (8 + 64) + 64 + (64 + 3) + 3  # instead of 8 * 64 + 64 + 64 * 3 + 3 = 771
    steps = run.nodes[0]["steps"]
    assert run.nodes[0]["coded_bytes"] == steps * round(4 * numbers * 4 / 3)
    assert run.nodes[0]["dense_bytes"] == steps * round(4 * 771 * 4 / 3)


# -- the choice ------------------------------------------------------------------------------------


class Reduces:
    async def all_reduce(self, v, timeout=None): ...


def test_it_is_chosen_for_its_codec_and_stands_on_what_would_be_chosen_without():
    assert isinstance(choose_mean("auto", None, LowRank(), 4), InFlight)
    assert choose_mean("auto", None, LowRank(), 4)._mean is stripes
    assert isinstance(choose_mean("auto", Reduces(), LowRank(), 4)._mean, Native)
    assert choose_mean("stripes", Reduces(), LowRank(), 4)._mean is stripes
    for name in ALGORITHMS:
        assert isinstance(choose_mean(name, None, LowRank(), 4), InFlight)


def test_gradients_are_not_averaged_while_they_are_computed():
    assert isinstance(Native(), Merges)
    assert not isinstance(InFlight(Native(), native), Merges)


def test_without_layers_it_is_the_average_itself():
    vectors = many(2, 1)
    assert torch.equal(
        average(vectors, LowRank(2), layout=None)[0][0][0], average(vectors, Identity(), layout=None)[0][0][0]
    )


def wide_model():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def wide_blobs():
    return replace(blobs(), model=wide_model, batch=16)


LEARNERS = [
    shoal.Sync(),
    shoal.Local(period=2),
    shoal.DiLoCo(period=2),
    StreamingDiLoCo(period=4, fragments=2, overlap=1),
    SyncServer(),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mostly_soak(LEARNERS, few=1), ids=str)
def test_strategies_learn_with_it(strategy):
    options = {"workers": 3, "epochs": 4, "transport": "sim", "network": Network.parse("1Gbit,100us")}
    plain = shoal.run(wide_blobs(), strategy, **options)
    got = shoal.run(wide_blobs(), strategy, codec=LowRank(1), **options)
    assert got.test_accuracy > plain.test_accuracy - 4
    if not isinstance(strategy, StreamingDiLoCo | SyncServer):  # the former sends parts of layers too
        assert got.bytes_sent < 0.5 * plain.bytes_sent  # of a small model; headers are a good part of it


def weights(strategy, **options):
    result = shoal.run(wide_blobs(), strategy, codec=LowRank(1), **options)
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize(
    "strategy", mostly_soak([shoal.DiLoCo(period=4), shoal.Sync()], few=1), ids=lambda s: type(s).__name__
)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim"}
    weights(strategy, epochs=1, checkpoint=tmp_path, **settings)
    resumed = weights(strategy, epochs=3, checkpoint=tmp_path, **settings)
    assert torch.equal(resumed, weights(strategy, epochs=3, **settings))
