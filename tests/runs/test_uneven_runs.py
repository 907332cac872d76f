"""Workers with different amounts of data finish without a hang, and with the right weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

LOOP = Path(__file__).with_name("uneven.py")


def run(strategy, transport):
    command = [sys.executable, "-m", "shoal", "run", "-n", "3", "--transport", transport]
    done = subprocess.run(
        [*command, "--strategy", strategy, str(LOOP), strategy], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"merged"' in line]


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
@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("sync", "gloo"),
        pytest.param("sync", "processes", marks=pytest.mark.soak),
        pytest.param("bmuf", "processes", marks=pytest.mark.soak),
    ],
)
def test_all_end_with_the_same_model_and_every_sample_counts(strategy, transport):
    told = run(strategy, transport)
    assert len(told) == 3
    for worker in told:
        assert worker["weights"] == told[0]["weights"]
        assert worker["merged"] == 5 * 3 + 12 * 4
    if strategy == "sync":
        assert told[0]["weights"] == pytest.approx(one_machine(), abs=1e-6)
