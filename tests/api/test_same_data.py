"""shard() deals positions: what they stand for must be the same at all workers, or a sentence says so."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from sampling import mostly_soak
from scripts import run_loop
from shoal.core.errors import WorkerFailed
from shoal.replicas.passes import PassMark

run = partial(run_loop, script=Path(__file__).with_name("whose_data.py"))

pytestmark = pytest.mark.usefixtures("warm_scripts")


@pytest.mark.parametrize("strategy", mostly_soak(["sync", "asgd", "bmuf", "gossip"], few=2))
def test_a_split_without_a_seed_is_refused(strategy):
    with pytest.raises(WorkerFailed, match=r"worker 1 reads 80 samples in batches of 8, .*; seed the split"):
        run("--data", "split", strategy=strategy)


@pytest.mark.parametrize(("data", "what"), [("sampled", "80 samples in batches of 8"), ("sizes", "of 9")])
def test_so_are_other_samples_and_other_batches(data, what):
    with pytest.raises(WorkerFailed, match=f"the workers' data differ: worker 1 reads .*{what}"):
        run("--data", data)


def test_a_look_at_a_batch_by_one_worker_is_refused():
    with pytest.raises(
        WorkerFailed, match="worker 1 takes its first step in pass 1 over the data, and worker 0 in pass 2"
    ):
        run("--peek")


@pytest.mark.parametrize("data", mostly_soak(["split", "shares", "stream", "batches", "few batches"], few=3))
def test_data_that_are_the_same_or_nobody_else_s_are_not(data):
    seeded = ["--seeded"] if data == "split" else []
    assert all("trained" in text for text in run("--data", data, *seeded, workers=2))


@pytest.mark.parametrize("data", mostly_soak(["stream", "subclass", "seeded subclass"], few=2))
def test_another_first_batch_of_a_loader_that_is_read_whole_is_told(data):
    first, second = run("--data", data)
    assert "another first batch" not in first
    assert ("worker 1 reads another first batch than worker 0" in second) is (data != "seeded subclass")


def mark(dataset=None, order=range(80)):
    return PassMark.of(0, list(order), 8, False, dataset)


def test_a_mark_tells_subsets_apart_however_deep_their_indices_lie():
    one, other = Subset([], range(80)), Subset([], range(20, 100))
    assert mark(one).difference(mark(other)) is not None
    assert mark(Subset(one, range(80))).difference(mark(Subset(other, range(80)))) is not None
    assert mark(ConcatDataset([one])).difference(mark(ConcatDataset([other]))) is not None
    for kind in (list, torch.tensor, np.array):
        assert mark(Subset([], kind(list(one.indices)))) == mark(one)


def test_a_mark_is_the_same_in_every_process_whatever_a_sampler_yields():
    assert mark(order=[object()] * 80) == mark(order=[object()] * 80)
    assert mark(order=torch.arange(80)) == mark(order=np.arange(80)) == mark()


def test_a_data_set_that_holds_itself_has_a_mark():
    knot = Subset([], range(80))
    knot.dataset = knot
    assert mark(knot) == mark(knot)
