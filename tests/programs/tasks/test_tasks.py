"""The built-in tasks: what every one of them promises, and that they learn."""

from __future__ import annotations

import importlib.util
import pickle

import pytest
import torch

from shoal.core.errors import DataMissing, Unavailable
from shoal.core.task import Data, Task
from shoal.programs.models.hybrid import halves
from shoal.programs.tasks import TASKS
from shoal.programs.tasks.data import find
from shoal.programs.tasks.images import FASHION_MNIST, MNIST

SHAPES = {
    "digits": (64,),
    "mnist": (784,),
    "mnist-cnn": (1, 28, 28),
    "mnist-deep": (784,),
    "fashion-mnist": (1, 28, 28),
}
PARAMETERS = {
    "digits": 9_610,
    "mnist": 269_322,
    "mnist-cnn": 1_111_946,
    "mnist-deep": 4_625_930,
    "fashion-mnist": 20_490,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests read what is there; they never fetch."""
    monkeypatch.setenv("SHOAL_OFFLINE", "1")


def data_or_skip(task: Task) -> Data:
    try:
        return task.data()
    except (DataMissing, Unavailable) as error:
        pytest.skip(str(error))


def accuracy(task: Task, data: Data, epochs: int, workers: int = 1, seed: int = 0) -> float:
    """Test accuracy after plain SGD, whose batch is what `workers` synchronous workers take together."""
    order = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.lr)
    for _ in range(epochs):
        for picked in torch.randperm(len(data.x), generator=order).split(task.batch * workers):
            optimizer.zero_grad()
            task.loss(model(data.x[picked]), data.y[picked]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(data.test_x).argmax(1) == data.test_y).float().mean().item()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_carries_the_name_it_is_listed_under(name: str) -> None:
    task = TASKS[name]()
    assert task.name == name
    assert task.about and "\n" not in task.about


@pytest.mark.parametrize("name", TASKS)
def test_a_task_and_its_factory_travel_to_another_process(name: str) -> None:
    task = TASKS[name]()
    assert pickle.loads(pickle.dumps(task)) == task
    assert pickle.loads(pickle.dumps(TASKS[name])) is TASKS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_the_model_takes_one_example_and_answers_ten_classes(name: str) -> None:
    model = TASKS[name]().model()
    assert model(torch.zeros(2, *SHAPES[name])).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    "name",
    [name if name != "caltech-large" else pytest.param(name, marks=pytest.mark.soak) for name in TASKS],
)
def test_the_model_begins_alike_from_a_like_seed(name: str) -> None:
    with torch.random.fork_rng():
        starts = []
        for _ in range(2):
            torch.manual_seed(7)
            starts.append(torch.cat([p.detach().flatten() for p in TASKS[name]().model().parameters()]))
    assert torch.equal(*starts)


def test_digits_are_1437_and_360_vectors_of_64() -> None:
    data = data_or_skip(TASKS["digits"]())
    assert data.x.shape == (1437, 64)
    assert data.test_x.shape == (360, 64)
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert data.x.min() == 0.0 and data.x.max() == 1.0
    assert data.y.unique().tolist() == data.test_y.unique().tolist() == list(range(10))


def test_digits_are_split_alike_whatever_the_global_seed() -> None:
    task = TASKS["digits"]()
    first = data_or_skip(task)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        before = torch.get_rng_state()
        second = task.data()
        assert torch.equal(torch.get_rng_state(), before)  # and the global generator is left alone
    for name in ("x", "y", "test_x", "test_y"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.test_y[:10].tolist() == [6, 5, 5, 7, 9, 9, 8, 4, 6, 8]


def test_without_scikit_learn_digits_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        Unavailable, match=r"needs scikit-learn. Install it with: pip install 'shoal\[digits\]'"
    ):
        TASKS["digits"]().data()


@pytest.mark.slow
def test_digits_are_learnt() -> None:
    task = TASKS["digits"]()
    assert accuracy(task, data_or_skip(task), epochs=5) > 0.93


@pytest.mark.slow
def test_digits_are_learnt_by_four_synchronous_workers() -> None:
    task = TASKS["digits"]()
    assert accuracy(task, data_or_skip(task), epochs=5, workers=4) > 0.80


LABEL_COUNTS = {
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "fashion-mnist": [6000] * 10,
}


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_image_sets_are_whole_and_normalised(name: str) -> None:
    data = data_or_skip(TASKS[name]())
    assert data.x.shape == (60_000, *SHAPES[name])
    assert data.test_x.shape == (10_000, *SHAPES[name])
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert data.y.bincount().tolist() == LABEL_COUNTS[name]
    assert data.x.mean().item() == pytest.approx(0.0, abs=1e-3)  # the constants are given to four digits
    assert data.x.std().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_the_image_sets_on_this_machine_are_the_published_ones() -> None:
    found = 0
    for dataset in (MNIST, FASHION_MNIST):
        try:
            found += len(find(dataset))
        except DataMissing as error:
            if "is in none of" not in str(error):
                raise
    if not found:
        pytest.skip("neither MNIST nor Fashion-MNIST is on this machine")


@pytest.mark.soak
@pytest.mark.usefixtures("offline")
def test_mnist_is_learnt_in_one_epoch() -> None:
    task = TASKS["mnist"]()
    assert accuracy(task, data_or_skip(task), epochs=1) > 0.94


def test_half_of_the_pairs_are_of_one_number() -> None:
    data = TASKS["digit-pairs"]().data()
    assert data.x.shape == (2 * 1437, 2, 8, 8) and data.test_x.shape == (2 * 360, 2, 8, 8)
    assert data.y.float().mean() == data.test_y.float().mean() == 0.5
    digits = TASKS["digits"]().data()
    number = {tuple(x.tolist()): int(y) for x, y in zip(digits.x, digits.y, strict=True)}
    pairs = [[number[tuple(one.flatten().tolist())] for one in both] for both in data.x]
    assert [int(a == b) for a, b in pairs] == data.y.tolist()
    assert not any(torch.equal(a, b) for a, b in data.x)


def test_alexnet_is_a_chain_of_convolutions_and_a_classifier() -> None:
    model = TASKS.read("caltech-alexnet:hidden=64").model()
    features, classifier = halves(model)
    assert sum(p.numel() for p in features.parameters()) == 2_455_872
    assert sum(p.numel() for p in classifier.parameters()) == 4096 * 64 + 64 + 64 * 64 + 64 + 64 * 101 + 101
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 101)
