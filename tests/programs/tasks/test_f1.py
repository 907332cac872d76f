"""The F1 score, worked out by hand, and that a run has it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.core.task import UNLABELLED, Data, Task
from shoal.programs.tasks import TASKS
from shoal.programs.tasks.f1 import macro_f1


def says(*classes: int, of: int = 10) -> torch.Tensor:
    """Outputs that are highest at these classes."""
    return F.one_hot(torch.tensor(classes), of).float()


def test_a_class_that_is_never_predicted_has_none():
    #          hits  said  there  F1
    # class 0:  2     3     2     2*2 / 5 = 0.8
    # class 1:  1     2     2     2*1 / 4 = 0.5
    # class 2:  0     0     1     0
    out = says(0, 0, 1, 0, 1, of=3)
    y = torch.tensor([0, 0, 1, 1, 2])
    assert macro_f1(out, y) == pytest.approx(100 * (0.8 + 0.5 + 0.0) / 3)


def test_a_class_that_is_predicted_and_never_there_has_none():
    assert macro_f1(says(0, 1, of=2), torch.tensor([0, 0])) == pytest.approx(100 * (2 / 3 + 0) / 2)


def test_classes_that_are_nowhere_do_not_count():
    assert macro_f1(says(3, 5), torch.tensor([3, 5])) == 100.0


def test_rare_classes_weigh_as_much_as_frequent_ones():
    y = torch.tensor([0] * 98 + [1, 1])
    # class 0: 98 hits, said 100 times, 98 there: 196/198; class 1: none. Accuracy would be 98 %.
    assert macro_f1(says(*[0] * 100, of=2), y) == pytest.approx(100 * (196 / 198) / 2)


def test_places_without_a_label_do_not_count():
    out = torch.stack([says(0, 1, 1, of=2), says(1, 0, 0, of=2)])
    y = torch.tensor([[0, 1, UNLABELLED], [UNLABELLED, 0, 0]])
    assert macro_f1(out, y) == 100.0


def test_a_run_has_it_beside_loss_and_accuracy():
    task = TASKS["mnist-cnn"]()
    x, y = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])
    few = Data(x, y, x, y)
    small = Task("few", task.model, lambda: few, task.loss, task.optimizer, task.lr, 2, metrics=task.metrics)
    result = shoal.run(small, "sync", workers=2, transport="sim")
    with torch.no_grad():
        assert result.metrics == {"F1 %": macro_f1(result.model(x), y)}
    assert result.test_loss > 0 and result.test_accuracy is not None
    assert result.curve[-1]["metrics"] == result.metrics


@pytest.mark.soak
def test_the_network_reads_digits_after_a_few_hundred(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    task = TASKS["mnist-cnn"]()
    try:
        data = task.data()
    except shoal.DataMissing as error:
        pytest.skip(str(error))
    assert data.x.min() == 0.0 and data.x.max() == 1.0
    few = Data(data.x[:1000], data.y[:1000], data.test_x[:200], data.test_y[:200])
    small = Task("few", task.model, lambda: few, task.loss, task.optimizer, task.lr, 25, metrics=task.metrics)
    result = shoal.run(small, "sync", workers=2, transport="sim")
    assert result.test_accuracy > 60  # after 20 steps
    assert result.metrics["F1 %"] == pytest.approx(result.test_accuracy, abs=5)  # classes are about as many
