"""The gradient noise scale: identities of its estimators, and a case whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.task import Data, Task
from shoal.planning.noise_scale import LEAST_UPDATES, NoiseScale, estimates, measure_noise, useful_workers


def test_estimates_worked_out_by_hand():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert estimates([one, other], 1) == (1.0, 0.0)  # orthogonal, of one length: nothing in common
    assert estimates([one, one], 8) == (0.0, 1.0)  # the same everywhere: no noise


def test_a_known_noise_scale_is_found_and_the_scale_of_the_loss_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    slope, spread, samples = torch.full((100,), 0.1), 3.0, 256  # |G|^2 = 1, tr Sigma = 900
    for scale in (1.0, 7.0):
        noise = NoiseScale()
        for _ in range(1000):
            parts = [slope + spread / samples**0.5 * torch.randn(100, generator=generator) for _ in range(2)]
            noise.add([scale * part for part in parts], samples)
        assert noise.value == pytest.approx(900, rel=0.25)


def test_nothing_is_told_too_early():
    noise = NoiseScale()
    for _ in range(LEAST_UPDATES - 1):
        noise.add([torch.ones(3), torch.ones(3)], 4)
    assert noise.value is None
    noise.add([torch.ones(3), torch.ones(3)], 4)
    assert noise.value == 0


def test_a_loss_that_is_no_number_has_no_noise_scale():
    noise = NoiseScale()
    for k in range(LEAST_UPDATES):
        noise.add([torch.full((3,), float("nan") if k == 1 else 1.0), torch.ones(3)], 4)
    assert noise.value is None


def test_a_batch_of_one_sample_makes_no_update():
    task = Task("t", lambda: nn.Linear(1, 1), lambda: Data(*[torch.zeros(4, 1)] * 4), batch=1)
    assert measure_noise(task, task.data()).updates == 0


def test_it_says_how_many_workers_are_of_use():
    assert useful_workers(900, 64) == (14, 56)
    assert useful_workers(10, 64) == (1, 1)
