"""Two bytes an element: the kernels give what torch gives, bit for bit."""

import gc
import mmap
import weakref

import pytest
import torch

from shoal.codecs import BF16, FP16
from shoal.codecs.halves import codec as halves
from shoal.codecs.halves import cpu
from shoal.kernels import dispatch

STRANGE = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 65519.9, 65520.0]
STRANGE += [1e9, -1e9, 3e38, -3e38, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 1e-40, -1e-45, 1 + 2.0**-11]
STRANGE += [1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20]


def drawn(length):
    """Of all sizes, and all that is strange in front."""
    chance = torch.Generator().manual_seed(length)
    v = torch.randn(length, generator=chance) * 10 ** (8 * torch.randn(length, generator=chance))
    v[: len(STRANGE)] = torch.tensor(STRANGE)[:length]
    return v


def same(one, other, bits):
    """What is not a number may be written in many ways; all else in one."""
    known = ~one.isnan()
    return torch.equal(known, ~other.isnan()) and torch.equal(one.view(bits)[known], other.view(bits)[known])


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=["fp16", "bf16"])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 33, 1000, 65_536, 100_003])
def test_kernels_give_the_bits_of_the_lines_of_torch(monkeypatch, codec, length):
    monkeypatch.setattr(halves, "LARGE", 0)
    v = drawn(length)
    (header, short), _ = codec.encode(v, {})
    out = codec.decode((header, short), torch.empty(length))
    monkeypatch.setattr(dispatch, "_has_numba", lambda: False)
    (_, plain), _ = codec.encode(v, {})
    assert short.dtype == plain.dtype
    assert same(short, plain, torch.int16)
    assert same(out, codec.decode((header, short), torch.empty(length)), torch.int32)


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=["fp16", "bf16"])
def test_every_number_of_two_bytes_comes_back(codec):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    v = every.view(torch.float16 if isinstance(codec, FP16) else torch.bfloat16).float()
    (_, again), _ = codec.encode(v, {})
    kept = v.isfinite() if isinstance(codec, FP16) else ~v.isnan()
    assert torch.equal(again.view(torch.int16)[kept], every[kept])


def test_the_vector_may_need_gradients_and_lie_anywhere_in_memory():
    v = torch.arange(100_000.0)
    for codec in (FP16(), BF16()):
        for other in (v.clone().requires_grad_(), torch.arange(0, 100_000, 0.5)[::2]):
            (_, short), _ = codec.encode(other, {})
            assert torch.equal(short.float(), codec.encode(v, {})[0][1].float())


@pytest.fixture
def mapped(monkeypatch):
    """What was mapped, without keeping it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("Linux has large pages")
    maps = []

    class Watched(mmap.mmap):
        def __init__(self, *args):
            maps.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    return maps


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=["fp16", "bf16"])
def test_what_lies_in_large_pages_is_the_same(monkeypatch, mapped, codec):
    monkeypatch.setattr(halves, "LARGE", 0)
    v = drawn(100_003)
    (_, small), _ = codec.encode(v, {})
    monkeypatch.setattr(cpu, "LARGE_PAGES", 0)
    (_, large), _ = codec.encode(v, {})
    assert len(mapped) == 1
    assert same(small, large, torch.int16)
    assert not large.zero_().any()  # it may be written to, as any tensor


def test_large_pages_are_given_back(mapped):
    short = cpu.empty(cpu.LARGE_PAGES, torch.bfloat16)
    assert short.numel() == cpu.LARGE_PAGES and [memory() is not None for memory in mapped] == [True]
    del short
    gc.collect()
    assert [memory() for memory in mapped] == [None]


def test_where_there_are_no_large_pages_small_ones_will_do(monkeypatch):
    def refuse(*args):
        raise OSError("none left")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cpu.empty(cpu.LARGE_PAGES, torch.float16).numel() == cpu.LARGE_PAGES


def test_what_is_out_of_range_in_brain_floats_becomes_the_largest_half():
    v = torch.tensor([1e5, -3e38, 65504.0, 2.0], dtype=torch.bfloat16)
    payload, _ = FP16().encode(v, {})
    assert FP16().decode(payload, torch.empty(4)).tolist() == [65504.0, -65504.0, 65504.0, 2.0]
