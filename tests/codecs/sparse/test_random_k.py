"""Elements drawn at random: known from a seed alone, evenly, and right on average."""

import copy

import pytest
import torch

from sampling import sampled
from shoal.codecs.sparse import random_k
from shoal.codecs.sparse.codec import Sparse
from shoal.codecs.sparse.random_k import RandomK, drawn
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


def whole(elements, seed, dtype=torch.float32):
    return torch.randint(1, 51, (elements,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_one_of_each_stretch():
    # 10 = 3 + 3 + 2 + 2, as even as it can be
    for seed in range(50):
        positions, lengths = drawn(RandomK().init(torch.empty(0), seed), 4, 10, CPU)
        assert lengths.tolist() == [3, 3, 2, 2]
        begins = torch.tensor([0, 3, 6, 8])
        assert ((begins <= positions) & (positions < begins + lengths)).all()


def test_the_seed_travels_and_not_the_positions():
    v = torch.arange(1.0, 1001.0)
    codec = RandomK(density=0.02)
    (header, values, begin), _ = codec.encode(v, codec.init(v, seed=5))
    assert HEADER.unpack(bytes(header.tolist()))[2:6] == (10, 0, 1000, 20)
    assert values.numel() == 20 and begin.tolist() == [5, 0]
    assert header.nbytes + values.nbytes + begin.nbytes == 32 + 4 * 20 + 16


def test_the_positions_in_plain_whole_numbers():
    # so that nothing about torch or the machine decides them, which would part sender and receiver
    for seed, counter, count, elements in ((3, 7, 5, 1000), (2**62 + 1, 0, 77, 10_001), (-9, 2**40, 4, 4)):
        state = {"seed": torch.tensor(seed), "counter": torch.tensor(counter)}
        length, longer = divmod(elements, count)
        want, begin = [], 0
        for k in range(count):
            long = length + (k < longer)
            word = split_mix(seed + (counter + k + 1) * 0x9E3779B97F4A7C15)
            share = (word % 2**32 // 2**8) * 2**24 + word // 2**40  # of 2^48: 24 bits of either half
            want.append(begin + int(share / 2**48 * long))
            begin += long
        assert drawn(state, count, elements, CPU)[0].tolist() == want


def split_mix(word):
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


@pytest.mark.parametrize(("dtype", "elements"), sampled(DTYPES, [0, 1, 2, 100, 4097]))
def test_what_is_sent_and_what_waits_is_all_there_was(elements, dtype):
    codec, rest = RandomK(density=0.1), torch.zeros(elements, dtype=dtype)
    state, total, sent = codec.init(rest, 1), torch.zeros_like(rest), torch.zeros_like(rest)
    for step in range(5):
        v = whole(elements, step, dtype)
        total += v
        payload, state = codec.encode_rest(v, rest, state)
        got = codec.decode(payload, torch.full_like(v, 7))
        assert got.count_nonzero() == min(elements, max(1, round(0.1 * elements)))
        sent += got
        assert torch.equal(sent + rest, total)


def test_with_density_1_it_is_the_vector_itself():
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for feedback in ("none", "residual"):
        codec = RandomK(density=1.0, feedback=feedback)
        assert torch.equal(codec.decode(codec.encode(v, codec.init(v))[0], torch.empty_like(v)), v)


@pytest.mark.slow
@pytest.mark.parametrize("elements", [pytest.param(30, marks=pytest.mark.soak), 37])
def test_without_feedback_it_is_right_on_average(elements):
    # An element v in a stretch of n comes as n v once in n times: variance (n - 1) v^2. The mean of 2000 is
    # then within 4.5 of its standard deviations but for one time in 2000, over all elements and both tests.
    codec, v = RandomK(density=0.2, feedback="none"), whole(elements, 0).double()
    state, total = codec.init(v, seed=1), torch.zeros_like(v)
    for _ in range(2000):
        payload, state = codec.encode(v, state)
        total += codec.decode(payload, torch.empty_like(v))
    _, lengths = drawn(state, round(0.2 * elements), elements, CPU)
    n = torch.repeat_interleave(lengths, lengths)
    assert ((total / 2000 - v).abs() <= 4.5 * v * ((n - 1) / 2000).sqrt()).all()


def test_every_vector_has_a_draw_of_its_own_and_a_copied_state_the_same():
    codec, v = RandomK(density=0.05), whole(2000, 0)
    first, state = codec.encode(v, codec.init(v, seed=4))
    saved = copy.deepcopy(state)
    second, _ = codec.encode(v, state)
    again, _ = codec.encode(v, saved)
    assert not torch.equal(first[1], second[1])
    assert all(map(torch.equal, second, again))
    other, _ = codec.encode(v, codec.init(v, seed=5))
    assert not torch.equal(first[1], other[1])


def test_stretches_longer_than_a_float_counts():
    # 2^40 elements, one drawn: no position is beyond reach, as with 24 bits all but every 2^16th would be
    found = [int(drawn(RandomK().init(torch.empty(0), s), 1, 2**40, CPU)[0]) for s in range(200)]
    assert max(found) < 2**40 and len({p % 2**16 for p in found}) > 190


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_also_if_it_is_not_drawn(bad):
    codec, rest = RandomK(density=0.01), torch.zeros(500)
    v = torch.ones(500)
    v[123] = bad
    state = codec.init(v)
    payload, _ = codec.encode_rest(v, rest, state)
    assert codec.decode(payload, torch.empty(500)).isnan().any()


def test_what_only_its_sum_is_too_large_for_is_sent_as_it_is():
    v = torch.full((100,), 3e38)
    codec = RandomK(density=0.1)
    assert codec.decode(codec.encode(v, codec.init(v))[0], torch.empty(100)).isfinite().all()


def test_options():
    assert RandomK().merged == Sparse() and RandomK(feedback="double").merged == RandomK(feedback="double")
    with pytest.raises(ValueError, match="density=0"):
        RandomK(density=0)
    with pytest.raises(ValueError, match="feedback"):
        RandomK(feedback="maybe")


# -- hostile ---------------------------------------------------------------------------------------


def bad_payloads():
    values, begin = torch.ones(3), torch.tensor([1, 2])
    yield seal(10, 50, 4, values, begin)
    yield seal(10, 50, 3, values.double(), begin)
    yield seal(10, 50, 3, values, begin[:1])
    yield seal(10, 50, 3, values, begin.int())
    yield seal(10, 50, 3, begin, values)
    yield seal(10, 50, 3, values)
    yield seal(10, 50, 3, values, begin, begin)
    yield seal(10, 50, 51, torch.ones(51), begin)
    yield seal(10, 50, 2**63, values, begin)
    yield seal(10, 49, 3, values, begin)
    yield seal(9, 50, 3, values, begin)
    yield ()


@pytest.mark.parametrize("payload", [*bad_payloads()])
def test_a_wrong_payload_is_refused(payload):
    with pytest.raises(WireError):
        RandomK().decode(payload, torch.empty(50))


@pytest.mark.parametrize("begin", [[-1, -1], [2**63 - 1, 2**63 - 1], [-(2**63), -(2**63)]])
def test_no_seed_leads_out_of_the_vector(begin):
    payload = seal(10, 50, 3, torch.ones(3), torch.tensor(begin))
    assert RandomK().decode(payload, torch.empty(50)).count_nonzero() == 3


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
@pytest.mark.parametrize(("elements", "density"), [(1, 1.0), (9000, 0.01), (9001, 0.7), (4096, 1.0)])
def test_a_kernel_writes_and_keeps_what_the_lines_of_torch_do(monkeypatch, elements, density, bad):
    codec = RandomK(density=density)
    chance = torch.Generator().manual_seed(elements)
    v, rest = torch.randn(elements, generator=chance), torch.randn(elements, generator=chance)
    if bad is not None:
        v[elements // 2] = bad
    results = []
    for has_kernel in (True, False):
        with monkeypatch.context() as patch:
            if not has_kernel:
                patch.setattr(random_k, "on_cpu", lambda *tensors: False)
            left = rest.clone()
            payload, _ = codec.encode_rest(v, left, codec.init(v, 3))
            results.append((*payload, codec.decode(payload, torch.empty(elements)), left))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
