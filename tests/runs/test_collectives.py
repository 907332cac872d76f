"""Every way to form an average, on real processes: the bits of virtual time, and the weights of stripes."""

import pytest
import torch

import shoal
from sampling import sampled
from shoal.collectives import ALGORITHMS
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


@pytest.mark.slow
def test_a_collective_fits_other_strategies_and_gloo():
    local = shoal.run(
        blobs(), shoal.Local(period=4), workers=3, epochs=2, collective="ring", transport="gloo"
    )
    assert local.test_accuracy > 75
