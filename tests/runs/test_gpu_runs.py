"""Every strategy trains on a GPU what it trains on a processor, in real processes that share the GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import shoal
from same_way import check_way, rate
from shoal.replicas.module import build_model
from shoal.strategies import STRATEGIES
from shoal.testing import blobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]

WORKERS = 2
TASK = blobs(dropout=0.0, width=4096)  # half of it is a large message; devices draw other noise
RUNS = [
    (word, transport)
    for word in STRATEGIES
    for transport in ("processes", "gloo", "grpc")
    if word not in ("single", "ensemble", "sandblaster")
    and (word, transport) not in (("hogwild", "gloo"), ("hogwild", "grpc"))  # it shares memory
]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


@cache
def on_the_processor(word: str) -> torch.Tensor:
    """What it trains in virtual time, which is what real processes train."""
    return weights(shoal.run(TASK, word, workers=WORKERS, epochs=3, lr=rate(word), transport="sim").model)


@pytest.mark.whole
@pytest.mark.parametrize(("word", "transport"), RUNS)
def test_a_task_on_a_gpu_trains_as_on_the_processor(word, transport):
    settings = {"workers": WORKERS, "epochs": 3, "transport": transport, "lr": rate(word)}
    trained = weights(shoal.run(TASK, word, device="cuda", **settings).model)
    start = weights(build_model(TASK, 0))
    check_way(word, trained - start, on_the_processor(word) - start)
