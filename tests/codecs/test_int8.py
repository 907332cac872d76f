"""Eight bits: steps by hand, how far they are off, and that a kernel takes the same ones."""

import copy

import pytest
import torch

from sampling import sampled
from shoal.codecs.int8 import codec as int8
from shoal.codecs.int8.codec import Int8
from shoal.codecs.wire import seal
from shoal.core.errors import WireError

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(int8, "on_cpu", lambda *tensors: False)


def drawn(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encoded(v, codec):
    return codec.encode(v, codec.init(v))[0]


def round_trip(v, codec):
    return codec.decode(encoded(v, codec), torch.full_like(v, 7))


# -- on paper --------------------------------------------------------------------------------------


def test_two_blocks_by_hand(lines):
    v = torch.tensor([127.0, 0.5, 1.5, -2.5, -0.25, 0.5, 0.0])
    _, codes, scales = encoded(v, Int8(block=4))
    # the first block has the scale 127 / 127: ties go to the even step; the second 0.5 / 127
    assert codes.tolist() == [127, 0, 2, -2, -64, 127, 0]  # -0.25 / 0.5 * 127 = -63.5
    assert scales.tolist() == [1.0, torch.tensor(0.5).div(127).item()]
    assert round_trip(v, Int8(block=4))[:4].tolist() == [127.0, 0.0, 2.0, -2.0]


def test_a_block_does_not_hear_of_its_neighbours(lines):
    v = torch.cat([torch.full((8,), 1e-6), torch.full((8,), 1e6)])
    assert torch.allclose(round_trip(v, Int8(block=8)), v, rtol=1e-6)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="block=0 should be from 1 to"):
        Int8(block=0)
    with pytest.raises(ValueError, match="none, residual, double"):
        Int8(feedback="some")


# -- what it promises ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "n"), sampled(DTYPES, [0, 1, 63, 64, 65, 1000]))
def test_nothing_is_off_by_more_than_half_a_step(lines, dtype, n):
    v = drawn(n).to(dtype)
    got = round_trip(v, Int8(block=64))
    assert got.dtype == dtype
    for begin in range(0, n, 64):
        mine, theirs = v[begin : begin + 64].double(), got[begin : begin + 64].double()
        slack = 1e-6 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
        most = mine.abs().max()
        assert (mine - theirs).abs().max() <= most * (0.5 / 127 + slack)


def test_whole_numbers_up_to_127_come_back_unharmed(lines):
    v = torch.arange(-127.0, 128)
    assert torch.equal(round_trip(v, Int8(block=255)), v)
    assert torch.equal(round_trip(v * 2**-20, Int8(block=255)), v * 2**-20)


def test_a_byte_for_an_element_and_four_for_a_block():
    for n, block in ((0, 64), (1, 64), (64, 64), (65, 64), (1000, 1)):
        _, codes, scales = encoded(drawn(n), Int8(block=block))
        assert (codes.nbytes, scales.nbytes) == (n, 4 * -(-n // block))


def test_a_block_of_nothing_and_one_too_small_for_a_scale_are_zeros(lines):
    v = torch.tensor([0.0, -0.0, 2.0**-120, -(2.0**-149), 2.0**-119, 2.0**-120])
    got = round_trip(v, Int8(block=2))
    assert got[:4].tolist() == [0, 0, 0, 0]
    assert got[4] == v[4] and got[5] == v[4] * torch.tensor(64.0) / 127  # 63.5 is a tie


def test_the_largest_floats_come_back(lines):
    v = torch.tensor([3.4e38, -3.4e38, 1e37])
    assert torch.allclose(round_trip(v, Int8()), v, rtol=1e-6, atol=3.4e38 / 254)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_shows_in_its_block_alone(lines, bad):
    v = drawn(64)
    v[20] = bad
    got = round_trip(v, Int8(block=16))
    assert got[16:32].isnan().all()
    assert got[:16].isfinite().all() and got[32:].isfinite().all()


def test_a_double_out_of_range_of_a_float_shows_too():
    assert round_trip(torch.tensor([1e300, 1.0], dtype=torch.float64), Int8()).isnan().all()


# -- feedback --------------------------------------------------------------------------------------


def test_what_was_sent_and_what_is_left_are_what_was_given(lines):
    # with 127 in front of each block the step is 1: in quarters, no sum is ever rounded
    codec, rest = Int8(block=4, feedback="residual"), torch.zeros(40)
    given, sent = torch.zeros(40), torch.zeros(40)
    for step in range(8):
        v = drawn(40, seed=step).mul(8).round() / 4
        v[::4] = 127
        given += v
        payload, _ = codec.encode_rest(v, rest, {})
        sent += codec.decode(payload, torch.empty(40))
        assert torch.equal(sent + rest, given)
        assert rest.abs().max() <= 0.5
    assert rest.any()


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "n"), sampled([1, 7, 64, 2048], [0, 1, 63, 64, 65, 2047, 2049, 5000]))
def test_a_kernel_gives_the_same_bits(monkeypatch, n, block):
    codec = Int8(block=block)
    for scale in (1.0, 1e-36, 1e38):
        v = drawn(n) * scale
        if n > 100:
            v[70], v[-1] = NAN, INF
        results = []
        for patched in (False, True):
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr(int8, "on_cpu", lambda *tensors: False)
                rest = drawn(n, seed=1) * scale
                payload = encoded(v, codec)
                more, _ = codec.encode_rest(v, rest, {})
                results.append((*payload, *more, codec.decode(payload, torch.empty(n)), rest))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_a_kernel_rounds_alike_where_it_is_close(monkeypatch):
    # halves of a step in 2000 scales, which are a last digit above or below a tie
    top = drawn(2000).abs()[:, None] + 0.1
    v = torch.cat([top, (torch.arange(127) + 0.5) / 127 * top], 1).flatten()
    ours = encoded(v, Int8(block=128))
    monkeypatch.setattr(int8, "on_cpu", lambda *tensors: False)
    assert all(map(torch.equal, ours, encoded(v, Int8(block=128))))


def test_a_copy_of_a_stream_goes_on_alike():
    codec, rest = Int8(feedback="residual"), drawn(100)
    saved = copy.deepcopy(rest)
    first, _ = codec.encode_rest(drawn(100, seed=2), rest, {})
    second, _ = codec.encode_rest(drawn(100, seed=2), saved, {})
    assert all(map(torch.equal, first, second)) and torch.equal(rest, saved)


# -- hostile payloads ------------------------------------------------------------------------------


def test_what_no_encoder_writes_is_refused(lines):
    codec = Int8(block=4)
    _, codes, scales = encoded(drawn(10), codec)

    def refused(codes, scales, elements=10):
        with pytest.raises(WireError):
            codec.decode(seal(codec.code, elements, 3, codes, scales), torch.empty(10))

    codec.decode(seal(codec.code, 10, 3, codes, scales), torch.empty(10))
    refused(codes[:9], scales)
    refused(codes, scales[:2])
    refused(codes.short(), scales)
    refused(codes, scales.double())
    refused(codes, scales, elements=11)
    refused(torch.where(torch.arange(10) == 9, -128, codes).to(torch.int8), scales)
    refused(codes, torch.where(torch.arange(3) == 1, -scales, scales))
    with pytest.raises(WireError):
        codec.decode(seal(codec.code, 10, 3, codes, scales, codes), torch.empty(10))
    with pytest.raises(WireError):
        codec.decode(seal(codec.code, 10, 3, codes), torch.empty(10))
