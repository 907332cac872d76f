"""1-bit SGD: signs and two means a column, and what they lack kept for the next time."""

import copy

import pytest
import torch

from sampling import sampled
from shoal.codecs import OneBit
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.kernels import dispatch

LENGTHS = [1, 15, 16, 511, 512, 513, 1024, 1025, 5000]  # around the borders of rows and columns


def round_trip(codec, v):
    payload, _ = codec.encode(v, {})
    return codec.decode(payload, torch.empty_like(v))


def whole_numbers(length, seed=0, most=9):
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, (length,), generator=chance).float()


def normal(length, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


# -- by hand ---------------------------------------------------------------------------------------


def test_an_element_arrives_as_the_mean_of_its_column_on_its_side_of_zero():
    # columns of 4: above 0 the mean of 1 and 3, below that of -2 and -4; all 5; a short one of -1 alone
    v = torch.tensor([1.0, 3, -2, -4, 5, 5, 5, 5, -1])
    codec = OneBit(column=4)
    (_, signs, values), _ = codec.encode(v, {})
    assert values.tolist() == [-3, 2, 0, 5, -1, 0]
    assert signs.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0] + 7 * [0]
    assert round_trip(codec, v).tolist() == [2, 2, -3, -3, 5, 5, 5, 5, -1]


def test_what_did_not_arrive_is_sent_the_next_time():
    codec, rest = OneBit(column=4), torch.zeros(4)
    payload, _ = codec.encode_rest(torch.tensor([1.0, 3, -2, -4]), rest, {})
    assert rest.tolist() == [-1, 1, 1, -1]  # 1 - 2, 3 - 2, -2 + 3, -4 + 3
    payload, _ = codec.encode_rest(torch.tensor([0.0, 0, 0, -2]), rest, {})  # so of -1, 1, 1, -3
    assert codec.decode(payload, torch.empty(4)).tolist() == [-2, 1, 1, -2]
    assert rest.tolist() == [1, 0, 0, -1]


def test_a_column_with_one_value_on_each_side_loses_nothing():
    v = torch.tensor([0.1, -0.7]).repeat(256)[torch.randperm(512, generator=torch.Generator().manual_seed(0))]
    assert torch.allclose(round_trip(OneBit(), v), v, rtol=1e-6)
    assert torch.equal(round_trip(OneBit(column=100), v), v)  # the lines of torch add up in float64


@pytest.mark.parametrize("length", [512, 5000])
def test_a_sum_may_be_larger_than_any_float(length):
    v = torch.full((length,), 3e37)
    v[::3] *= -1
    assert torch.equal(round_trip(OneBit(), v), v)
    rest = torch.zeros(length)
    OneBit().encode_rest(v, rest, {})
    assert not rest.any()


def test_zeros_stay_zeros_whatever_their_sign():
    v = torch.zeros(1024)
    v[::3] = -0.0
    assert not round_trip(OneBit(), v).any()
    assert not round_trip(OneBit(column=100), v).any()


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_a_bit_for_each_element_and_eight_bytes_for_each_column(length):
    payload, _ = OneBit().encode(normal(length), {})
    columns = -(-length // 512)
    assert sum(part.nbytes for part in payload) == HEADER.size + 64 * columns + 8 * columns


# -- feedback --------------------------------------------------------------------------------------


def test_what_was_sent_and_what_is_left_are_what_was_given():
    # whole numbers, and columns in which each side has a power of 2 of them: all of it is exact
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    codec, rest, given, sent = OneBit(), torch.zeros(512), torch.zeros(512), torch.zeros(512)
    v = torch.cat([torch.arange(1.0, 257), -torch.arange(1.0, 257)])[order]
    for _ in range(5):
        given += v
        payload, _ = codec.encode_rest(v, rest, {})
        sent += codec.decode(payload, torch.empty(512))
        assert torch.allclose(sent + rest, given, rtol=0, atol=2e-4)  # from the second on, a mean is rounded
    first, rest = torch.empty(512), torch.zeros(512)
    codec.decode(codec.encode_rest(v, rest, {})[0], first)
    assert torch.equal(first + rest, v)


def descend(codec, feedback, steps=400):
    """The distance from the minimum of a bowl whose axes are of very different lengths."""
    target, x, rest = normal(512) * torch.logspace(0, -3, 512), torch.zeros(512), torch.zeros(512)
    for _ in range(steps):
        slope = 0.05 * (x - target)
        if feedback:
            payload, _ = codec.encode_rest(slope, rest, {})
        else:
            payload, _ = codec.encode(slope, {})
        x -= codec.decode(payload, torch.empty(512))
    return float((x - target).norm() / target.norm())


def test_it_converges_with_feedback_and_stalls_without():
    assert descend(OneBit(), feedback=True) < 0.02
    assert descend(OneBit(), feedback=False) > 0.2


# -- kernels ---------------------------------------------------------------------------------------


@pytest.fixture
def lines_of_torch(monkeypatch):
    """Call it, and there are no kernels any more."""
    return lambda: monkeypatch.setattr(dispatch, "_has_numba", lambda: False)


@pytest.mark.parametrize(("column", "length"), sampled([512, 1536], LENGTHS))
def test_the_kernel_gives_the_bits_of_the_lines_of_torch_where_sums_are_exact(lines_of_torch, column, length):
    codec, v, rest = OneBit(column=column), whole_numbers(length), whole_numbers(length, seed=1) / 2
    fast, plain = rest.clone(), rest.clone()
    mine = codec.encode(v, {})[0], codec.encode_rest(v, fast, {})[0]
    outs = [codec.decode(payload, torch.empty(length)) for payload in mine]
    lines_of_torch()
    theirs = codec.encode(v, {})[0], codec.encode_rest(v, plain, {})[0]
    for one, other, out in zip(mine, theirs, outs, strict=True):
        assert all(map(torch.equal, one, other))
        assert torch.equal(codec.decode(other, torch.empty(length)), out)
    assert torch.equal(fast, plain)


def test_elsewhere_their_means_differ_in_the_last_places(lines_of_torch):
    codec, v = OneBit(), normal(20_000)
    fast, plain = normal(20_000, seed=1), normal(20_000, seed=1)
    (_, signs, values), _ = codec.encode_rest(v, fast, {})
    lines_of_torch()
    (_, signs_too, values_too), _ = codec.encode_rest(v, plain, {})
    assert torch.equal(signs, signs_too)
    assert torch.allclose(values, values_too, rtol=1e-6, atol=0)
    assert torch.allclose(fast, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_column(bad):
    v, rest = normal(2048), torch.zeros(2048)
    v[600] = bad
    payload, _ = OneBit().encode_rest(v, rest, {})
    out = OneBit().decode(payload, torch.empty(2048))
    strange = ~out.isfinite() | ~rest.isfinite()
    assert strange[600] and not strange[:512].any() and not strange[1024:].any()


def test_the_vector_may_need_gradients_and_lie_anywhere_in_memory():
    v = normal(2000)
    for other in (v.clone().requires_grad_(), normal(4000).index_put((torch.arange(0, 4000, 2),), v)[::2]):
        one, other_one = OneBit().encode(v, {})[0], OneBit().encode(other, {})[0]
        assert torch.equal(one[1], other_one[1])
        assert torch.allclose(one[2], other_one[2], rtol=1e-6)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [0, -512, 2**21])
def test_a_column_must_have_a_length_that_can_be(column):
    with pytest.raises(ValueError, match="column="):
        OneBit(column=column)


def test_feedback_is_a_word_that_there_is():
    with pytest.raises(ValueError, match="feedback='always'"):
        OneBit(feedback="always")


def test_each_part_of_a_payload_is_checked():
    (_, signs, values), _ = OneBit().encode(normal(1000), {})
    for count, *bodies in (
        (1, signs, values),
        (3, signs, values),
        (2, signs[:-1], values),
        (2, signs, values[:-1]),
        (2, signs.long(), values),
        (2, signs, values.double()),
        (2, signs),
        (2, values, signs),
        (2, signs, values, values),
    ):
        with pytest.raises(WireError):
            OneBit().decode(seal(OneBit.code, 1000, count, *bodies), torch.empty(1000))
    with pytest.raises(WireError):  # another column
        OneBit(column=1024).decode(seal(OneBit.code, 1000, 2, signs, values), torch.empty(1000))


def test_a_copied_state_goes_on_with_the_same_bits():
    codec, rest = OneBit(), torch.zeros(3000)
    for seed in range(3):
        codec.encode_rest(normal(3000, seed), rest, {})
    other = copy.deepcopy(rest)
    one, _ = codec.encode_rest(normal(3000, 9), rest, {})
    two, _ = codec.encode_rest(normal(3000, 9), other, {})
    assert all(map(torch.equal, one, two))
    assert torch.equal(rest, other)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [512, 5000])
@pytest.mark.parametrize("column", [512, 8192])
def test_on_a_gpu_too_a_sum_may_be_larger_than_any_float(column, length):
    v, rest = torch.full((length,), 3e37, device="cuda"), torch.zeros(length, device="cuda")
    v[::3] *= -1
    payload, _ = OneBit(column).encode_rest(v, rest, {})
    assert torch.allclose(OneBit(column).decode(payload, torch.empty_like(v)), v, rtol=1e-5)  # float32 sums
    assert (rest.abs() <= 1e-5 * v.abs()).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("column", "length"), sampled([512, 1024, 1536, 4096], [*LENGTHS, 1_000_003]))
def test_a_gpu_gives_what_the_lines_of_torch_give(lines_of_torch, column, length):
    lines_of_torch()
    codec = OneBit(column=column)
    for make, exact in ((whole_numbers, True), (normal, False)):
        v, rest = make(length), make(length, seed=1)
        there = rest.cuda()
        (_, signs, values), _ = codec.encode_rest(v, rest, {})
        (header, signs_too, values_too), _ = codec.encode_rest(v.cuda(), there, {})
        assert torch.equal(signs, signs_too.cpu())
        assert torch.allclose(values, values_too.cpu(), rtol=0 if exact else 1e-5, atol=0)
        assert torch.allclose(rest, there.cpu(), rtol=0, atol=0 if exact else 1e-5)
        out = codec.decode((header, signs_too, values_too), torch.empty(length, device="cuda"))
        back = codec.decode(tuple(p.cpu() for p in (header, signs_too, values_too)), torch.empty(length))
        assert torch.equal(out.cpu(), back)
        assert torch.equal(codec.encode(v.cuda(), {})[0][1].cpu(), codec.encode(v, {})[0][1])
