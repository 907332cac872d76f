"""Every way to form an average, on real processes: the bits of virtual time, and the weights of stripes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak, sampled
from shoal.collectives import ALGORITHMS
from shoal.collectives.mapped import SMALLEST_MAPPED
from shoal.testing import blobs


def weights(**options) -> torch.Tensor:
    result = shoal.run(blobs(), "sync", epochs=2, **options)
    assert result.model is not None
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), sampled([*ALGORITHMS], [3, 4]))
def test_a_collective_trains_the_model_that_stripes_train(name, workers):
    real = weights(workers=workers, collective=name, transport="processes")
    assert torch.equal(real, weights(workers=workers, collective=name, transport="sim"))
    striped = weights(workers=workers, collective="stripes", transport="sim")
    assert torch.allclose(real, striped, rtol=1e-4, atol=1e-6)  # the order of additions, over some 50 steps


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 3))


@pytest.mark.slow
@pytest.mark.parametrize("word", mostly_soak(["auto", "mapped"], few=1))
def test_averages_in_mapped_memory_have_the_bits_of_stripes_in_virtual_time(word):
    def solution(**options) -> torch.Tensor:
        task = replace(blobs(), model=wide_net)
        result = shoal.run(task, shoal.BMUF(period=4), workers=3, epochs=2, **options)
        assert result.model is not None
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    real = solution(collective=word, transport="processes")
    assert real.nbytes >= SMALLEST_MAPPED
    assert torch.equal(real, solution(collective="stripes", transport="sim"))


@pytest.mark.slow
def test_a_collective_fits_other_strategies_and_gloo():
    local = shoal.run(
        blobs(), shoal.Local(period=4), workers=3, epochs=2, collective="ring", transport="gloo"
    )
    assert local.test_accuracy > 75
