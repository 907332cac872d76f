"""Keras on torch: a Keras model is a torch module, for a loop of your own with an optimizer of torch."""

from __future__ import annotations

import pytest
import torch
from framework_runs import assert_close, needs, run_alone, run_many, weights

SCRIPT = "keras_loop.py"

pytestmark = [needs("keras"), pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


def test_workers_train_a_keras_model_as_one_process_would(tmp_path):
    plain = run_alone(SCRIPT, tmp_path, batch=32)
    first, second = run_many(SCRIPT, tmp_path, batch=16)
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(plain))


def test_workers_end_with_the_same_statistics(tmp_path):
    """Keras keeps those of BatchNormalization as parameters, not as buffers."""
    first, second = run_many(SCRIPT, tmp_path, batch=16, norm=True, launch="bmuf")
    assert torch.equal(weights(first), weights(second))
