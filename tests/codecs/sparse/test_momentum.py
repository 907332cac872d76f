"""Momentum and selection in one pass: the bits of one operation after the other."""

import pytest
import torch

from shoal.codecs.sparse import dgc
from shoal.codecs.sparse.dgc import pushed


def vectors(elements, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(3)]


def both(waiting, velocity, g, nesterov, k, monkeypatch):
    """What the kernel and the lines of torch make of the same: waiting, velocity, positions, values."""
    results = []
    for fits in (True, False):
        v, u = waiting.clone(), velocity.clone()
        with monkeypatch.context() as patch:
            if not fits:
                patch.setattr(dgc, "fit_kernel", lambda *tensors: False)
            results.append((v, u, *pushed(v, u, g, 0.9, nesterov, k)))
    return results


def test_by_hand():
    v, u = torch.tensor([4.0, 3.0, 0.0, 0.0]), torch.tensor([4.0, 3.0, -20.0, 0.0])
    g = torch.tensor([4.0, 3.0, 0.0, 0.0])
    positions, values = pushed(v, u, g, 0.5, False, 1)
    assert u.tolist() == [6.0, 4.5, -10.0, 0.0]  # u / 2 + g
    assert v.tolist() == [10.0, 7.5, -10.0, 0.0]  # v + u
    assert (positions.tolist(), values.tolist()) == ([0], [10.0])  # of equal ones the first
    positions, values = pushed(v, u, g, 0.5, True, 1)
    assert u.tolist() == [5.0, 3.75, -5.0, 0.0]  # (u + g) / 2
    assert v.tolist() == [19.0, 14.25, -15.0, 0.0]  # v + u + g
    assert (positions.tolist(), values.tolist()) == ([0], [19.0])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("elements", [1, 4095, 4096, 4097, 300_001])
def test_kernel_and_torch_have_the_same_bits(elements, nesterov, monkeypatch):
    for k in {1, max(1, elements // 1000), elements // 3 + 1, elements}:
        fast, slow = both(*vectors(elements, k), nesterov, k, monkeypatch)
        assert all(map(torch.equal, fast, slow))


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_wrong_guess_changes_nothing_and_pushes_once(nesterov, monkeypatch):
    waiting, velocity, g = vectors(50_000, 0)
    few = waiting.clone() * 1e-3
    few[::4] *= 1e6  # just the elements that are looked at: too few are as large
    for guessed in (few, few.flip(0), torch.zeros(50_000), torch.ones(50_000)):
        for k in (20, 20_000):
            fast, slow = both(guessed, velocity * 0, g * 0, nesterov, k, monkeypatch)
            assert all(map(torch.equal, fast, slow))
            fast, slow = both(guessed, velocity, g, nesterov, k, monkeypatch)
            assert all(map(torch.equal, fast, slow))


def test_the_gradient_is_left_as_it_was():
    waiting, velocity, g = vectors(5000, 1)
    before = g.clone()
    pushed(waiting, velocity, g, 0.9, True, 5)
    assert torch.equal(g, before)
