"""Averages of low rank on real processes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shoal
from shoal.codecs import LowRank
from shoal.testing import blobs


def wide_model():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def weights(**options):
    task = replace(blobs(), model=wide_model, batch=16)
    result = shoal.run(task, "sync", workers=2, epochs=2, codec=LowRank(1), **options)
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.soak  # tests/codecs/low_rank has them in virtual time, test_factor_runs.py others in processes
def test_real_processes_have_the_bits_of_virtual_time_and_an_all_reduce_is_near():
    virtual = weights(transport="sim")
    assert torch.equal(weights(transport="processes"), virtual)
    reduced = weights(transport="gloo", collective="native")
    assert torch.allclose(reduced, virtual, atol=1e-4)  # the order of additions
