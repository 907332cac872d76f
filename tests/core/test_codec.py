"""Codecs: what they promise about a round trip, and how they refuse what is not theirs."""

import pytest
import torch

from shoal.codecs import CODECS, FP16
from shoal.codecs.wire import seal
from shoal.core.codec import Identity, expect
from shoal.core.errors import WireError

LARGEST = 65504.0


def round_trip(codec, v):
    payload, _ = codec.encode(v, codec.init(v))
    return codec.decode(payload, torch.empty_like(v))


def test_identity_changes_no_bit():
    v = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(round_trip(Identity(), v), v)
    assert Identity().exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_keeps_what_a_half_can_hold(dtype):
    v = torch.tensor([0.0, -0.0, 1.0, -2.5, 0.333251953125, LARGEST, 2.0**-24], dtype=dtype)
    assert torch.equal(round_trip(FP16(), v), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_is_right_to_eleven_bits(dtype):
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = round_trip(FP16(), v)
    assert got.dtype == dtype
    assert ((got - v).abs() <= v.abs() * 2.0**-11 + 2.0**-25).all()
    assert not torch.equal(got, v)


def test_half_precision_clamps_instead_of_overflowing():
    v = torch.tensor([1e6, -1e6, 65519.0, 65520.0, 1e300], dtype=torch.float64)
    assert round_trip(FP16(), v).tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST, LARGEST]


def test_half_precision_does_not_hide_what_is_not_a_number():
    assert round_trip(FP16(), torch.tensor([float("nan")])).isnan().all()


def test_half_precision_halves_the_bytes_of_single_precision():
    (_, half), _ = FP16().encode(torch.zeros(10), {})
    assert half.numel() * half.element_size() == 10 * 2
    assert not FP16().exact


@pytest.mark.parametrize("word", CODECS)
def test_encoding_leaves_the_vector_as_it_was(word):
    codec = CODECS.make(word)
    v = torch.tensor([1e6, 0.1, -3.0])
    codec.encode(v, codec.init(v))
    assert v.tolist() == torch.tensor([1e6, 0.1, -3.0]).tolist()


@pytest.mark.parametrize("word", ["none", "fp16", "bf16"])  # others need not be near: see tests/codecs
@pytest.mark.parametrize("length", [0, 1, 7])
def test_every_length_goes_through(word, length):
    v = torch.arange(float(length))
    assert torch.allclose(round_trip(CODECS.make(word), v), v, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("word", CODECS)
@pytest.mark.parametrize(
    "payload",
    [
        (),
        (torch.zeros(4, dtype=torch.int64),),
        (torch.zeros(5), torch.zeros(5)),
        (torch.zeros(6),),
        (torch.zeros(6, dtype=torch.float16),),
        (torch.zeros(5, dtype=torch.float64),),
    ],
)
def test_a_payload_that_does_not_fit_is_a_wire_error(word, payload):
    with pytest.raises(WireError):
        CODECS.make(word).decode(payload, torch.empty(5))


def test_a_wire_error_says_what_came_and_what_was_expected():
    with pytest.raises(
        WireError, match=r"\(torch.float32, 3\).* arrived where .*\(torch.float16, 5\).* was expected"
    ):
        FP16().decode(seal(FP16.code, 5, 5, torch.zeros(3)), torch.empty(5))


def test_a_payload_that_fits_is_handed_on():
    parts = (torch.zeros(2), torch.zeros(3, dtype=torch.int32))
    assert expect(parts, (torch.float32, 2), (torch.int32, 3)) is parts
