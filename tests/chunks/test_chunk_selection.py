"""Kernels that update an error and select its largest elements give the bits of the lines of torch."""

from functools import partial

import pytest
import torch

from shoal.chunks import bits, chunk_selection
from shoal.chunks.bits import bytes_of, from_bytes, to_bytes
from shoal.chunks.chunk_selection import ChunkSelection, largest_places
from shoal.core.parameter_chunks import chunks_of
from shoal.core.vector import Layout
from shoal.strategies import SparseLoCo

SHAPES = {"w": (128, 192), "b": (128,), "k": (20, 3, 5, 5), "one": (1,), "v": (7, 130), "odd": (97,)}
LAYOUT = Layout(tuple(SHAPES), tuple(map(torch.Size, SHAPES.values())))
DECAY = 0.95
KINDS = ["normal", "ties", "zeros", "scales", "inf", "nan"]


def selection(density, side=64):
    chunks = tuple(chunks_of(LAYOUT.pieces(0, LAYOUT.numel), side))
    return ChunkSelection(chunks, tuple(max(1, round(each.length * density)) for each in chunks))


def vectors(kind, seed=0):
    chance = torch.Generator().manual_seed(seed)
    error, start, x = (torch.randn(LAYOUT.numel, generator=chance) for _ in range(3))
    if kind == "ties":
        return error.round(), start.round(), x.round()
    if kind == "zeros":
        return error * 0, start, start.clone()
    if kind == "scales":  # from one chunk to the next
        return error * 10 ** torch.linspace(-30, 10, LAYOUT.numel), start * 0, x * 0
    if kind in ("inf", "nan"):
        x[5000] = float(kind)
    return error, start, x


@pytest.fixture
def in_lines_of_torch(monkeypatch):
    def without_kernels(work):
        with monkeypatch.context() as patch:
            patch.setattr(ChunkSelection, "_kernel", lambda *_: None)
            return work()

    return without_kernels


@pytest.fixture(autouse=True)
def kernels_for_few_elements(monkeypatch):
    monkeypatch.setattr(chunk_selection, "MANY", 1)


def kernel_for(chosen, given):
    return chosen._kernel(*given)


def check_kernel(in_lines_of_torch, kind, device):
    for density in (1 / 32, 0.4, 1.0):
        chosen, errors, places = selection(density), [], []
        for run in (lambda work: work(), in_lines_of_torch):
            given = error, start, x = [vector.to(device) for vector in vectors(kind)]
            assert (run(partial(kernel_for, chosen, given)) is None) == (run is in_lines_of_torch)
            places.append(run(partial(chosen.update, error, DECAY, start, x)))
            errors.append(error)
        torch.testing.assert_close(*errors, rtol=0, atol=0, equal_nan=True)
        assert all(map(torch.equal, *places))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_kernel_updates_and_selects_the_same_bits(in_lines_of_torch, kind):
    check_kernel(in_lines_of_torch, kind, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_kernel_updates_and_selects_the_same_bits(in_lines_of_torch, kind):
    check_kernel(in_lines_of_torch, kind, "cuda")


@pytest.mark.parametrize("values", ["2bit", "8bit", "signmag", "exact"])
def test_what_travels_and_what_is_kept_are_the_same_bits(in_lines_of_torch, values):
    strategy, chosen, results = SparseLoCo(values=values), selection(1 / 32), []
    for run in (lambda work: work(), in_lines_of_torch):
        error, start, x = vectors("normal")
        places = run(partial(chosen.update, error, DECAY, start, x))
        results.append((*strategy._encode(chosen, error, places), error))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_equal_elements_the_first_are_selected(dtype):
    rows = torch.tensor([[1, -3, 3, 0, -3, 3], [0, 0, 0, 0, 0, 0], [2, 1, -1, 1, torch.nan, 1]], dtype=dtype)
    assert largest_places(rows, 3).tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 4]]


def test_positions_are_those_of_the_elements_that_a_chunk_has_there():
    v = torch.arange(float(LAYOUT.numel))
    for each in chunks_of(LAYOUT.pieces(0, LAYOUT.numel), 16):
        places = torch.arange(each.length).expand(each.number, -1)
        assert torch.equal(v[each.positions(places)], each.cut(v))


@pytest.mark.parametrize("width", [1, 2, 7, 12, 23])
def test_a_kernel_writes_integers_into_the_same_bytes(monkeypatch, width):
    numbers = torch.randint(0, 2**width, (1001,), generator=torch.Generator().manual_seed(width))
    plain = to_bytes(numbers, width)
    monkeypatch.setattr(bits, "MANY", 1)
    assert bits._has_kernel(numbers, 1001, width)
    packed = to_bytes(numbers, width)
    assert packed.numel() == bytes_of(1001, width) and torch.equal(packed, plain)
    assert torch.equal(from_bytes(packed, width, 1001), numbers)
