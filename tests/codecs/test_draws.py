"""Draws: known words, the same in torch and in a kernel, and a stream that can be taken up again."""

import copy

import numpy as np
import pytest
import torch

from shoal.codecs import draws
from shoal.codecs.draws_cpu import draw


def test_the_first_words_of_seed_zero_are_those_that_are_published():
    # SplitMix64 from 0: e220a8397b1dcdaf, 6e789e6aa1b965f4; the lower half first, without its last byte
    got = (draws.uniform(draws.start(0), 4) * 2**24).int().tolist()
    assert got == [0x7B1DCD, 0xE220A8, 0xA1B965, 0x6E789E]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 1234567890123456789])
def test_a_kernel_draws_the_same(seed):
    state = draws.start(seed)
    for n in (0, 1, 2, 3, 1001):
        out = np.empty(n, np.float32)
        draw(seed, int(state["counter"]), out)
        assert out.tolist() == draws.uniform(state, n).tolist()
        state = draws.after(state, n)
    assert state["counter"].item() == 0 + 1 + 1 + 2 + 501


def test_a_stream_goes_on_from_a_copy_of_its_state():
    state = draws.after(draws.start(3), 10)
    first = draws.uniform(state, 6)
    assert torch.equal(first, draws.uniform(copy.deepcopy(state), 6))
    assert torch.equal(first, draws.uniform(draws.start(3), 16)[10:])
    assert not torch.equal(first, draws.uniform(draws.start(4), 16)[10:])


def test_draws_are_uniform_and_do_not_follow_each_other():
    # 200 000 draws in 64 bins: chi-square of 63 degrees of freedom is below 126 but once in 300 000 times
    n = 200_000
    u = draws.uniform(draws.start(5), n)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - n / 64) ** 2).sum() / (n / 64) < 126
    follow = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
    assert abs(follow) < 5 / n**0.5  # five standard deviations
