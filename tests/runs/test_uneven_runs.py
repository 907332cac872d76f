"""Workers with different amounts of data finish without a hang, and with the right weights."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from forked import run_warm
from scripts import run_loop
from shoal.core.errors import WorkerFailed

LOOP = Path(__file__).with_name("uneven.py")


def one_machine():
    """`sync` by hand: in each step the workers that still have data, weighted by their samples."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for step in range(12):
        batches = [torch.randn(3 + k, 4, generator=generators[k]) for k in (0, 1) if step < (5, 12)[k]]
        x = torch.cat(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
    return [value for p in model.parameters() for value in p.detach().reshape(-1).tolist()]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(
    ("strategy", "transport"), [("sync", "gloo"), ("sync", "processes"), ("bmuf", "processes")]
)
def test_all_end_with_the_same_model_and_every_sample_counts(strategy, transport):
    lines = run_warm(LOOP, strategy, workers=3, strategy=strategy, transport=transport)
    told = [json.loads(line) for line in lines if '"merged"' in line]
    assert len(told) == 3
    for worker in told:
        assert worker["weights"] == told[0]["weights"]
        assert worker["merged"] == 5 * 3 + 12 * 4
    if strategy == "sync":
        assert told[0]["weights"] == pytest.approx(one_machine(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_synchronous_easgd_refuses_loops_of_different_lengths():
    """A worker that has ended has no force to bring, and the centre would forget it."""
    options = {"strategy": "easgd", "strategy_options": {"synchronous": "true", "period": "3"}}
    with pytest.raises(WorkerFailed, match="all workers must take equally many steps"):
        run_loop(script=Path(__file__).with_name("uneven_loop.py"), workers=2, **options)
