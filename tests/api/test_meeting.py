"""Meeting: workers exchange small values, whatever their strategy waits for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import shoal
from scripts import run_loop
from shoal.api.meeting import Meeting
from shoal.api.shard import DealtBatches, dealt_loader
from shoal.launch.environment import Place

SCRIPT = Path(__file__).with_name("meets.py")
MET = "met ['node 0', 'node 1'] [[3.0, 0.0, 2], [3.0, 2.0, 2], [3.0, 4.0, 2]] {'path': 'of 1'} [0, 1]"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(("strategy", "steps"), [("sync", "even"), ("asgd", "uneven"), ("adpsgd", "uneven")])
def test_workers_meet_before_while_and_after_they_train(strategy, steps):
    """Under adpsgd a worker may wait for an answer of one that waits in a meeting, which must answer."""
    assert run_loop(steps, script=SCRIPT, strategy=strategy) == [MET, MET]


def test_a_single_worker_meets_itself():
    meeting = Meeting(Place(), 1)
    assert meeting.gather([1, "a"]) == [[1, "a"]]
    assert meeting.broadcast("mine") == "mine"
    total, workers = meeting.total(torch.tensor(2.0))
    assert float(total) == 2.0 and workers == 1


def test_what_json_cannot_write_is_refused():
    with pytest.raises(TypeError, match="workers cannot exchange 'set', only what JSON can write"):
        Meeting(Place(), 1).gather({1, 2})


def test_processes_without_a_store_are_told_how_to_start():
    with pytest.raises(ValueError, match="start them with `shoal run` or torchrun"):
        Meeting(Place(0, 2, launched="mpi", transport="mpi"), 2).barrier()


# -- a share as a batch sampler ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "drop_last": True}]
)
def test_dealt_loaders_hand_out_every_sample_once(options):
    whole = DataLoader(list(range(23)), 4, **options)
    shares = [dealt_loader(whole, (rank, 3)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    passes = []
    for _ in range(2):
        passes.append([int(i) for share in shares for batch in share for i in batch])
        assert len(set(passes[-1])) == len(passes[-1]) == (12 if options.get("drop_last") else 23)
    assert (passes[0] != passes[1]) == options["shuffle"]
    for share in shares:
        share.batch_sampler.set_epoch(0)
    assert [int(i) for share in shares for batch in share for i in batch] == passes[0]


def test_the_pass_is_told_to_a_sampler_that_asks_for_it():
    class Told(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Told(range(8))
    DealtBatches(DataLoader(range(8), 2, sampler=sampler), (0, 2)).sampler.set_epoch(5)
    assert sampler.epoch == 5


def test_what_cannot_be_dealt_in_equal_numbers_is_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from range(9)

    data = list(range(21))
    with pytest.raises(ValueError, match="Endless or its loader says only while it is read"):
        DealtBatches(DataLoader(Endless()), (0, 2))
    odd = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False))
    with pytest.raises(ValueError, match="7 batches of its own batch sampler, which 2 workers cannot share"):
        DealtBatches(odd, (0, 2))
    with pytest.raises(ValueError, match="no batch size"):
        DealtBatches(DataLoader(data, batch_size=None), (0, 2))


# -- wrappers ----------------------------------------------------------------------------------------


def test_a_model_that_somebody_else_synchronises_is_refused(monkeypatch):
    """Two would average it; a single worker may keep the wrapper."""

    class DistributedDataParallel(nn.Sequential):
        """By its name, as torch's own needs a process group."""

    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((name, value),) = Place(0, 2, launched="shoal", store="nowhere").to_environment().items()
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("shoal.api.attach._was_launched", False)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel, which synchronises it already"):
        shoal.attach(model, optimizer)
