"""Weights that a loop changes beside its optimizer are noticed at the next step; Shoal's changes are not."""

from types import SimpleNamespace

import pytest
import torch

from shoal.replicas.outside_changes import STEPS_BETWEEN_READS, OutsideChanges

AT_STEP_7 = SimpleNamespace(t=7)


def take_steps(changes, number, before_step=lambda: None):
    for _ in range(number):
        before_step()
        changes.check()
        changes.begin()


def test_a_change_of_all_weights_is_refused_at_the_next_step():
    x = torch.zeros(50_000)
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    x.fill_(1.0)
    with pytest.raises(ValueError, match=r"beside the attached optimizer before step 7, and ASGD would undo"):
        changes.check()


def test_a_change_of_a_few_weights_is_found_as_the_sample_moves_on():
    x = torch.zeros(5_000)
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    with pytest.raises(ValueError, match="beside the attached optimizer"):
        take_steps(changes, 5, before_step=lambda: x[1234].add_(1.0))


def test_what_shoal_changes_before_it_returns_is_no_change_of_the_loop():
    x = torch.zeros(50)
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    x.fill_(1.0)
    changes.begin()
    changes.check()


def test_weights_that_are_not_finite_or_that_a_rounding_error_moves_have_not_changed():
    x = torch.tensor([1.0, float("nan"), 3.0])
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    changes.check()
    x = torch.tensor([1.0, 0.1, 3.0])
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    x.add_(0.3).sub_(0.3)
    changes.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_a_gpu_a_change_is_refused_when_the_answer_is_read():
    x = torch.zeros(5_000, device="cuda")
    changes = OutsideChanges(x, "ASGD", AT_STEP_7)
    take_steps(changes, 1)
    x.fill_(1.0)
    with pytest.raises(ValueError, match="beside the attached optimizer"):
        take_steps(changes, STEPS_BETWEEN_READS)
