"""Frames: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
import torch

from shoal.core.errors import WireError
from shoal.core.transport import HEADER_BYTES, Message
from shoal.transports import frames

LIMIT = 1 << 30


def header(*parts: torch.Tensor, tag: str = "push", src: int = 3) -> bytearray:
    m = Message(tag, parts, seq=-5, count=32.0, version=9, rate=0.1, clock=11, incarnation=258)
    return bytearray(frames.encode(m, frames.flatten(parts), src))


def test_header_and_shapes_come_back() -> None:
    raw = header(torch.ones(3), torch.empty(0, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.uint8))
    assert len(raw) == HEADER_BYTES
    message, shapes = frames.decode(raw, LIMIT)
    assert message == Message(
        "push", (), src=3, seq=-5, count=32.0, version=9, rate=0.1, clock=11, incarnation=258
    )
    assert shapes == [(torch.float32, 3), (torch.bfloat16, 0), (torch.uint8, 4)]


@pytest.mark.parametrize("dtype", frames.DTYPES)
def test_every_dtype_has_a_code(dtype: torch.dtype) -> None:
    assert frames.decode(header(torch.ones(7, dtype=dtype)), LIMIT)[1] == [(dtype, 7)]


def test_layout_is_fixed_by_the_protocol() -> None:
    """Two versions of Shoal that disagree about this must not have the same number."""
    raw = header(torch.ones(3), tag="pull", src=1)
    assert raw[:8] == b"SHOL\x02\x01\x02\x01"
    assert raw[8:24] == b"pull" + bytes(12)
    assert struct.unpack_from("<iqdqdq", raw, 24) == (1, -5, 32.0, 9, 0.1, 11)
    assert struct.unpack_from("<BQBQ", raw, 68) == (1, 3, 0, 0)


@pytest.mark.parametrize(
    ("offset", "bytes_", "complaint"),
    [
        (0, b"HTTP", "begins with"),
        (4, b"\x01", "version 1"),
        (5, b"\x05", "announces 5 parts"),
        (5, b"\x00", "describes more"),
        (8, b"\xff", "printable ascii"),
        (8, b"\x00", "printable ascii"),
        (8, bytes(16), "printable ascii"),
        (24, b"\xff\xff\xff\xff", "node -1"),
        (36, struct.pack("<d", -1.0), "-1.0 samples"),
        (36, struct.pack("<d", float("nan")), "nan samples"),
        (36, struct.pack("<d", float("inf")), "inf samples"),
        (68, b"\x00", "dtype code 0"),
        (68, b"\x09", "dtype code 9"),
        (69, b"\xff" * 8, "exceeds the limit"),
        (69, struct.pack("<Q", LIMIT // 4 + 1), "exceeds the limit"),
        (77, b"\x01", "describes more"),
    ],
)
def test_damaged_header_is_refused(offset: int, bytes_: bytes, complaint: str) -> None:
    raw = header(torch.ones(3))
    raw[offset : offset + len(bytes_)] = bytes_
    with pytest.raises(WireError, match=complaint):
        frames.decode(raw, LIMIT)


def test_a_place_comes_back() -> None:
    place = frames.MemoryLocation(frames.SHARED_READ, fd=7, serial=2**40, offset=64, slot=3, number=2**50)
    raw = frames.encode_location(bytes(header(torch.ones(3))), place)
    assert raw[:4] == frames.SHARED_MAGIC
    assert frames.decode_location(raw[HEADER_BYTES:]) == place
    with pytest.raises(WireError, match="begins with"):  # only where memory is shared is it understood
        frames.decode(raw[:HEADER_BYTES], LIMIT)


@pytest.mark.parametrize("kind", [0, 7, 255])
def test_an_unknown_kind_of_place_is_refused(kind: int) -> None:
    with pytest.raises(WireError, match=f"kind of memory location {kind}"):
        frames.decode_location(bytes([kind]) + bytes(frames.LOCATION_BYTES - 1))


def test_limit_counts_all_parts_together() -> None:
    raw = header(torch.ones(100), torch.ones(100))
    frames.decode(raw, 800)
    with pytest.raises(WireError, match="800 bytes exceeds the limit of 799"):
        frames.decode(raw, 799)


def test_short_header_is_refused() -> None:
    with pytest.raises(WireError, match=f"got {HEADER_BYTES - 1}"):
        frames.decode(header()[:-1], LIMIT)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message("seventeen-letters"), "tag"),
        (Message(""), "tag"),
        (Message("naïve"), "tag"),
        (Message("a\nb"), "tag"),
        (Message("mask", (torch.ones(1, dtype=torch.bool),)), "torch.bool, which cannot be sent"),
        (Message("many", (torch.ones(1),) * 5), "5 parts"),
        (Message("big", seq=2**63), "does not fit"),
    ],
)
def test_what_no_header_can_say_is_a_value_error(message: Message, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        frames.encode(message, frames.flatten(message.parts), 0)


@pytest.mark.slow
def test_twenty_thousand_damaged_headers_are_refused_or_within_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", None)  # decoding allocates no tensor
    rng = random.Random(0)
    good = header(torch.ones(3), torch.ones(5, dtype=torch.float64))
    for i in range(20_000):
        raw = bytearray(rng.randbytes(HEADER_BYTES)) if i % 4 == 0 else bytearray(good)
        for _ in range(rng.randrange(4)):
            raw[rng.randrange(HEADER_BYTES)] = rng.randrange(256)
        with contextlib.suppress(WireError):
            message, shapes = frames.decode(raw, LIMIT)
            assert sum(dtype.itemsize * n for dtype, n in shapes) <= LIMIT
            assert message.src >= 0
            assert message.tag.isascii()


def test_parts_travel_flat_and_share_memory_where_they_can() -> None:
    flat, matrix, strided = torch.ones(6), torch.ones(2, 3, requires_grad=True), torch.arange(6.0)[::2]
    a, b, c = frames.flatten((flat, matrix, strided))
    assert a.data_ptr() == flat.data_ptr()
    assert b.shape == (6,)
    assert not b.requires_grad
    assert c.tolist() == [0, 2, 4]
    assert len(frames.bytes_of(c)) == 12
