"""shoal.split: what it measures and proposes, and what it refuses."""

import pytest
import torch
from torch import nn

import shoal


def model(layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr("shoal.pipelines.layer_costs.SECONDS", 0.0)


def test_a_proposal_is_printed_and_kept_as_values():
    split = shoal.split(model(), torch.randn(32, 6), stages=2, optimizer=torch.optim.Adam)
    assert repr(split) == f"Split(stages=2, split_points={split.split_points})"
    for word in ("Stages: times", "GPipe", "interleaved 1F1B", "data parallel", "Take "):
        assert word in str(split)
    assert split.record()["microbatches"] == 8  # 4 for each stage
    assert len(split.modules) == 2


def test_the_number_of_microbatches_divides_the_batch():
    assert shoal.split(model(), torch.randn(30, 6), stages=2).proposal.microbatches == 6
    with pytest.raises(ValueError, match="a batch of 30 samples cannot be cut into 4 equal microbatches"):
        shoal.split(model(), torch.randn(30, 6), stages=2, microbatches=4)


def test_every_cut_keeps_to_the_memory():
    x = torch.randn(8, 6)
    whole = shoal.split(model(), x, stages=2).proposal.data_parallel.memory
    split = shoal.split(model(), x, stages=2, memory=round(0.7 * whole))
    assert split.proposal.best_pipeline.memory <= 0.7 * whole
    assert all(c.refusal for c in split.proposal.candidates if c.name.startswith("data parallel"))
    with pytest.raises(ValueError, match="no cut into 2 stages fits devices with 100 B"):
        shoal.split(model(), x, stages=2, memory="100B")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stages": 0}, "stages=0, chunks=2: a pipeline has at least 1 of each"),
        ({"stages": 9}, "8 layers cannot form 9 stages"),
        ({"stages": 2, "memory": "8 boxes"}, "'8 boxes' is not a size of memory; write it as 16GB"),
        ({"stages": 2, "memory": [1, 2, 3]}, "memory names 3 devices, and there are 2 stages"),
        ({"stages": 2, "network": "fast"}, "there is no network 'fast'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        shoal.split(model(), torch.randn(8, 6), **options)


def test_an_unknown_schedule_is_refused_before_any_process_is_asked():
    split = shoal.split(model(), torch.randn(8, 6), stages=2)
    with pytest.raises(ValueError, match=r"unknown schedule '1f2b'\. Did you mean '1f1b'"):
        split.pipeline(nn.functional.mse_loss, "1f2b")


def test_sizes_of_memory():
    from shoal.sim.models import byte_count

    assert [byte_count(text) for text in ("800B", "16GB", "1.5GiB", "3 mb")] == [
        *(800, 16 * 10**9),
        *(3 << 29, 3 * 10**6),
    ]
