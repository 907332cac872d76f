"""A loop that is resumed goes on in the data that its checkpoint was saved in, or a sentence says so."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.api.attach import attach_at
from shoal.api.attachment import current
from shoal.launch.environment import Place


@pytest.fixture(autouse=True)
def nothing_stays_attached():
    yield
    if current() is not None:
        current().abandon()


class Shuffled:
    """A sampler with an order of its own for each seed."""

    def __init__(self, samples, seed):
        self._order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()

    def __iter__(self):
        return iter(self._order)

    def __len__(self):
        return len(self._order)


def train(folder, *, samples=40, batch=4, seed=0, epochs=2, every=3, stop_after=None):
    """Train, and save every few steps; returns the samples that it learnt from."""
    model, seen = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(samples).float()[:, None])
    loader = DataLoader(data, batch_size=batch, sampler=Shuffled(samples, seed))
    training = attach_at(Place(checkpoint=str(folder), every=every), model, optimizer, "sync")
    for _ in range(epochs):
        for (x,) in shoal.shard(loader):
            if len(seen) == stop_after:
                training.abandon()
                return seen
            optimizer.zero_grad()
            model(x / samples).square().mean().backward()
            optimizer.step()
            seen.append(x.flatten().tolist())
    training.finish()
    return seen


def test_the_same_data_go_on_where_they_were(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "broken", stop_after=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(tmp_path / "broken") == whole[6:]


@pytest.mark.parametrize("stop_after", [8, 14])  # saved after step 6 of the first pass, and 2 of the second
def test_more_or_fewer_samples_are_refused(tmp_path, stop_after):
    train(tmp_path, stop_after=stop_after)
    with pytest.raises(ValueError, match=r"a pass over 40 samples .*, and its loop now reads 48 samples"):
        train(tmp_path, samples=48)


@pytest.mark.parametrize("change", [{"batch": 8}, {"samples": 32}])
def test_so_they_are_where_no_step_is_left(tmp_path, change):
    train(tmp_path, epochs=1, stop_after=8)
    with pytest.raises(ValueError, match="goes on from a checkpoint"):
        train(tmp_path, epochs=1, **change)


@pytest.mark.parametrize(
    ("change", "batches"), [({"batch": 2}, 20), ({"batch": 10}, 4), ({"samples": 80}, 20), ({"seed": 1}, 10)]
)
def test_where_a_pass_was_done_the_next_may_be_another(tmp_path, change, batches):
    train(tmp_path, epochs=1, every=10)
    assert len(train(tmp_path, epochs=2, **change)) == batches


def test_another_order_is_told(tmp_path):
    train(tmp_path, stop_after=8)
    with pytest.warns(UserWarning, match="some come twice in this pass, and some never"):
        train(tmp_path, seed=1)


def test_so_are_other_batches_whose_number_would_say_nothing_of_what_is_left(tmp_path):
    train(tmp_path, stop_after=8)
    with pytest.raises(
        ValueError, match="in batches of 4, and its loop now reads 40 samples in batches of 8"
    ):
        train(tmp_path, batch=8)
