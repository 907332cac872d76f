"""Deep gradient compression: momentum that is summed where it is made, and what it is equal to."""

import copy

import pytest
import torch

from shoal.codecs.sparse import gaps, selection
from shoal.codecs.sparse.codec import Sparse
from shoal.codecs.sparse.dgc import DGC
from shoal.codecs.sparse.top_k import TopK
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.strategies import Sync, SyncServer
from shoal.testing.problems import Problem, simulate

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn(elements, seed=0, dtype=torch.float32):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sent(codec, gradients):
    """What arrives for each of these gradients, one after the other."""
    state, arrived = codec.init(gradients[0]), []
    for g in gradients:
        payload, state = codec.encode(g, state)
        arrived.append(codec.decode(payload, torch.full_like(g, 7)))
    return arrived, state


def count(payload):
    return HEADER.unpack(bytes(payload[0].tolist()))[5]


# -- on paper --------------------------------------------------------------------------------------


def test_the_equations_by_hand():
    # u = u / 2 + g, v = v + u, the larger v travels; then its u and v are 0
    codec, g = DGC(density=0.5, momentum=0.5), torch.tensor([4.0, 3.0])
    arrived, state = sent(codec, [g] * 3)
    assert [a.tolist() for a in arrived] == [
        [4.0, 0.0],  # u = v = (4, 3)
        [0.0, 7.5],  # u = (4, 4.5), v = (4, 3 + 4.5)
        [10.0, 0.0],  # u = (6, 3), v = (4 + 6, 3)
    ]
    assert state["velocity"].tolist() == [0.0, 3.0] and state["waiting"].tolist() == [0.0, 3.0]


def test_without_masking_the_velocity_goes_on():
    codec, g = DGC(density=0.5, momentum=0.5, masking=False), torch.tensor([4.0, 3.0])
    arrived, state = sent(codec, [g] * 2)
    assert [a.tolist() for a in arrived] == [[4.0, 0.0], [0.0, 7.5]]
    assert state["velocity"].tolist() == [6.0, 4.5] and state["waiting"].tolist() == [6.0, 0.0]


def test_nesterov_by_hand():
    # u = (u + g) / 2, v = v + u + g
    arrived, state = sent(
        DGC(density=1.0, momentum=0.5, nesterov=True, masking=False), [torch.tensor([4.0])] * 2
    )
    assert [a.item() for a in arrived] == [6.0, 7.0]  # u = 2, then (2 + 4) / 2
    assert state["velocity"].item() == 3.0


def test_a_long_gradient_is_clipped():
    g = torch.tensor([3.0, -4.0])  # of length 5
    assert sent(DGC(density=1.0, clip=2.5), [g])[0][0].tolist() == [1.5, -2.0]
    assert sent(DGC(density=1.0, clip=5.0), [g])[0][0].tolist() == [3.0, -4.0]
    long = torch.full((4,), 1e30)  # the square of which float32 does not hold
    assert torch.allclose(sent(DGC(density=1.0, clip=2.0), [long])[0][0], torch.ones(4))


def test_more_travels_in_the_warm_up():
    codec, g = DGC(density=0.002, warmup=2), drawn(10_000)
    state, counts = codec.init(g), []
    for _ in range(11):
        payload, state = codec.encode(g, state)
        counts.append(count(payload))
    assert counts == [2500] * 2 + [625] * 2 + [156] * 2 + [39] * 2 + [20] * 3


def test_a_warm_up_never_sends_less_than_is_wanted():
    codec, g = DGC(density=0.1, warmup=1), drawn(1000)
    state, counts = codec.init(g), []
    for _ in range(6):
        payload, state = codec.encode(g, state)
        counts.append(count(payload))
    assert counts == [250] + [100] * 5


# -- what it is equal to ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_elements_without_masking_is_momentum_sgd(dtype):
    gradients = [drawn(3000, seed, dtype) for seed in range(6)]
    arrived, _ = sent(DGC(density=1.0, momentum=0.9, masking=False), gradients)
    x = torch.nn.Parameter(torch.zeros(3000, dtype=dtype))
    sgd = torch.optim.SGD([x], lr=1.0, momentum=0.9)
    velocity = torch.zeros(3000, dtype=dtype)
    for g, got in zip(gradients, arrived, strict=True):
        velocity.mul_(0.9).add_(g)
        assert torch.equal(got, velocity)
        x.grad = g
        sgd.step()
        assert torch.equal(sgd.state[x]["momentum_buffer"], got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_all_elements_with_masking_is_sgd_without_momentum(dtype, nesterov):
    gradients = [drawn(3000, seed, dtype) for seed in range(6)]
    arrived, _ = sent(DGC(density=1.0, momentum=0.5, nesterov=nesterov), gradients)
    factor = 1.5 if nesterov else 1.0  # of Nesterov's first step: u + g = g / 2 + g
    assert all(torch.allclose(a, factor * g, rtol=1e-2) for a, g in zip(arrived, gradients, strict=True))
    if not nesterov:
        assert all(map(torch.equal, arrived, gradients))


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_momentum_it_is_top_k(masking, dtype):
    gradients = [drawn(3000, seed, dtype) for seed in range(6)]
    arrived, state = sent(DGC(density=0.01, momentum=0.0, masking=masking), gradients)
    codec, rest = TopK(density=0.01), torch.zeros(3000, dtype=dtype)
    for g, got in zip(gradients, arrived, strict=True):
        payload, _ = codec.encode_rest(g, rest, {})
        assert torch.equal(codec.decode(payload, torch.empty_like(g)), got)
    assert torch.equal(state["waiting"], rest)


def test_masking_matters_where_not_all_travel():
    gradients = [drawn(3000, seed) for seed in range(6)]
    with_it, without = (sent(DGC(density=0.01, masking=m), gradients)[0] for m in (True, False))
    assert torch.equal(with_it[0], without[0]) and not torch.equal(with_it[5], without[5])


def test_without_masking_what_is_sent_and_what_waits_is_all_that_momentum_made():
    # in eighths that never become too small: exact
    gradients = [
        torch.randint(-64, 65, (2000,), generator=torch.Generator().manual_seed(s)) * 16.0 for s in range(5)
    ]
    codec = DGC(density=0.02, momentum=0.5, masking=False)
    state, velocity = codec.init(gradients[0]), torch.zeros(2000)
    total, given = torch.zeros(2000), torch.zeros(2000)
    for g in gradients:
        velocity = 0.5 * velocity + g
        given += velocity
        payload, state = codec.encode(g, state)
        total += codec.decode(payload, torch.empty(2000))
        assert torch.equal(total + state["waiting"], given)


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return torch.sin(x * (rank + 1) + step) / 3


@pytest.mark.parametrize("strategy", [SyncServer(), Sync()], ids=repr)
def test_a_run_on_which_all_travels_is_momentum_sgd(strategy):
    # velocities are averaged there and gradients here: the same but for rounding, about 2^-53 a step
    problem, x = Drawn(lr=0.1), torch.tensor([0.3, -0.7, 0.1] * 3, dtype=torch.float64)
    codec = DGC(density=1.0, momentum=0.9, masking=False)
    run = simulate(strategy, problem, workers=4, steps=20, start=x.tolist(), codec=codec)
    velocity = torch.zeros_like(x)
    for step in range(20):
        velocity = 0.9 * velocity + sum(problem.gradient(rank, step, x) for rank in range(4)) / 4
        x = x - 0.1 * velocity
    assert torch.allclose(run.worker(0).x, x, rtol=0, atol=1e-12)


# -- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [0, 1, 5, 4097])
def test_kernel_and_torch_send_the_same_and_go_on_from_a_copy(elements, monkeypatch):
    codec = DGC(density=0.05, clip=10.0, warmup=1)
    state = codec.init(drawn(elements))
    for seed in range(6):
        saved = copy.deepcopy(state)
        g = drawn(elements, seed)
        before = g.clone()
        fast, state = codec.encode(g, state)
        with monkeypatch.context() as patch:
            patch.setattr(selection, "on_cpu", lambda *tensors: False)
            patch.setattr(gaps, "on_cpu", lambda *tensors: False)
            slow, other = codec.encode(g, saved)
        assert all(map(torch.equal, fast, slow)) and torch.equal(g, before)
        assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_is_not_finite_is_sent_first(bad, clip):
    g = drawn(1000)
    g[500] = bad
    arrived, _ = sent(DGC(clip=clip), [g])
    assert not arrived[0].isfinite().all()


def test_options():
    assert DGC().feedback == "none" and DGC().merged == Sparse()
    for wrong, said in (
        ({"density": 0.0}, "density"),
        ({"momentum": 1.0}, "below 1"),
        ({"momentum": -0.1}, "at least 0"),
        ({"clip": 0.0}, "above 0, or none"),
        ({"warmup": -1}, "0 for no warm-up"),
    ):
        with pytest.raises(ValueError, match=said):
            DGC(**wrong)


def test_a_payload_of_another_codec_is_refused():
    stream, values = gaps.pack(torch.tensor([2, 5]), 50), torch.tensor([1.0, 2.0])
    assert DGC().decode(seal(12, 50, 2, stream, values), torch.empty(50)).count_nonzero() == 2
    with pytest.raises(WireError):
        DGC().decode(seal(9, 50, 2, stream, values), torch.empty(50))
    with pytest.raises(WireError):
        DGC().decode(seal(12, 50, 3, stream, values), torch.empty(50))
