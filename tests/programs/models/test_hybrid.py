"""What a group of processes computes together is what one process computes: outputs and gradients.

Tolerance: float32 sums in another order; the gradients are of size 0.01 to 1.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from forked import ForkedPython
from ports import free_port
from shoal.programs.models.convolutional import alex_net

RANKS = Path(__file__).with_name("hybrid_ranks.py")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


def differences(*words, processes):
    """What each process printed: for each comparison how far apart the two are."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        ForkedPython(
            [sys.executable, str(RANKS), *words],
            env={**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(processes)
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0] * processes, said
    return [out for out, _ in said]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("word", "comparisons"), [("columns_and_rows", 9), ("hybrid", 4), ("branches", 1), ("pipelines", 4)]
)
def test_a_group_computes_what_one_process_computes(word, comparisons, processes):
    for printed in differences(word, processes=processes):
        assert "nothing to compare" not in printed
        apart = [float(number) for number in re.findall(r"\d+\.\d+(?:e-\d+)?", printed)]
        assert len(apart) == comparisons and max(apart) < 1e-6, printed


@pytest.mark.soak
def test_processes_without_samples_take_part():
    assert "samples 1 of which 0 here" in differences("hybrid", processes=2)[1]


def test_alex_net_has_most_of_its_weights_in_the_classifier():
    with torch.device("meta"):
        features, classifier = alex_net()
    assert sum(p.numel() for p in features.parameters()) == 2_455_872
    assert sum(p.numel() for p in classifier.parameters()) == 33_976_421
    features, classifier = alex_net(classes=7, hidden=5)
    assert classifier(features(torch.zeros(2, 3, 64, 64))).shape == (2, 7)
