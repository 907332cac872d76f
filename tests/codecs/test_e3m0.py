"""Four bits: every value and every border by hand, and that a kernel has the same ones."""

import copy
from itertools import pairwise

import pytest
import torch

from sampling import sampled
from shoal.codecs.e3m0 import codec as e3m0
from shoal.codecs.e3m0.codec import E3M0
from shoal.codecs.wire import seal
from shoal.core.errors import WireError

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
VALUES = [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(e3m0, "on_cpu", lambda *tensors: False)


def drawn(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encoded(v, codec):
    return codec.encode(v, codec.init(v))[0]


def round_trip(v, codec=None):
    codec = codec or E3M0()
    return codec.decode(encoded(v, codec), torch.full_like(v, 7))


# -- on paper --------------------------------------------------------------------------------------


def test_codes_by_hand(lines):
    # the scale is 8: 8 is code 7, -4 is 6 with the sign 8, 1 is 4; 0.1 is nearer to 1/8 than to 0, 0.05 not
    _, pairs, scales = encoded(torch.tensor([8.0, -4.0, 1.0, 0.1, 0.05]), E3M0())
    assert pairs.tolist() == [7 + 16 * (8 + 6), 4 + 16 * 1, 0]
    assert scales.tolist() == [8.0]
    got = round_trip(torch.tensor([8.0, -4.0, 1.0, 0.1, 0.05]))
    assert got.tolist() == [8.0, -4.0, 1.0, 0.125, 0.0]


def test_every_value_comes_back_in_every_scale(lines):
    for scale in (1.0, 3.0, 0.7, 1e30, 1e-30):
        v = torch.tensor([*VALUES, *(-x for x in VALUES)]) * scale
        assert torch.equal(round_trip(v), v)


def test_from_the_middle_on_it_is_the_larger_one(lines):
    # 1 in front makes the scale 1
    for low, high in pairwise(VALUES):
        middle = (low + high) / 2
        just_below = torch.nextafter(torch.tensor(middle), torch.tensor(0.0)).item()
        v = torch.tensor([1.0, middle, -middle, just_below, -just_below])
        assert round_trip(v)[1:].tolist() == [high, -high, low, -low]


def test_halfway_it_is_the_larger_one_whatever_the_scale(lines):
    # 1 / scale is mostly not a float, 0.75 * scale and 0.375 * scale are
    for scale in range(1, 400):
        v = torch.tensor([1.0, 0.75, -0.375]) * scale
        assert round_trip(v).tolist() == [scale, scale, -scale / 2]


def test_it_is_the_nearest_in_value(lines):
    v = drawn(4000)
    got = round_trip(v, E3M0(block=100)).view(-1, 100)
    blocks = v.view(-1, 100)
    scales = blocks.abs().amax(1)
    values = torch.tensor([*VALUES, *(-x for x in VALUES)]) * scales[:, None, None]
    nearest = (values - blocks[:, :, None]).abs().amin(2)
    assert torch.allclose((got - blocks).abs(), nearest, atol=1e-6)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="block=255 should be a multiple of 2"):
        E3M0(block=255)
    with pytest.raises(ValueError, match="from 1 to"):
        E3M0(block=0)
    with pytest.raises(ValueError, match="none, residual, double"):
        E3M0(feedback="some")


# -- what it promises ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "n"), sampled(DTYPES, [0, 1, 2, 63, 64, 65, 1000]))
def test_every_dtype_is_off_by_a_third_at_most_or_by_a_128th_of_the_scale(lines, dtype, n):
    v = drawn(n).to(dtype)
    got = round_trip(v, E3M0(block=64))
    assert got.dtype == dtype
    for begin in range(0, n, 64):
        mine, theirs = v[begin : begin + 64].double(), got[begin : begin + 64].double()
        allowed = torch.maximum(mine.abs() / 3, mine.abs().max() / 128) * (1 + 2 * torch.finfo(dtype).eps)
        assert ((mine - theirs).abs() <= allowed + 1e-7).all()


def test_half_a_byte_for_an_element_and_four_bytes_for_a_block():
    for n, block in ((0, 64), (1, 64), (64, 64), (65, 64), (1001, 2)):
        _, pairs, scales = encoded(drawn(n), E3M0(block=block))
        assert (pairs.nbytes, scales.nbytes) == (-(-n // 2), 4 * -(-n // block))


def test_a_block_of_nothing_and_one_too_small_for_a_scale_are_zeros(lines):
    v = torch.tensor([0.0, -0.0, 2.0**-120, -(2.0**-149), 2.0**-119, 2.0**-125])
    assert round_trip(v, E3M0(block=2)).tolist() == [0, 0, 0, 0, 2.0**-119, 2.0**-125]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_shows_in_its_block_alone(lines, bad):
    v = drawn(64)
    v[20] = bad
    got = round_trip(v, E3M0(block=16))
    assert got[16:32].isnan().all()
    assert got[:16].isfinite().all() and got[32:].isfinite().all()


def test_what_was_sent_and_what_is_left_are_what_was_given(lines):
    # 64 in front of each block: all values are whole numbers from 1 to 64, so no sum is ever rounded
    codec, rest = E3M0(block=4, feedback="residual"), torch.zeros(40)
    given, sent = torch.zeros(40), torch.zeros(40)
    for step in range(8):
        v = drawn(40, seed=step).mul(8).round() / 4
        v[::4] = 64
        given += v
        payload, _ = codec.encode_rest(v, rest, {})
        sent += codec.decode(payload, torch.empty(40))
        assert torch.equal(sent + rest, given)
    assert rest.any()


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "n"), sampled([2, 6, 64, 256], [0, 1, 2, 63, 64, 65, 255, 257, 5001]))
def test_a_kernel_gives_the_same_bits(monkeypatch, n, block):
    codec = E3M0(block=block)
    for scale in (1.0, 1e-36, 1e38):
        v = drawn(n) * scale
        if n > 100:
            v[70], v[-1] = NAN, INF
        results = []
        for patched in (False, True):
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr(e3m0, "on_cpu", lambda *tensors: False)
                rest = drawn(n, seed=1) * scale
                payload = encoded(v, codec)
                more, _ = codec.encode_rest(v, rest, {})
                results.append((*payload, *more, codec.decode(payload, torch.empty(n)), rest))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_a_kernel_rounds_alike_where_it_is_close(monkeypatch):
    # the borders of 2000 scales, which are a last digit above or below them
    top = drawn(2000).abs()[:, None] + 0.1
    v = torch.cat([top, torch.tensor(e3m0.BORDERS) * top], 1).flatten()
    ours = encoded(v, E3M0(block=8))
    monkeypatch.setattr(e3m0, "on_cpu", lambda *tensors: False)
    assert all(map(torch.equal, ours, encoded(v, E3M0(block=8))))


def test_a_copy_of_a_stream_goes_on_alike():
    codec, rest = E3M0(feedback="residual"), drawn(100)
    saved = copy.deepcopy(rest)
    first, _ = codec.encode_rest(drawn(100, seed=2), rest, {})
    second, _ = codec.encode_rest(drawn(100, seed=2), saved, {})
    assert all(map(torch.equal, first, second)) and torch.equal(rest, saved)


# -- hostile payloads ------------------------------------------------------------------------------


def test_every_code_stands_for_something(lines):
    pairs = torch.arange(256, dtype=torch.uint8)
    got = E3M0(block=512).decode(seal(4, 512, 1, pairs, torch.ones(1)), torch.empty(512))
    values = [*VALUES, *(-x for x in VALUES)]
    assert got.tolist() == [value for code in range(256) for value in (values[code % 16], values[code // 16])]


def test_what_no_encoder_writes_is_refused(lines):
    codec = E3M0(block=4)
    _, pairs, scales = encoded(drawn(11), codec)

    def refused(pairs, scales, elements=11):
        with pytest.raises(WireError):
            codec.decode(seal(codec.code, elements, 3, pairs, scales), torch.empty(11))

    codec.decode(seal(codec.code, 11, 3, pairs, scales), torch.empty(11))
    refused(pairs[:5], scales)
    refused(pairs, scales[:2])
    refused(pairs.to(torch.int8), scales)
    refused(pairs, scales.double())
    refused(pairs, scales, elements=12)
    refused(pairs + torch.tensor([0, 0, 0, 0, 0, 16], dtype=torch.uint8), scales)  # a twelfth element
    refused(pairs, torch.where(torch.arange(3) == 1, -scales, scales))
    with pytest.raises(WireError):
        codec.decode(seal(codec.code, 11, 3, pairs), torch.empty(11))
