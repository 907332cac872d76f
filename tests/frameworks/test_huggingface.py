"""ShoalTrainer: the Trainer of transformers on many workers."""

from __future__ import annotations

import json

import pytest
import torch
from framework_runs import assert_close, needs, run_alone, run_many, said, weights

SCRIPT = "huggingface_trainer.py"
VARIANTS = {
    "plain": {},
    "accumulated": {"arguments": {"gradient_accumulation_steps": 2}},
    "language": {"model": "language", "arguments": {"gradient_accumulation_steps": 2}},
    "bf16": {"arguments": {"bf16": True}},
}

pytestmark = [
    needs("transformers", "huggingface"),
    needs("accelerate", "huggingface"),
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_scripts"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_train_as_one_process_would(variant, tmp_path):
    """One worker to the bit; two with half the batch each up to rounding, also where sentences are uneven."""
    options = VARIANTS[variant]
    plain = run_alone(SCRIPT, tmp_path / "plain", batch=32, **options)
    alone = run_alone(SCRIPT, tmp_path / "alone", batch=32, strategy="sync", **options)
    assert torch.equal(weights(plain), weights(alone))
    first, second = run_many(SCRIPT, tmp_path / "two", batch=16, **options)
    assert torch.equal(weights(first), weights(second))
    rounding = 5e-2 if variant == "bf16" else 2e-4  # AdamW divides by small gradients at first
    assert_close(weights(first), weights(plain), rounding)
    assert json.loads(said(first, "evals")) == pytest.approx(json.loads(said(plain, "evals")), abs=rounding)
    assert said(first, "steps").split()[0] == said(plain, "steps").split()[0]
    assert "'loss'" in first and "'loss'" not in second
    files = {path.name for path in (tmp_path / "plain").rglob("*")}
    assert {path.name for path in (tmp_path / "two").rglob("*")} == files


@pytest.mark.parametrize("launch", ["diloco", "asgd"])
def test_other_strategies_end_with_one_model_that_has_learnt(launch, tmp_path):
    options = {"period": 4} if launch == "diloco" else {"arguments": {"optim": "sgd", "learning_rate": 0.1}}
    first, second = run_many(SCRIPT, tmp_path, launch=launch, batch=8, epochs=4, **options)
    assert torch.equal(weights(first), weights(second))
    evals = json.loads(said(first, "evals"))
    assert evals[-1] < evals[0] or launch == "asgd"
    assert evals == json.loads(said(second, "evals"))  # they decide by the same figures


def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path):
    options = {"batch": 8, "epochs": 3, "arguments": {"train_sampling_strategy": "random"}}
    whole = run_many(SCRIPT, tmp_path / "whole", **options)
    saved = tmp_path / "whole" / "checkpoint-6"
    resumed = run_many(SCRIPT, tmp_path / "rest", **options, resume=str(saved))
    assert torch.equal(weights(whole[0]), weights(resumed[0]))
    assert torch.equal(weights(resumed[0]), weights(resumed[1]))


def test_the_best_checkpoint_is_loaded_at_all_workers(tmp_path):
    options = {"launch": "local", "period": 1000, "batch": 16}
    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    first, second = run_many(SCRIPT, tmp_path, **options, arguments=arguments)
    assert torch.equal(weights(first), weights(second))
    assert said(first, "steps") == said(second, "steps")
    assert (
        len(set(json.loads(said(first, "evals")))) == 1
    )  # nothing is merged before the end: always the start


@pytest.mark.filterwarnings("ignore")
def test_arguments_that_cannot_be_right_are_refused(tmp_path):
    from transformers import TrainingArguments

    from shoal.integrations.huggingface import check_arguments

    def arguments(**options):
        return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)

    check_arguments(arguments(), 2)
    check_arguments(arguments(auto_find_batch_size=True), 1)
    with pytest.raises(ValueError, match="auto_find_batch_size=True may start training anew"):
        check_arguments(arguments(auto_find_batch_size=True), 2)
    both = arguments()
    both.distributed_state = type("State", (), {"num_processes": 2})()
    with pytest.raises(ValueError, match="transformers runs 2 processes itself"):
        check_arguments(both, 2)
