"""A step of a task, measured: how long it takes, and what of that does not depend on the batch."""

import pytest

from shoal.profiling import step
from shoal.programs.tasks import TASKS


def times(monkeypatch, of_batch):
    monkeypatch.setattr(step, "_time", lambda task, *_: [of_batch(task.batch)] * 10)


@pytest.mark.parametrize("batch", [64, 65])
def test_what_half_a_batch_takes_too_is_fixed(monkeypatch, batch):
    times(monkeypatch, lambda samples: 1.0 + samples * 3.0 / batch)
    found = step.measure_step(TASKS.make("digits").but(batch))
    assert found.seconds == pytest.approx(4.0)
    assert found.fixed == pytest.approx(0.25)
    assert found.compute().of(batch, batch) == pytest.approx(1.0)
    assert found.compute().of(batch * 2, batch) * 4.0 == pytest.approx(7.0)


def test_a_share_is_a_share_whatever_the_noise(monkeypatch):
    times(monkeypatch, lambda samples: 1.0 if samples == 64 else 2.0)
    assert step.measure_step(TASKS.make("digits").but(64)).fixed == 1.0
    times(monkeypatch, lambda samples: 1.0 if samples == 64 else 0.1)
    assert step.measure_step(TASKS.make("digits").but(64)).fixed == 0.0


def test_a_batch_of_one_has_no_half(monkeypatch):
    times(monkeypatch, lambda samples: 1.0)
    assert step.measure_step(TASKS.make("digits").but(1)).fixed == 0.0


def test_a_real_step_takes_time(monkeypatch):
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.02)
    found = step.measure_step(TASKS.make("digits"))
    assert found.seconds > 0
    assert found.steps >= step.LEAST_STEPS
