"""What is measured on the test set: loss, accuracy, a task's own metrics; labels that do not count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
import shoal.runs.evaluation
from shoal.core.task import UNLABELLED, Data, Task, sequence_loss
from shoal.programs.tasks import TASKS
from shoal.replicas.module import build_model, build_replica
from shoal.runs.evaluation import evaluate
from shoal.strategies.single import Single


def unit() -> nn.Module:
    return nn.Identity()


def no_data() -> Data:
    return Data(torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0, 2), torch.zeros(0).long())


def measured(x: Tensor, y: Tensor, task: Task) -> shoal.runs.evaluation.Score:
    return evaluate(nn.Identity(), task, Data(x[:0], y[:0], x, y))


def test_loss_accuracy_and_metrics_of_classes() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    task = Task("t", unit, no_data, metrics={"largest": lambda out, y: float(out.max()) + len(y)})
    score = measured(logits, labels, task)
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert score.loss == pytest.approx((2 * right + wrong) / 3)
    assert score.accuracy == pytest.approx(200 / 3)
    assert score.metrics == {"largest": 5.0}


def test_labels_that_do_not_count_weigh_nothing() -> None:
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    labels = logits.argmax(-1)
    labels[0, 0] = (labels[0, 0] + 1) % 5  # one of eleven is wrong
    labels[2, 3] = UNLABELLED
    score = measured(logits, labels, Task("t", unit, no_data, loss=sequence_loss))
    assert score.accuracy == pytest.approx(1000 / 11)
    assert score.loss == pytest.approx(float(sequence_loss(logits, labels)))


def test_long_test_sets_are_weighed_by_what_counts_in_each_part() -> None:
    logits = torch.randn(1500, 2, 3, generator=torch.Generator().manual_seed(2))
    labels = torch.zeros(1500, 2).long()
    labels[:1000, 1] = UNLABELLED  # the first part has 1,000 labels, the second as many
    score = measured(logits, labels, Task("t", unit, no_data, loss=sequence_loss))
    assert score.loss == pytest.approx(float(sequence_loss(logits, labels)), rel=1e-6)


def test_numbers_are_no_classes() -> None:
    score = measured(torch.ones(4, 1), torch.zeros(4, 1), Task("t", unit, no_data, loss=F.mse_loss))
    assert score.accuracy is None and score.loss == 1.0


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def four() -> Data:
    x = torch.arange(8.0).view(4, 2)
    return Data(x, torch.tensor([0, 1, 0, 1]), x, torch.tensor([0, 1, 0, 1]))


def shifted(x: Tensor) -> Tensor:
    return x + torch.rand(())


def mean_of(out: Tensor, y: Tensor) -> float:
    return out.mean().item()


async def gradient_of(task: Task, seed: int) -> Tensor:
    replica = build_replica(task, build_model(task, 0), four(), Single(), 0, 1, seed)
    return (await replica.gradient()).vector.clone()


def test_augmented_inputs_are_learnt_from_and_drawn_from_the_replicas_own_stream() -> None:
    def once(augment: object, seed: int = 0) -> Tensor:
        task = Task("t", linear, four, augment=augment)  # type: ignore[arg-type]
        coroutine = gradient_of(task, seed)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a replica waits for nobody")

    before = torch.get_rng_state()
    plain, first, again = once(None), once(shifted), once(shifted)
    assert not torch.equal(plain, first)
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


def test_metrics_reach_result_record_and_curve() -> None:
    task = Task("t", linear, four, batch=2, metrics={"mean output": mean_of})
    result = shoal.run(task, "sync", workers=2, epochs=2, transport="sim")
    assert list(result.metrics) == ["mean output"]
    assert result.record()["metrics"] == result.curve[-1]["metrics"] == result.metrics
    assert result.metrics["mean output"] == pytest.approx(mean_of(result.model(four().test_x), four().y))


def test_a_task_elsewhere_is_the_same_task() -> None:
    task = Task("t", linear, four, batch=2)
    moved = task.on("cpu")
    assert moved.data().x.device.type == "cpu" and moved.name == "t"
    here, there = (shoal.run(t, "sync", workers=2, epochs=2, transport="sim") for t in (task, moved))
    assert here.digest == there.digest


def test_parts_that_were_left_in_eval_mode_stay_there() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())
    labels = torch.tensor([0, 1])
    evaluate(model, Task("t", unit, no_data), Data(torch.zeros(0, 2), labels[:0], torch.zeros(2, 2), labels))
    assert [module.training for module in model.modules()] == [True, False, True]


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.parametrize("transport", ["sim", "processes"])
@pytest.mark.parametrize("strategy", ["asgd", "bmuf", "easgd"])
def test_the_statistics_of_batch_norm_are_the_workers_mean(strategy, transport):
    task = replace(TASKS.make("digits"), model=normed)
    result = shoal.run(task, strategy, workers=2, epochs=1, transport=transport, threads=1)
    norm = result.model[2]
    assert norm.num_batches_tracked == 23  # worker 0's: half of 1,437 samples in batches of 32
    assert float(norm.running_var.std()) > 0.01  # it was 1 everywhere
    alone = shoal.run(task, "single", epochs=1, transport="sim").model[2]
    assert torch.allclose(norm.running_mean, alone.running_mean, atol=1.0)


class Centred(nn.Module):
    """Subtracts a running mean that it keeps as a parameter nobody trains, as Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.moving_mean = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.moving_mean += 0.1 * (x.mean(0) - self.moving_mean)
        return x - self.moving_mean


def centred() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Centred(), nn.Linear(64, 10))


@pytest.mark.parametrize("transport", ["sim", "processes"])
def test_statistics_that_are_parameters_are_the_workers_mean_too(transport):
    task = replace(TASKS.make("digits"), model=centred)
    result = shoal.run(task, "sync", workers=2, epochs=1, transport=transport, threads=1)
    x = task.data().x.flatten(1)
    assert torch.allclose(result.model[1].moving_mean, x.mean(0), atol=0.5)
    assert float(result.model[1].moving_mean.abs().max()) > 0.1  # it was 0 everywhere
